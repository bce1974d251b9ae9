"""A GPU for SGLang's own code where there is none: tensors on the CPU, kernels that do nothing.

Every question about the device is answered for a compute capability, every tensor says that it is
on the GPU, process groups are torch's fake ones, and operators without a kernel for the CPU give
zeros.  So SGLang's choices and requests are those of a start on that GPU; numbers are garbage.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_SMALL = 10**6
GPUS = 8  # of a node
MEMORY = 80 * 2**30
GPU = torch.device("cuda", 0)
NAMES = {90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class Pretend(TorchFunctionMode):
    """Every tensor says that it is on the GPU; what is asked for there is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if func is torch.device:
            return func(*args, **kwargs)
        kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        kwargs.pop("pin_memory", None)
        if name == "__get__":
            if owner is torch.Tensor.is_cuda:
                return args[0].device.type != "meta"
            if owner is torch.Tensor.device:
                found = func(*args, **kwargs)
                return GPU if found.type == "cpu" else found
            if owner is torch.Tensor.is_cpu:
                return False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.get_device:
            return 0
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        found = func(*map(_on_cpu, args), **kwargs)
        if name.startswith(("empty", "new_empty")) and found.numel() < _SMALL:
            found.zero_()  # kernels that do nothing leave no rubbish
        return found


_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")  # of garbage: they only take time
_OF_TORCH = ("aten", "prim", "prims", "c10d", "_c10d_functional")


