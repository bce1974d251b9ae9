"""`moerl doctor` on nodes with GPUs: stub programs, and a remedy for each fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config import load_config, resolve
from moerl.doctor import node as module
from moerl.doctor.doctor import check_gpu, check_memory, examine
from moerl.doctor.node import GpuFacts, gpu_facts

SMI = "| NVIDIA-SMI {0}    Driver Version: {0}    CUDA Version: {1} |"
# Stands for nvcc: writes its output, and says its version.
NVCC = """#!/bin/sh
test "$1" = --version && echo 'Cuda compilation tools, release {0}, V{0}.88' && exit
while test "$1" != -o; do shift; done
echo 'void launch(void) {{}}' | cc -fPIC -x c -c - -o "$2"
"""
WHOLE = GpuFacts(
    driver="580.65.06",
    driver_cuda="13.0",
    torch_cuda="13.0",
    nvcc="13.0",
    libraries={
        "cuDNN": "9.24.0.43",
        "NCCL": "2.30.7",
        "Transformer Engine": "2.20.2",
        "Transformer Engine core": "2.20.2",
        "Transformer Engine torch": "2.20.2",
    },
)


def program(folder: Path, name: str, says: str, code: int = 0) -> None:
    script(folder / name, f"#!/bin/sh\necho '{says}'\nexit {code}\n")


def script(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def compiler(home: Path, version: str) -> None:
    """A folder like CUDA's, with an empty runtime library."""
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    script(home / "bin/nvcc", NVCC.format(version))
    library = home / "lib64/libcudart.so"
    subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", library], check=True)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the PATH and has the distributions of a GPU node, with torch for CUDA 13."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{tmp_path}/toolkit/bin:/bin:/usr/bin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    for name in ("torch", "nvidia"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text("cuda: str | None = '13.0'\n")
    names = [name.format(major=13).replace("-", "_") for name in module.GPU_PACKAGES.values()]
    for name in names:
        version = "2.20.2" if "engine" in name else "9.1"
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(metadata)
    program(tmp_path, "nvidia-smi", SMI.format("580.65.06", "13.0"))
    compiler(tmp_path / "toolkit", "13.0")
    return tmp_path


def test_facts_come_from_programs_and_distributions(node: Path) -> None:
    found = gpu_facts()
    assert (found.driver, found.driver_cuda) == ("580.65.06", "13.0")
    assert (found.torch_cuda, found.nvcc, found.compile_error) == ("13.0", "13.0", "")
    assert found.libraries == {
        **{"cuDNN": "9.1", "NCCL": "9.1", "Transformer Engine": "2.20.2"},
        **{"Transformer Engine core": "2.20.2", "Transformer Engine torch": "2.20.2"},
    }


def test_the_compiler_of_the_environment_goes_first(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before CUDA_HOME and PATH; control: without the folder CUDA_HOME is taken."""
    compiler(node / "other", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(node / "other"))
    assert gpu_facts().nvcc == "12.8"
    compiler(node / "environment/cuda", "13.5")
    assert (gpu_facts().nvcc, gpu_facts().compile_error) == ("13.5", "")


def test_a_compiler_that_cannot_build_a_kernel_is_found_out(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The linker, headers of another version, no compiler, no ninja."""
    monkeypatch.setenv("CUDA_HOME", str(node / "toolkit"))
    (node / "toolkit/lib64/libcudart.so").unlink()
    assert "cannot find -lcudart" in gpu_facts().compile_error
    program(node / "toolkit/bin", "nvcc", "error: compiler and headers are incompatible", code=1)
    assert gpu_facts().compile_error == "error: compiler and headers are incompatible"
    (node / "toolkit/bin/nvcc").unlink()
    assert "nvcc: not found" in gpu_facts().compile_error
    monkeypatch.setenv("PATH", str(node))
    assert gpu_facts().compile_error == "ninja is not on PATH"


def test_programs_that_fail_are_not_believed(node: Path) -> None:
    program(node, "nvidia-smi", SMI.format("580.65.06", "13.0"), code=9)
    program(node / "toolkit/bin", "nvcc", "Cuda compilation tools, release 13.0", code=9)
    (node / "torch/version.py").write_text("cuda: str | None = None\n")
    found = gpu_facts()
    assert (found.driver, found.driver_cuda, found.torch_cuda, found.nvcc) == ("", "", "", "")


def wrong(facts: GpuFacts) -> list[str]:
    return [f"{part}: {found} -> {do}" for part, found, do in check_gpu(facts) if do]


def test_a_whole_node_has_nothing_wrong() -> None:
    assert wrong(WHOLE) == []
    assert {part for part, _, _ in check_gpu(WHOLE)} == {"driver", "libraries", "CUDA compiler"}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"driver": ""}, "driver: nvidia-smi does not answer -> install"),
        (
            {"driver": "550.54", "driver_cuda": "12.4"},
            "driver: 550.54, for CUDA up to 12.4 -> install a driver for CUDA 13.0",
        ),
        ({"torch_cuda": ""}, "CUDA: torch is missing or built for the CPU -> run tools/setup.sh"),
        (
            {"compile_error": "no -lcudart"},
            "CUDA compiler: no -lcudart -> run tools/setup.sh --gpu",
        ),
        (
            {"nvcc": "12.8"},
            "CUDA compiler: 12.8, torch is built for CUDA 13.0 -> put nvcc of CUDA 13",
        ),
        (
            {"missing_header": "/usr/include/python3.12/Python.h"},
            "Python.h: /usr/include/python3.12/Python.h is missing -> install the headers",
        ),
    ],
)
def test_each_fault_has_one_row(fault: dict[str, object], says: str) -> None:
    found = wrong(replace(WHOLE, **fault))
    assert len(found) == 1, found
    assert says in found[0]


