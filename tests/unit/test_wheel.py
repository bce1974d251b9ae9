"""The wheel without engine and trainer: what it holds, and the commands that work from it.

It is built from a copy of the tracked files and unpacked into an empty folder.  The commands run in
an interpreter that refuses every package of the engine and the trainer.  With `--full`, pip makes a
fresh environment from the package index, with nothing but what pyproject.toml lists.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFUSED = ("torch", "ray", "sglang", "megatron", "transformers", "transformer_engine", "aiohttp")
# Stands before the real command line: a refused package is not there, whoever asks for it.
WITHOUT = f"""
import importlib.util, sys
sys.path.insert(0, sys.argv.pop(1))
found = importlib.util.find_spec
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {REFUSED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
importlib.util.find_spec = lambda name: None if name in {REFUSED} else found(name)
from moerl.cli import main
main()
"""


def tracked(*folders: str) -> list[str]:
    """Files of the checkout that git knows, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [name for name in filter(None, listed.stdout.split("\0")) if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "-w", out, copy], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def moerl(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", WITHOUT, installed, *arguments],
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_wheel_holds_the_package_its_settings_and_its_sources_of_kernels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = [name for name in tracked("moerl") if name.endswith((".py", "py.typed"))]
    assert names == {*code, *(f"moerl/{name}" for name in tracked("configs", "csrc"))}


def test_commands_that_plan_and_check_run_without_engine_and_trainer(installed: Path) -> None:
    shown = moerl(installed, "--help")
    assert shown.returncode == 0, shown.stderr
    planned = moerl(installed, "plan", "kimi-k2", "engine.count=16", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["engines"] == 16
    model = installed / "moerl/configs/models/kimi-k2"
    checked = moerl(installed, "check-layout", str(model), "--parallel", "ep=8", "--engine", "tp=8")
    assert checked.stdout.startswith("exact: "), checked.stderr
    dry = moerl(installed, "train", "kimi-k2", "--dry-run")
    assert "memory of an engine rank" in dry.stdout, dry.stderr


def test_a_dump_is_checked_without_engine_and_trainer(installed: Path, tmp_path: Path) -> None:
    model = installed / "moerl/configs/models/qwen3-30b-a3b"
    row = {"token_ids": [5, 9, 7, 2], "prompt_len": 2, "logprobs": [-0.4, -1.1], "lag": 3}
    rows = [[[*range(8)]] * 48] * 3
    dump = tmp_path / "dump.jsonl"
    dump.write_text(json.dumps(row | {"routing": rows}))
    good = moerl(installed, "check-dump", str(dump), str(model))
    assert good.stdout.startswith("good: 1 rollouts, 4 tokens, 2 of them sampled, lag 3 to 3\n")
    dump.write_text(json.dumps(row | {"routing": rows[:2]}))
    bad = moerl(installed, "check-dump", str(dump), str(model))
    assert bad.returncode == 2
    assert "dump.jsonl line 1: routing: shape (2, 48, 8)" in bad.stderr


def test_a_command_that_needs_torch_says_how_to_get_it(installed: Path, tmp_path: Path) -> None:
    """Also shows that the interpreter of this file refuses what the wheel does not need."""
    done = moerl(installed, "train", "quickstart", f"run.root={tmp_path}")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.startswith("moerl: this command needs torch: ")
    assert "pip install '.[cpu]'" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(600)
def test_wheel_installs_with_its_listed_packages_only(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    run = tmp_path / "venv/bin"
    subprocess.run([run / "pip", "install", "--quiet", wheel], check=True, timeout=400)
    for arguments in (
        ["--help"],
        ["plan", "kimi-k2"],
        ["train", "qwen3-30b-a3b", "--dry-run"],
    ):
        done = subprocess.run([run / "moerl", *arguments], capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
    held = subprocess.run([run / "pip", "list"], capture_output=True, text=True, timeout=120).stdout
    assert not set(REFUSED) & {line.split()[0].replace("-", "_") for line in held.splitlines()}
