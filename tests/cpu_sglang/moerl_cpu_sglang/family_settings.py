"""Server arguments and environment variables that the kernels of a family need.

The entry points of the group `moerl.cpu_kernels` name these objects.  Loads without torch.
"""

from __future__ import annotations

from moerl.engine.host.cpu_kernels import CpuKernels

PLAIN = CpuKernels()
GPT_OSS = CpuKernels(
    # torch_native writes the cache of window layers at slots other than those it reads
    args={"disable_hybrid_swa_memory": True},
    # SGLang compiles the activation of its experts: 26 s at the first request, 0.2 s without
    environment={"TORCHDYNAMO_DISABLE": "1"},
)
LLAMA4 = CpuKernels(
    # the language model alone; attention in chunks keeps its cache as windows do
    args={"enable_multimodal": False, "disable_hybrid_swa_memory": True},
    environment={"TORCHDYNAMO_DISABLE": "1"},  # SGLang compiles its router
)
QWEN3_NEXT = CpuKernels(
    # the plain CPU has no snapshots of states, which the other strategy shares between requests
    args={"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
    # inputs of the convolution would be kept in bf16, whatever dtype is served
    environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
)