class Idle(TorchDispatchMode):
    """Operators of others have no kernel for the CPU: they give zeros.

    asked: called with each of them and its arguments.
    """

    def __init__(self, asked: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [one for one in args if isinstance(one, torch.Tensor)]
        if func._schema.name in _PRODUCTS:
            left, right = given[-2:]
            dtype = next((one for one in args if isinstance(one, torch.dtype)), left.dtype)
            shape = (*left.shape[:-1], right.shape[-1])
            return kwargs["out"] if "out" in kwargs else left.new_zeros(shape, dtype=dtype)
        if func.namespace in _OF_TORCH:
            return func(*args, **kwargs)
        self.asked(func, args, kwargs)
        if not given:  # settings, which no device is asked for
            return func(*args, **kwargs)
        if func._schema.name == "sgl_kernel::fwd":  # attention: heads of queries, width of values
            given = [given[0].new_zeros((*given[0].shape[:-1], args[2].shape[-1]))]
        elif func.namespace == "sglang":  # written in Python, with a function for the shapes
            found = func(*tree_map(_without_memory, args), **tree_map(_without_memory, kwargs))
            return tree_map(_zeros, found)
        returns = func._schema.returns
        made = tuple(torch.zeros_like(given[0]) for _ in returns)
        return made[0] if len(returns) == 1 else made or None


def _without_memory(value: Any) -> Any:
    """An argument with a tensor of the same shape in place of a tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    size, stride, dtype = value.shape, value.stride(), value.dtype
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _zeros(value: Any) -> Any:
    return torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value


class OnGpu(torch.Tensor):
    """A tensor that is on the GPU for C++ too, and has no memory."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=GPU, storage_size=2**30
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def without(one: Any) -> Any:
            is_device = isinstance(one, torch.device)
            return torch.device("meta") if is_device else getattr(one, "meta", one)

        found = func(*tree_map(without, args), **tree_map(without, kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, torch.Tensor) else one, found)


def on_gpu(value: Any) -> Any:
    """An argument with such a tensor in place of a tensor."""
    return OnGpu(_without_memory(value)) if isinstance(value, torch.Tensor) else value


class Whatever:
    """An object of the device that does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device, self.cuda_stream, self.stream_id, self.device_index = GPU, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> Whatever:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, _stream: Any) -> None:
        """SGLang replaces it on the class."""


class Zero:
    """CUDA's runtime, where each call succeeds."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_args: 0


def answer_for(capability: int) -> None:
    """Answer questions about the device before anybody asks."""
    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(
        name=NAMES[capability], major=major, minor=minor, total_memory=MEMORY, uuid="GPU-0",
        multi_processor_count=132 if capability == 90 else 148, warp_size=32, gcnArchName="",
        is_integrated=False, L2_cache_size=50 * 2**20, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        max_threads_per_multi_processor=2048,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_capability": lambda _device=None: (major, minor),
        "get_device_name": lambda _device=None: NAMES[capability],
        "get_device_properties": lambda _device=None: properties,
        "mem_get_info": lambda _device=None: (MEMORY, MEMORY),
        "memory_allocated": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "current_stream": lambda _device=None: Whatever(),
        "default_stream": lambda _device=None: Whatever(),
        "stream": lambda _stream: Whatever(),
        "device": lambda _device: Whatever(),
        "can_device_access_peer": lambda *_pair: True,
        "CUDAGraph": Whatever,
        "graph": Whatever,
        "graph_pool_handle": lambda: (0, 0),
        "cudart": lambda: Zero(),
        "Stream": Whatever,
        "Event": Whatever,
    }
    nothing = "synchronize empty_cache _lazy_init init manual_seed manual_seed_all ipc_collect"
    for name in (*nothing.split(), "reset_peak_memory_stats", "set_stream"):
        answers[name] = lambda *_args, **_kwargs: None
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    for place in (torch.cuda.streams, torch):
        setattr(place, "Stream", Whatever)  # noqa: B010


def call_python_directly() -> None:
    """Operators that SGLang wrote in Python run: torch would refuse tensors of the CPU."""
    from sglang.srt.utils import custom_op

    custom_op._call_directly_in_eager = lambda function, _operator: function


def keep_shapes() -> None:
    """Where SGLang looks at what kernels made: at scales of block fp8, and at counts of pages."""
    from sglang.srt.layers.quantization import fp8_utils
    from sglang.srt.mem_cache.allocator import paged, swa

    count = paged.get_num_new_pages

    def on_host(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # its tensors must be the host's, and are
            return count(*args, **kwargs)

    paged.get_num_new_pages = swa.get_num_new_pages = on_host

    transform = fp8_utils.transform_scale_ue8m0
    fp8_utils.transform_scale_ue8m0 = lambda sf, mn, *_own: transform(sf, mn, True)


def idle_triton(capability: int, asked: Callable[[str], None]) -> None:
    """Triton's kernels do nothing; `asked` is called with the name of each."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_active_torch_device=lambda: GPU,
        get_device_capability=lambda *_device: divmod(capability, 10),
        is_active=lambda: True,
        utils=types.SimpleNamespace(get_device_properties=lambda _device: {
            "multiprocessor_count": 132, "max_shared_mem": 232448, "warpSize": 32,
            "max_num_regs": 65536,
        }),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)

    def run(kernel: Any, *_args: Any, **_kwargs: Any) -> None:
        while not isinstance(kernel, triton.JITFunction):  # under a choice of its constants
            kernel = kernel.fn
        asked(kernel.__name__)

    for kind in (triton.JITFunction, triton.runtime.Autotuner, triton.runtime.Heuristics):
        kind.run = run


def _request_all_reduce(self: Any, group: Any, device: Any, *_args: Any, **_kwargs: Any) -> None:
    """SGLang's all-reduce over NVLink: its modules alone, as it wants pointers of other ranks.

    Read at sglang 0.5.23: custom_all_reduce_v2.py (can_use_custom_all_reduce_v2, __init__).
    """
    import torch.distributed as dist
    from sglang.kernels.ops.communication import all_reduce

    self.disabled, size = True, dist.get_world_size(group)
    if 1 < size <= GPUS:
        all_reduce._init_communicator()
        all_reduce._init_ipc_manager()
        all_reduce.get_all_reduce_module(torch.bfloat16, size)


def fake_groups() -> None:
    """Process groups of one process that stands for rank 0 of them."""
    import pynvml
    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators import (
        custom_all_reduce_v2,
        pynccl_wrapper,
        shm_broadcast,
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, group = dist.init_process_group, dist.new_group

    def init(*_args: Any, world_size: int, **_kwargs: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=world_size)

    def new(ranks: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return group(ranks, backend="fake")

    idle = lambda *_args, **_kwargs: None  # noqa: E731
    replaced = {"init_process_group": init, "new_group": new, "barrier": idle}
    for name, function in (replaced | {"monitored_barrier": idle}).items():
        setattr(dist, name, function)
    pynvml.nvmlInit = pynvml.nvmlShutdown = lambda: None
    shm_broadcast.MessageQueue.wait_until_ready = lambda _self: None
    custom_all_reduce_v2.can_use_custom_all_reduce_v2 = lambda **_pair: True
    custom_all_reduce_v2.CustomAllReduceV2.__init__ = _request_all_reduce
    pynccl_wrapper.NCCLLibrary.NCCL_CHECK = lambda _self, _result: None
