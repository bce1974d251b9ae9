"""Call the compiled CSR masked log-softmax (its passes: csrc/masked_logprob.h).

Uses plain pointers, so this file needs no torch; the caller owns the memory and has checked it.
Used by moerl/algorithms/masked_logprob.py, which is also the reference the library is tested
against.
"""

from __future__ import annotations

import ctypes

from moerl.errors import MoerlError

DTYPES = {"float32": 0, "bfloat16": 1, "float64": 2}  # logits a library reads
REFUSALS = {1: "mask_sampled", 2: "mask_duplicate"}  # status of a row -> reason of a RecordError


class KernelError(MoerlError):
    """A launch that failed: an error of the CUDA runtime, or types the library does not know."""


class KeptCall(ctypes.Structure):
    """Arguments of any pass; mirrors the struct of csrc/masked_logprob.h field by field."""

    _fields_ = (
        ("dtype", ctypes.c_int64),
        ("id_bytes", ctypes.c_int64),
        ("place", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("vocab_start", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("sampled", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("temperature", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
    )


def run(lib: ctypes.CDLL, name: str, call: KeptCall) -> None:
    """Run pass `gather`, `sums` or `spread`.  Raises KernelError."""
    code = lib[f"moerl_kept_{name}"](ctypes.byref(call))
    if code:
        cause = "unknown types"
        if code > 0:  # 35: nvcc is newer than the driver; 209: the GPU is older than sm_80
            cause = f"CUDA error {code}; to run in torch instead, remove {lib._name}"
        raise KernelError(f"masked log-probability, pass {name}: {cause}")
