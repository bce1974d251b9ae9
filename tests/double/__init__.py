"""A device double: `cuda:N` tensors on a machine without a GPU, for torch's CPU wheel.

The CPU wheel has the device type and its autograd, and empty slots where a CUDA build has kernels,
an allocator, streams and hooks.  `csrc/` fills them: tensors are really labelled `cuda:N` and the
CPU computes them.  Unmodified Megatron-core trains on it.

It imitates what CUDA documents about the host: which calls wait, which copies are pageable, which
work is ordered, what a tensor occupies, that host and device tensors do not mix.  It says nothing
about speed, kernels, dtypes, NCCL's order or CUDA graphs, and was not compared with a GPU: a test
that passes here may fail there.  Waits are found by a list of operators (`kWaits` in
csrc/operators.h); one that is missing in it is not seen.

It must be loaded before torch (`tests.double.load`), so each module of tests (`on_*.py`) runs in a
process of its own (`tests.double.process`), where CPU patches of this project are absent.
"""
