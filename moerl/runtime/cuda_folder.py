"""The CUDA compiler that tools/setup.sh --gpu links together in the environment's folder `cuda`.

SGLang, FlashInfer, DeepGEMM and Transformer Engine compile kernels while they run, and look for
`$CUDA_HOME/bin/nvcc`, `$CUDA_HOME/include`, `$CUDA_HOME/lib64/libcudart.so` and `ninja` on PATH.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = "cuda"  # in the environment's folder
KERNELS = "kernels"  # there: modules that tools/engine_kernels compiled


def compiler_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables by which an engine or trainer process finds the compiler.

    The folder of this environment goes before a CUDA_HOME of the machine: its compiler is of the
    version of torch's runtime.  Without it, as in the CPU profile, the machine's own stays.
    """
    prefix = Path(sys.prefix)
    home = prefix / FOLDER
    path = [str(prefix / "bin"), *filter(None, [inherited.get("PATH", os.defpath)])]
    if not (home / "bin/nvcc").exists():
        return {"PATH": os.pathsep.join(path)}
    found = {"CUDA_HOME": str(home), "PATH": os.pathsep.join([str(home / "bin"), *path])}
    if (home / KERNELS).is_dir():
        found |= {n: inherited.get(n, v) for n, v in kernel_caches(home / KERNELS).items()}
    return found


def kernel_caches(folder: Path) -> dict[str, str]:
    """Variables by which SGLang, DeepGEMM, FlashInfer and Triton keep their modules in a folder."""
    return {
        "SGLANG_CACHE_DIR": str(folder),
        "SGLANG_JIT_CACHE_DIR": str(folder / "jit"),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }
