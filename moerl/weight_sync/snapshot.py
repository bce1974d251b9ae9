"""The weight snapshot: one version of a trainer rank's parameters, from which senders send.

It is in host memory.  On CUDA it is page-locked and filled on a stream of its own, so a publish
takes no device memory for it and the training thread does not wait for the copy:

    training stream   step n | forward, backward of n + 1 ........ | step n + 1 (writes weights)
    side stream              | weights of n --> host memory |
    a sender                                                | packs, sends

Events order them: the copy begins after step n, step n + 1 begins after the copy (`before_write`),
and only senders wait as threads (`wait`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from moerl.core.errors import TransportError
from moerl.core.types import PolicyVersion
from moerl.weight_sync.transports.pinned_memory import host_buffer

_ALIGN = 64  # bytes


class WeightSnapshot:
    """One version of a rank's parameters; its memory is reused for every version."""

    def __init__(self) -> None:
        self.version: PolicyVersion | None = None
        self._changed = threading.Condition()  # of the version
        self._tensors: dict[str, Tensor] = {}
        self._memory: Tensor | None = None  # of the tensors, on CUDA
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def is_locked(self) -> bool:
        """The parameters are on a GPU: memory between them and a network is page-locked."""
        return self._memory is not None

    @torch.no_grad()
    def store(self, live: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Copy `live` for the senders; none may be reading the previous version."""
        device = next((tensor.device for tensor in live.values() if tensor.is_cuda), None)
        if self._tensors.keys() != live.keys():
            self._make(live, on_host=device is None)
        targets, sources = list(self._tensors.values()), [live[name] for name in self._tensors]
        if device is None:
            torch._foreach_copy_(targets, sources)
        else:
            self._copied = self._copy(device, targets, sources)
        self._offer(version)  # last: a sender that sees it then waits for its copy

    def _offer(self, version: PolicyVersion) -> None:
        with self._changed:
            self.version = version
            self._changed.notify_all()

    def wait_for(self, version: PolicyVersion, timeout_s: float) -> None:
        """Raises TransportError when the rank does not hold that version in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.version == version, timeout_s):
                raise TransportError(
                    "deadline", f"version {version} is not stored, {self.version} is"
                )

    def before_write(self) -> None:
        """Call before the parameters change: the current stream waits for the copy, no thread."""
        if self._copied is not None:
            self._copied.wait()

    def wait(self) -> None:
        """Until the snapshot holds its version."""
        if self._copied is not None:
            self._copied.synchronize()

    def reading(self) -> AbstractContextManager[None]:
        """A sender copies from the tensors.  Raises TransportError when they are gone."""
        return nullcontext()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def _make(self, live: Mapping[str, Tensor], *, on_host: bool) -> None:
        if on_host:
            self._tensors = {name: torch.empty_like(tensor) for name, tensor in live.items()}
            return
        starts, end = [], 0
        for tensor in live.values():
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._memory = host_buffer(end)
        self._tensors = {
            name: self._memory[start:][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(live.items(), starts, strict=True)
        }

    def _copy(
        self, device: torch.device, targets: list[Tensor], sources: list[Tensor]
    ) -> torch.cuda.Event:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # waiting threads sleep
            copied.record()
        return copied


class LiveWeights(WeightSnapshot):
    """The parameters themselves, for a trainer that waits for its publish (`colocated: turns`).

    A sender of a session that failed may still run when they are parked.
    """

    def store(self, live: Mapping[str, Tensor], version: PolicyVersion) -> None:
        """Let senders read `live`; of its tensors they keep views from version to version."""
        for name, tensor in self._tensors.items():
            same = live[name].untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert same, f"{name} has another storage than at the version before"
        self._tensors = self._tensors or dict(live)
        if any(tensor.is_cuda for tensor in live.values()):
            torch.cuda.synchronize()  # senders have streams of their own
        self._offer(version)

    def before_write(self) -> None:
        """Return when no sender packs a bucket; none does until the next `store`."""
        with self._changed:
            self.version = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._changed:
            if self.version is None:
                raise TransportError("peer", "the trainer's weights are not offered any more")
            yield
