"""Does a GPU node have what engine and trainer need?  One sentence per missing or unfit part."""

from __future__ import annotations

from collections.abc import Iterator

from moerl.launch.cluster.gpu_facts import GpuFacts

SETUP = "run tools/setup.sh --gpu there"
Row = tuple[str, str, str]
"""(what is checked, what was found, what to do; empty = nothing)"""


def check_gpu(facts: GpuFacts) -> Iterator[Row]:
    yield from _driver(facts)
    if not facts.torch_cuda:
        yield "CUDA", "torch is missing or built for the CPU", SETUP
        return
    yield from _libraries(facts)
    yield from _compiler(facts)


def _driver(facts: GpuFacts) -> Iterator[Row]:
    if not facts.driver:
        yield "driver", "nvidia-smi does not answer", "install NVIDIA's driver, or repair it"
        return
    found = f"{facts.driver}, for CUDA up to {facts.driver_cuda or 'an unknown version'}"
    is_old = _major(facts.driver_cuda) < _major(facts.torch_cuda)
    needed = f"install a driver for CUDA {facts.torch_cuda}, which torch is built for"
    yield "driver", found, needed if facts.driver_cuda and is_old else ""


def _libraries(facts: GpuFacts) -> Iterator[Row]:
    for purpose, version in facts.libraries.items():
        if not version:
            yield purpose, f"missing for CUDA {facts.torch_cuda}", SETUP
    parts = {name: v for name, v in facts.libraries.items() if name.startswith("Transformer")}
    present = {version for version in parts.values() if version}
    if len(present) > 1:
        named = ", ".join(f"{name} {version}" for name, version in parts.items())
        yield "Transformer Engine", f"versions differ: {named}", SETUP
    whole = ", ".join(f"{name} {version}" for name, version in facts.libraries.items() if version)
    yield "libraries", f"torch for CUDA {facts.torch_cuda}, {whole}", ""


def _compiler(facts: GpuFacts) -> Iterator[Row]:
    """nvcc is needed for what engines compile at their start."""
    if facts.nvcc and _major(facts.nvcc) != _major(facts.torch_cuda):
        found = f"{facts.nvcc}, torch is built for CUDA {facts.torch_cuda}"
        yield "nvcc", found, f"put nvcc of CUDA {_major(facts.torch_cuda)} first on PATH"
    elif not facts.nvcc:
        yield "nvcc", "not found", f"{SETUP}, or install CUDA's compiler"
    else:
        yield "nvcc", facts.nvcc, ""


def _major(version: str) -> int:
    number = version.partition(".")[0]
    return int(number) if number.isdecimal() else 0
