"""What of the GPU profile works without a GPU: packages, modules, kernels, ranks on meta tensors.

The environment is the one that `tools/setup.sh --gpu build/gpu-profile` makes; a driver that knows
no device stands in for the driver's library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import group_calls, te_modules
from tests.helpers.meta_ranks import ADAPTED, CASES, check, ranks
from tools import stub_driver
from tools.stages import GPU_PROFILE, ROOT

pytestmark = [pytest.mark.gpu_profile, pytest.mark.timeout(600)]

PYTHON = GPU_PROFILE / "bin/python"
PACKAGES = ("torch", "transformer_engine.pytorch", "megatron.core", "ray", "sglang")
PACKAGES += ("sglang.srt.entrypoints.engine", "sgl_kernel")
# Of megatron.core.extensions.transformer_engine: fusions and products that recipes use.
USED = ("te_general_gemm", "fused_permute", "fused_unpermute", "fused_sort_chunks_by_index")
USED += ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd", "TENorm")
USED += ("TEGroupedLinear", "TEDotProductAttention", "TELayerNormColumnParallelLinear")
DRIVEN = ("sgl_kernel/**/*.so", "transformer_engine/**/*.so", "torch/lib/*.so")


def run(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [PYTHON, *words],
        cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def imported(*names: str, **environment: str) -> dict[str, Any]:
    out = run("-m", "tests.helpers.import_all", *names, **environment)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which libraries find a driver."""
    folder = tmp_path_factory.mktemp("driver")
    (site,) = GPU_PROFILE.glob("lib/python3.*/site-packages")
    libraries = [library for pattern in DRIVEN for library in site.glob(pattern)]
    assert stub_driver.write(folder, libraries) > 10
    return {"LD_LIBRARY_PATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def test_packages_are_those_of_the_lock() -> None:
    say = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version"
    installed = json.loads(run("-c", f"{say} for d in m.distributions()}}))"))
    have = {name.lower().replace("_", "-"): version for name, version in installed.items()}
    lines = (ROOT / "requirements/gpu.lock").read_text().splitlines()
    pins = dict(line.split()[0].split("==") for line in lines if line and line[0] != "#")
    assert {name: have.get(name) for name in pins} == pins


def test_packages_import_with_a_driver(driver: dict[str, str]) -> None:
    """Control: SGLang's kernels link the driver, so that they do not load without one."""
    assert imported(*PACKAGES, **driver)["failed"] == {}
    failed = imported("sgl_kernel")["failed"]
    assert "libcuda.so.1" in failed["sgl_kernel"]


def test_megatron_core_finds_what_it_wants_of_transformer_engine(driver: dict[str, str]) -> None:
    """A name that is gone is None without a word, and a slower path is taken."""
    extension = "import json, megatron.core.extensions.transformer_engine as te"
    say = "print(json.dumps(sorted(n for n in vars(te) if getattr(te, n) is None)))"
    gone = set(json.loads(run("-c", f"{extension}; {say}", **driver).splitlines()[-1]))
    assert not gone & set(USED), gone & set(USED)


def test_the_double_has_the_collectives_of_this_torch() -> None:
    """Its own torch is the CPU profile's, which is another version."""
    (torch,) = GPU_PROFILE.glob("lib/python3.*/site-packages/torch")
    source = (torch / "distributed/distributed_c10d.py").read_text()
    assert group_calls.unknown(source) == set()


def test_every_module_of_ours_imports(driver: dict[str, str]) -> None:
    found = imported("moerl.*", **driver)
    assert found["failed"] == {}
    assert found["imported"] > 200


def test_the_stand_in_has_the_arguments_of_transformer_engine(tmp_path: Path) -> None:
    """Of its layers and its attention; control: one default that differs."""
    (package,) = GPU_PROFILE.glob("lib/python3.*/site-packages/transformer_engine")
    assert te_modules.differences(package) == []
    shutil.copytree(package / "pytorch", tmp_path / "pytorch")
    file = tmp_path / "pytorch/module/grouped_linear.py"
    file.write_text(file.read_text().replace("tp_size: int = 1,", "tp_size: int = 2,"))
    assert te_modules.differences(tmp_path) == ["GroupedLinear.__init__: tp_size"]
    lines = (ROOT / "requirements/gpu.lock").read_text().splitlines()
    assert f"transformer-engine=={te_modules.VERSION}" in [line.split(" ")[0] for line in lines]


@pytest.mark.parametrize("recipe", [*CASES, *ADAPTED])
def test_ranks_with_transformer_engine_are_what_the_dry_run_says(
    recipe: str, driver: dict[str, str]
) -> None:
    """Numbers and names: those of the layout table of Transformer Engine's layers.

    With adapters: gradients, optimizer and W0 of the factors alone.
    """
    words = (CASES | ADAPTED)[recipe]
    found = ranks("te", recipe, *words, python=PYTHON, environment=driver)
    for rank in found:
        check(rank)
        assert rank.built["fused"], "layers are not Transformer Engine's"
