"""The locks of requirements/ against the installed packages and against pyproject.toml."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def read_lock(name: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.split()[0].partition("==")
            assert version, f"{name}: {line!r} is not of the form name==version"
            assert canonicalize_name(package) not in pins, f"{name}: {package} is named twice"
            pins[canonicalize_name(package)] = version
    return pins


def unmet(pins: dict[str, str], requirements: list[str]) -> list[str]:
    """The requirements, markers applied and extras left out, that no pin satisfies."""
    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = pins.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{text} (pinned: {version})")
    return found


# --- hashes ---------------------------------------------------------------------------------------
HASH = re.compile(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}")


def without_hash(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if not HASH.fullmatch(line)]


@pytest.mark.parametrize("lock", ["cpu", "cpu-nodeps", "gpu", "clients"])
def test_every_entry_has_the_hash_of_its_file(lock: str) -> None:
    text = (ROOT / f"requirements/{lock}.lock").read_text()
    assert without_hash(text) == []
    hashes = re.findall(r"sha256:(\S+)", text)
    assert len(hashes) == len(set(hashes)) == len(read_lock(f"{lock}.lock"))


def test_locks_are_all_of_these() -> None:
    found = {file.stem for file in (ROOT / "requirements").iterdir()}
    assert found == {"cpu", "cpu-nodeps", "gpu", "clients"}


@pytest.mark.parametrize("line", ["a==1", "a==1 --hash=sha256:00", "a --hash=sha256:" + "0" * 64])
def test_an_entry_without_a_hash_is_found(line: str) -> None:
    """Control."""
    assert without_hash(f"# lock\n\n{line}\n") == [line]


@pytest.mark.parametrize("script", ["setup.sh", "test_env.sh"])
def test_an_installation_asks_for_hashes(script: str) -> None:
    """Each command of pip that reads a lock; pip itself refuses entries without one then."""
    text = (ROOT / "tools" / script).read_text().replace("\\\n", " ")
    reads = [line for line in text.splitlines() if "--requirement=" in line]
    reads += [line for line in text.splitlines() if "#/--requirement=" in line]
    assert reads
    assert all("--require-hashes" in line for line in reads)


def test_pip_refuses_another_file(tmp_path: Path) -> None:
    """A wheel of ours whose bytes are not those of the lock's line."""
    wheel = tmp_path / "one-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            "one-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n"
        )
        file.writestr("one-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr("one-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()

    def installed(value: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "lock").write_text(f"one==1.0 {value}".strip() + "\n")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--require-hashes",
            "--no-index",
        ]
        where = ["--find-links", str(tmp_path), "--target", str(tmp_path / "to"), "--upgrade"]
        command = [*pip, *where, f"--requirement={tmp_path / 'lock'}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=patience(60))

    assert installed(f"--hash=sha256:{digest}").returncode == 0
    for other in (f"--hash=sha256:{'0' * 64}", ""):
        assert installed(other).returncode != 0


# --- the CPU profile ------------------------------------------------------------------------------
def test_every_requirement_of_a_pinned_package_is_pinned() -> None:
    pins = read_lock("cpu.lock")
    for package in pins:
        assert unmet(pins, importlib.metadata.requires(package) or []) == [], package


def test_every_requirement_of_this_project_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = project["project"]["dependencies"] + project["build-system"]["requires"]
    assert unmet(read_lock("cpu.lock"), requirements) == []


def test_missing_and_wrong_pins_are_found() -> None:
    """Negative control of the two tests above."""
    pins = read_lock("cpu.lock")
    requirements = importlib.metadata.requires("fastapi") or []
    assert unmet(pins, requirements) == []
    without = {name: version for name, version in pins.items() if name != "starlette"}
    assert len(unmet(without, requirements)) == 1
    assert len(unmet(pins | {"starlette": "0.0.1"}, requirements)) == 1


def test_installed_versions_are_the_pinned_ones() -> None:
    for package, version in (read_lock("cpu.lock") | read_lock("cpu-nodeps.lock")).items():
        assert importlib.metadata.version(package) == version, package


def test_cpu_profile_names_no_cuda_package() -> None:
    pins = read_lock("cpu.lock") | read_lock("cpu-nodeps.lock")
    assert pins["torch"].endswith("+cpu")
    assert not [name for name in pins if "nvidia" in name or "cuda" in name or "-cu1" in name]


# --- the GPU profile ------------------------------------------------------------------------------
def test_the_lock_has_what_the_extra_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = read_lock("gpu.lock")
    for text in (*project["dependencies"], *project["optional-dependencies"]["gpu"]):
        wanted = Requirement(text)
        assert wanted.specifier.contains(found[canonicalize_name(wanted.name)]), text
    assert len({found[name] for name in found if name.startswith("transformer-engine")}) == 1
    assert "transformer-engine-cu13" in found, "the core for the CUDA that torch is built for"
    others = [name for name in found if name.endswith(("-cu11", "-cu12"))]
    assert others == ["nvidia-cutlass-dsl-libs-cu12"], "no core or library of another CUDA"


@pytest.mark.parametrize("package", ["sglang", "megatron-core"])
def test_the_lock_is_legal_for_engine_and_trainer(package: str) -> None:
    """Against what the installed packages require, for the Python of the GPU profile."""
    found, checked = read_lock("gpu.lock"), 0
    assert importlib.metadata.version(package) == found[package], "one version in both profiles"
    for text in importlib.metadata.requires(package) or []:
        wanted = Requirement(text)
        where = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.1"}
        if wanted.marker is not None and not wanted.marker.evaluate(where):
            continue
        name = canonicalize_name(wanted.name)
        assert name in found, text
        assert wanted.specifier.contains(found[name], prereleases=True), text
        checked += 1
    assert checked > 1
    extras = map(Requirement, importlib.metadata.requires("megatron-core") or [])
    engines = [r for r in extras if canonicalize_name(r.name) == "transformer-engine"]
    assert engines
    for wanted in engines:
        assert wanted.specifier.contains(found["transformer-engine"]), str(wanted)
