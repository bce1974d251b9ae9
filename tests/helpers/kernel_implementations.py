"""Which implementations of a kernel the tests of this machine go through."""

from __future__ import annotations

from moerl.kernels.build import TARGETS, build


def implementations(target: str = "cpu") -> list[str]:
    """`torch`, and `built` wherever a compiler is; builds what is not built yet."""
    if TARGETS[target].compiler() is None:
        print(f"no compiler for the {target} kernels: only their reference is tested")
        return ["torch"]
    build(TARGETS[target])
    return ["torch", "built"]
