"""The bundle of the real lock, joined in an empty folder by the GPU profile's Python.

That Python stands in for the machine's: its NVIDIA libraries are linked, nothing else of it is
seen.  The bundle is kept in build/gpu-bundle; the first call fetches and compresses for 15 minutes
or more.  A driver that knows no device stands in for the driver's library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tools import stub_driver
from tools.gpu_bundle_join import pieces_of
from tools.stages import GPU_PROFILE, ROOT

pytestmark = [pytest.mark.gpu_profile, pytest.mark.timeout(7200)]

OUT = ROOT / "build/gpu-bundle"
MACHINE = GPU_PROFILE / "bin/python"
PACKAGES = ("torch", "triton", "sglang.srt.entrypoints.http_server", "ray")
PACKAGES += ("sglang.srt.managers.scheduler", "megatron.core", "megatron.core.models.gpt")
# Without a card `import sgl_kernel` looks for the operators of another one.
OPERATORS = """
import pathlib, torch
known = {one.name for one in torch._C._jit_get_all_schemas()}
for file in pathlib.Path(torch.__path__[0]).parent.glob("sgl_kernel/**/*.so"):
    torch.ops.load_library(file)
print(len({one.name for one in torch._C._jit_get_all_schemas()} - known))
"""
DRIVEN = ("sgl_kernel/**/*.so", "transformer_engine/**/*.so", "torch/lib/*.so")


def said(*words: str | Path, code: int = 0, **environment: str) -> str:
    """Output of a program that sees no other environment."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CUDA"))}
    done = subprocess.run(
        words, env=inherited | environment, cwd=ROOT, text=True, capture_output=True,
        timeout=patience(3600), check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def pieces() -> Path:
    """With Transformer Engine where tools/setup.sh left its wheel."""
    wheels = sorted((ROOT / "build/wheels").glob("torch-*/transformer_engine_torch-*.whl"))
    engine = ["--transformer-engine", wheels[-1]] if wheels else []
    print(said("tools/gpu-bundle", "make", OUT, *engine, PYTHON=str(MACHINE)))
    print(said("tools/gpu-bundle", "check", OUT))
    return OUT / "pieces"


@pytest.fixture(scope="module")
def env(pieces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "env"
    words = ["--env", folder, "--project", ROOT]
    print(said(MACHINE, "-I", pieces / "join.py", "finish", pieces, *words))
    return folder


@pytest.fixture(scope="module")
def driver(env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    (site,) = env.glob("lib/python3.*/site-packages")
    stub_driver.write(folder, [one for pattern in DRIVEN for one in site.glob(pattern)])
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def test_engine_trainer_and_moerl_import(env: Path, driver: dict[str, str]) -> None:
    """Control: nothing comes from the machine's Python, and a left-out package is named."""
    names = (*PACKAGES, "moerl.*")
    out = said(env / "bin/python", "-m", "tests.helpers.import_all", *names, **driver)
    found = json.loads(out[out.rindex('{"imported"') :])
    assert found["failed"] == {}
    assert found["imported"] > 200
    assert int(said(env / "bin/python", "-c", OPERATORS, **driver).split()[-1]) > 70
    where = said(env / "bin/python", "-c", "import torch, numpy; print(torch.__file__)")
    assert where.strip().startswith(str(env))
    refused = said(env / "bin/python", "-c", "import pyarrow", code=1)
    assert "pyarrow was left out of this GPU bundle" in refused


def test_a_run_is_planned(env: Path, pieces: Path) -> None:
    """With what the bundle lacks refused before anything starts."""
    about = json.loads((pieces / "bundle.json").read_text())
    lacks_te = any("transformer-engine" in row["sentence"] for row in about["left_out"])
    words = ["quickstart", "cluster=gpu1", "--dry-run"]
    words += ["trainer.transformer_impl=local"] if lacks_te else []
    assert "processes of gpu1" in said(env / "bin/moerl", "train", *words)
    gym = ["task.name=reasoning_gym", "task.dataset=chain_sum"]
    refused = said(env / "bin/moerl", "train", *words, *gym, code=1)
    assert "--with reasoning-gym" in " ".join(refused.split())


def test_an_engine_starts_as_far_as_without_a_gpu(env: Path, tmp_path: Path) -> None:
    """To its first decoded token; modules are compiled by the compiler that was linked."""
    words = ("-m", "tools.engine_kernels", "quickstart cluster=gpu1", "--arch", "90")
    out = said(env / "bin/python", *words, "--out", tmp_path / "kernels")
    assert "FAILED" not in out
    assert "of sglang: " in out
    assert "of triton: not compiled, 0 failed" in out


def test_a_lost_piece_and_a_damaged_byte_are_named(pieces: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    folder.mkdir()
    for file in pieces.iterdir():
        (folder / file.name).hardlink_to(file)
    lost, damaged = pieces_of([folder])[:2]
    lost.unlink()
    check = (MACHINE, "-I", folder / "join.py", "check", folder)
    assert said(*check, code=1) == f"join: {lost.name} is missing\n"
    damaged.unlink()
    shutil.copy(pieces / damaged.name, damaged)
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    assert f"{damaged} is damaged (its digest differs)" in said(*check, code=1)
