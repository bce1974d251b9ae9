"""The kernels of an engine's start compile and link with the compiler of the GPU profile alone.

A system-wide CUDA is hidden.  What was compiled stays in build/engine-kernels: SGLang, FlashInfer
and DeepGEMM name a module by a hash of compiler, flags and sources, so a stopped stage goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tools.stages import GPU_PROFILE, ROOT

pytestmark = pytest.mark.gpu_profile

PYTHON, KERNELS = GPU_PROFILE / "bin/python", ROOT / "build/engine-kernels"
# A mount namespace in which no CUDA is below /usr/local and no nvcc on PATH.
HIDE = """
for folder in /usr/local/cuda*; do
  [ -L "$folder" ] || ! [ -d "$folder" ] || mount -t tmpfs none "$folder"
done
nvcc=$(command -v nvcc) && mount --bind /dev/null "$nvcc"
! command -v nvcc && ! [ -e /usr/local/cuda/bin/nvcc ] || exit 97
exec "$@"
"""
# One module of load_jit, which needs compiler, headers and linker; it includes CCCL.
ONE = """
import torch
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.ops.moe.moe_topk_softmax import _jit_moe_topk_softmax_module
with override_jit_cuda_arch(9, 0):
    _jit_moe_topk_softmax_module(torch.bfloat16)
"""


def hidden(*words: str | Path, seconds: float, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program that sees no CUDA of the system."""
    names = ("CUDA_HOME", "CUDA_PATH", "CPATH", "LIBRARY_PATH", "SGLANG_JIT_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", HIDE, "sh", *words],
        cwd=ROOT, env=inherited | {"PYTHONPATH": str(ROOT)} | environment, text=True,
        capture_output=True, timeout=patience(seconds), check=False,
    )  # fmt: skip
    assert done.returncode != 97, "a CUDA of the system is visible"
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(3600)
def test_modules_of_every_recipe_compile_and_link() -> None:
    """For sm_90a and sm_100a; the number of modules and the seconds are printed."""
    words = (PYTHON, "-m", "tools.engine_kernels", "--out", KERNELS)
    code, said = hidden(*words, seconds=2700)
    print(said)
    assert code == 0, said[-4000:]
    for name in (
        "activation_bf16_t_true",
        "RMSNormKernel",
        "dsv3_fused_routing",
        "fp8_fp4_gemm_nt",
    ):
        assert f"  {name}  (" in said, f"{name} was not asked for"
    assert "quickstart cluster=gpu1" in said, "the first command on a machine with a GPU"
    assert " sm_90a not compiled  fused_moe_kernel  (" in said, "Triton's kernels are listed"


@pytest.mark.timeout(900)
def test_a_copied_folder_saves_the_compiler(tmp_path: Path) -> None:
    """SGLang's modules, where it may not compile.  Control: an empty folder."""
    words = (PYTHON, "-m", "tools.engine_kernels", "olmoe-1b-7b", "--arch", "90", "--out")
    code, said = hidden(*words, KERNELS, seconds=280)
    assert code == 0, said[-3000:]
    shutil.copytree(KERNELS, tmp_path / "copied")
    code, said = hidden(*words, tmp_path / "copied", seconds=280, SGLANG_CRASH_ON_JIT_COMPILE="1")
    assert code == 0, said[-3000:]
    code, said = hidden(*words, tmp_path / "empty", seconds=280, SGLANG_CRASH_ON_JIT_COMPILE="1")
    assert code != 0
    assert "no usable cached build" in said


def one_module(home: Path, cache: Path) -> tuple[int, str]:
    found = {"CUDA_HOME": str(home), "SGLANG_JIT_CACHE_DIR": str(cache)}
    path = f"{GPU_PROFILE}/bin:{os.environ['PATH']}"
    return hidden(PYTHON, "-c", ONE, seconds=280, PATH=path, **found)


def copied(folder: Path, *, without: str = "") -> Path:
    """The folder with the compiler itself, which looks for headers beside it."""
    home, given = folder / "cuda", GPU_PROFILE / "cuda"
    shutil.copytree(given / "bin", home / "bin")
    (home / "lib64").mkdir()
    (home / "lib64/libcudart.so").symlink_to((given / "lib64/libcudart.so").resolve())
    for name in ("nvvm", "include"):
        (home / name).symlink_to((given / name).resolve())
    if without:
        (home / without).unlink()
    return home


@pytest.mark.timeout(900)
def test_a_module_fails_without_the_library_that_it_is_linked_with(tmp_path: Path) -> None:
    """Control: with the whole folder it is built."""
    code, said = one_module(copied(tmp_path / "whole"), tmp_path / "cache")
    assert code == 0, said[-3000:]
    code, said = one_module(
        copied(tmp_path / "part", without="lib64/libcudart.so"), tmp_path / "other"
    )
    assert code != 0
    assert "cannot find -lcudart" in said


@pytest.mark.timeout(600)
def test_a_module_fails_without_the_headers_of_the_compiler(tmp_path: Path) -> None:
    """Headers of another minor version: one number in the header that CCCL compares."""
    home = copied(tmp_path, without="include")
    shutil.copytree(GPU_PROFILE / "cuda/include", home / "include")
    header = home / "include/cuda_runtime_api.h"
    header.write_text(header.read_text().replace("CUDART_VERSION  13000", "CUDART_VERSION  13050"))
    code, said = one_module(home, tmp_path / "cache")
    assert code != 0
    assert "incompatible" in said
