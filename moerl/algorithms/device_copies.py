"""Copies between host and device that do not make the host wait.

A copy from pageable memory, and any copy to the host whose result is read at once, ends only when
all work queued before it has run: with one per layer or microbatch a GPU idles between them.  On
the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`.  torch keeps the pinned copy until the device has read it."""
    if tensor.device == device or device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host.  Copies of a stream end in order: wait for the last."""

    def __init__(self, tensor: Tensor) -> None:
        value = tensor.detach()
        self._host: Tensor = value
        self._done: torch.cuda.Event | None = None
        if value.is_cuda:
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._done = torch.cuda.current_stream(value.device).record_event()

    def wait(self) -> None:
        """Until this copy, and all that its stream began before it, are complete."""
        if self._done is not None:
            self._done.synchronize()

    def get(self) -> Tensor:
        """On the CPU; rubbish before the copy was waited for."""
        return self._host


def to_host(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """All of them on the CPU, by the same numbers: one wait, for the last copy."""
    copies = {number: Download(tensor) for number, tensor in tensors.items()}
    for last in list(copies.values())[-1:]:
        last.wait()
    return {number: copy.get() for number, copy in copies.items()}
