"""`nccl` groups over gloo: contiguous device tensors only, on a stream of their own.

As with NCCL a collective runs beside the current stream, and `wait()` of what it returns orders the
current stream after it, without waiting on the host.  So buffers that are used before are found.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.double.cuda_api import OPS, Event, Stream, current_stream, use_stream
from tests.helpers.group_calls import COALESCED, RENAMED, SAME

Gloo = dist.ProcessGroupGloo


class CollectiveWork(dist.Work):
    """Done already; the current stream has to be ordered after it all the same."""

    def __init__(self, event: Event, results: Any) -> None:
        super().__init__()
        self._event, self._results = event, results

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class TransferWork(dist.Work):
    """A send or receive under way: done when gloo's is, or when its group is aborted.

    With TORCH_NCCL_BLOCKING_WAIT `wait` waits on the host and raises what failed.  Without it the
    double waits too, since the bytes have to be there when the stream's next operator runs.
    """

    def __init__(self, work: Any, event: Event, *, blocks: bool) -> None:
        super().__init__()
        self._work, self._event, self._blocks = work, event, blocks
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self.abort(error)
        self._work = None  # it holds the tensor
        self._done.set()

    def abort(self, error: BaseException) -> None:
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def is_completed(self) -> bool:
        if self._done.is_set():
            self._event.query()
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        early = not self._done.is_set()
        self._done.wait()
        if early and self._blocks:
            self._event.synchronize()
        self._event.wait()
        if self._error is not None:
            raise RuntimeError(f"NCCL operation failed: {self._error}") from self._error
        return True


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _on_host(value: Any, name: str) -> Any:
    """The same memory for gloo.  Raises what NCCL raises."""
    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            raise RuntimeError(f"No backend type associated with device type cpu (nccl {name})")
        if not value.is_contiguous():
            raise RuntimeError(f"nccl {name}: tensors must be contiguous")
        return OPS.host_view(value.detach())
    if isinstance(value, list | tuple) and _tensors(value):
        return [_on_host(part, name) for part in value]
    return value


class Options:
    """Of ProcessGroupNCCL, as far as torch and Megatron set them."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._timeout: timedelta | None = None
        self.is_high_priority_stream, self.group_name = False, ""
        self.global_ranks_in_group: list[int] = []
        self.config, self.split_from = SimpleNamespace(), None


class ProcessGroupNCCL(dist.ProcessGroup):
    """What torch makes for backend "nccl"."""

    Options = Options
    supports_coalescing = supports_splitting = False
    _device_types = [torch.device("cuda")]  # noqa: RUF012  # torch asks for objects' tensors
    options = Options()
    set_timeout = _set_default_timeout = _set_sequence_number_for_group = lambda *_args: None

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        timeout = getattr(options, "_timeout", None)
        self._make = partial(Gloo, store, rank, size, *([timeout] if timeout else []))
        self._made: Any = None
        self._streams: dict[int, Stream] = {}
        self._transfers: list[TransferWork] = []
        self._aborted = False
        self.has_watchdog = os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1"
        if self.has_watchdog:  # others meet at the first operation, as NCCL's do
            self._made = self._make()

    @property
    def _gloo(self) -> Any:
        self._made = self._made or self._make()
        return self._made

    def abort(self) -> None:
        self._aborted = True
        for work in self._transfers:
            work.abort(RuntimeError("the communicator was aborted"))
        self._transfers.clear()

    def _on(self, device: int) -> Stream:
        """NCCL's stream of a device."""
        if device not in self._streams:
            self._streams[device] = Stream(device)
        return self._streams[device]

    def transfer(self, name: str, tensors: list[torch.Tensor], *where: int) -> TransferWork:
        """`send` or `recv`, which end when the other side has done its part."""
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        hosts = _on_host(tensors, name)
        device = tensors[0].device.index
        stream = self._on(device)
        stream.wait_stream(current_stream(device))
        with torch.no_grad(), use_stream(stream):
            OPS.use(tensors, name == "recv", f"nccl {name}")
            event = stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)
        started = getattr(self._gloo, name)(hosts, *where)
        work = TransferWork(started, event, blocks=not self.has_watchdog)
        self._transfers = [old for old in self._transfers if not old.is_completed()] + [work]
        return work

    def getBackendName(self) -> str:
        return "nccl"

    def _get_backend(self, device: Any) -> ProcessGroupNCCL:
        if torch.device(device).type != "cuda":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    def run(self, name: str, gloo: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            hosts = [_on_host(value, name) for value in args]
            named = {key: _on_host(value, name) for key, value in kwargs.items()}
            tensors = _tensors([args, list(kwargs.values())])
            device = tensors[0].device.index if tensors else OPS.get_device()
            stream = self._on(device)
            stream.wait_stream(current_stream(device))
            with use_stream(stream):
                # written or read: who uses a buffer of a collective early is wrong either way
                OPS.use(tensors, True, f"nccl {name}")
                getattr(self._gloo, gloo)(*hosts, **named).wait()
                event = stream.record_event()
        for tensor in _tensors(args):
            tensor.record_stream(stream)
        return CollectiveWork(event, _tensors(args[:1]))

    def barrier(self, *_args: Any, **_kwargs: Any) -> Any:
        OPS.sync_device(OPS.get_device())
        return self._gloo.barrier()


def _method(name: str, gloo: str) -> Callable[..., Any]:
    def call(self: ProcessGroupNCCL, *args: Any, **kwargs: Any) -> Any:
        return self.run(name, gloo, args, kwargs)

    return call


def _each(name: str, gloo: str) -> Callable[..., Any]:
    def call(self: ProcessGroupNCCL, outputs: Any, inputs: Any, *options: Any) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return [self.run(name, gloo, (*pair, *options), {}) for pair in pairs][-1]

    return call


def replace() -> None:
    """Put the group where torch takes its NCCL from."""
    for name in SAME:
        setattr(ProcessGroupNCCL, name, _method(name, name))
    for name in ("send", "recv"):
        setattr(ProcessGroupNCCL, name, partialmethod(ProcessGroupNCCL.transfer, name))
    for name, gloo in RENAMED.items():
        setattr(ProcessGroupNCCL, name, _method(name, gloo))
    for name, gloo in COALESCED.items():
        setattr(ProcessGroupNCCL, name, _each(name, gloo))
    for module in (dist, c10d):
        vars(module)["ProcessGroupNCCL"] = ProcessGroupNCCL
        vars(module)["is_nccl_available"] = lambda: True
    vars(c10d)["_NCCL_AVAILABLE"] = True
    setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))  # noqa: B010
