"""The locks of requirements/ against the installed packages and against pyproject.toml."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def read_lock(name: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
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
