"""Load the double into this process, before torch.

torch asks for its CUDA hooks once: loaded late, forward passes work and backward passes do not.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from tests.double.build import build, torch_folder

_kept: list[Any] = []  # declarations of operators live as long as their library


def load(devices: int = 2) -> None:
    """Import torch with the double in its slots; this process has `devices` devices."""
    if "torch" in sys.modules:
        raise RuntimeError("the double must be loaded before torch is imported")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled for a device that is not there
    library = build()
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))
    import torch

    torch.ops.load_library(str(library))
    if torch.backends.cuda.is_built():
        raise RuntimeError("the double is for torch's CPU wheel, which has these slots free")
    torch.ops.device_double.set_count(devices)
    _declare_for_torchvision()
    from tests.double import attention, cuda_api, cuda_driver, nccl

    cuda_api.replace(devices)
    attention.replace()
    nccl.replace()
    cuda_driver.replace()


def _declare_for_torchvision() -> None:
    """What `torchvision_fix` declares where torch sees no device, and the CPU profile lacks."""
    import torch

    from moerl.engine import torchvision_fix

    _kept.append(torch.library.Library("torchvision", "FRAGMENT"))
    for operator in torchvision_fix.OPERATORS:
        _kept[-1].define(operator + torchvision_fix.SCHEMA)