@pytest.mark.parametrize("missing", list(WHOLE.libraries))
def test_a_missing_library_is_named(missing: str) -> None:
    (found,) = wrong(replace(WHOLE, libraries=WHOLE.libraries | {missing: ""}))
    remedy = "run tools/setup.sh --gpu there"
    if missing.startswith("Transformer Engine"):  # the layers of which another setting has no need
        remedy += ", or set trainer.transformer_impl=local"
    assert found == f"{missing}: missing for CUDA 13.0 -> {remedy}"


def test_parts_of_transformer_engine_go_together() -> None:
    other = WHOLE.libraries | {"Transformer Engine torch": "2.9.0"}
    (found,) = wrong(replace(WHOLE, libraries=other))
    assert "versions differ" in found
    assert "Transformer Engine torch 2.9.0" in found


# --- memory, and the compiler's folder ------------------------------------------------------------
GB = 10**9


@pytest.mark.parametrize(
    ("free", "total", "says"),
    [
        (85, 86, ""),
        (60, 86, "60.0 of 86.0 GB free -> end what else holds it (nvidia-smi)"),
        (42, 43, "42.0 of 43.0 GB free -> set cluster.nodes.*.device_gb=43, which is 80"),
    ],
)
def test_memory_of_a_gpu_is_that_of_the_plan(free: int, total: int, says: str) -> None:
    """SGLang and the rank take their shares of what is free, at the same time."""
    ((what, remedy),) = check_memory(replace(WHOLE, memory=[(free * GB, total * GB)]), 80.0)
    assert what.startswith("GPU 0: ")
    assert (f"{what.removeprefix('GPU 0: ')} -> {remedy}" if remedy else "") == says
    assert list(check_memory(WHOLE, 80.0)) == [], "nvidia-smi did not say"


def test_memory_and_headers_are_read(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(node / "nvidia-smi", "#!/bin/sh\necho '81000 MiB, 81559 MiB'\n")
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _name: str(node))
    assert gpu_facts().memory == [(81000 * 2**20, 81559 * 2**20)]
    assert gpu_facts().missing_header == str(node / "Python.h")
    (node / "Python.h").touch()
    assert gpu_facts().missing_header == ""


# As a toolkit's nvcc, whose nvcc.profile names a folder beside `bin`.
WITH_TARGETS = """#!/bin/sh
if ! test -d "$(dirname "$(dirname "$0")")/targets/x86_64-linux"; then
  echo "error: no targets folder"; exit 1
fi
""" + NVCC.partition("\n")[2]


def test_the_folder_of_the_compiler_has_all_that_its_profile_names(
    node: Path, tmp_path: Path
) -> None:
    """`link_cuda` of tools/setup.sh; control: without the link the doctor says so."""
    packaged, home = tmp_path / "site/nvidia/cu13", tmp_path / "venv/cuda"
    compiler(packaged, "13.0")
    (packaged / "lib64").rename(packaged / "lib")
    (packaged / "lib/libcudart.so").rename(packaged / "lib/libcudart.so.13")
    for part in ("include", "nvvm", "targets/x86_64-linux"):
        (packaged / part).mkdir(parents=True)
    script(packaged / "bin/nvcc", WITH_TARGETS.format("13.0"))
    text = (Path(__file__).parents[2] / "tools/setup.sh").read_text()
    function = text[text.index("link_cuda() {") : text.index("# What Transformer Engine is")]
    begin = f"set -eu; site={tmp_path}/site venv={tmp_path}/venv; "
    subprocess.run(["bash", "-c", f"{begin}{function}\nlink_cuda"], check=True)
    assert module.compile_error(str(home)) == ""
    assert not (home / "lib").exists(), "libraries have lib64's names"
    (home / "targets").unlink()
    assert "no targets folder" in module.compile_error(str(home))


def test_the_rule_is_asked_on_gpu_nodes_only(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a node's own process, which finds the stub programs on its PATH."""
    monkeypatch.setattr("moerl.doctor.doctor._ANSWER_S", 250.0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    program(node, "nvidia-smi", SMI.format("550.54", "12.4"))
    settings = (f"run.root={json.dumps(str(tmp_path / 'runs'))}", f"cluster.blob_dir={tmp_path}")
    for cluster, expected in (("node8", True), ("laptop", False)):
        found = examine(resolve(load_config("quickstart", (f"cluster={cluster}", *settings))))
        drivers = [one for one in found if one.check == "driver" and one.remedy]
        assert bool(drivers) is expected, found
        assert any(one.check == "Transformer Engine" for one in found) is False
