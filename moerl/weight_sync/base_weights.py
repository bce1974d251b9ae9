"""W0 of adapted weights, kept once: in host memory, or on the device of the weights.

On the host it is page-locked and reaches a GPU through two buckets of the size of the largest
weight, so a merge holds no second model there:

    side stream      W0 0 in A | W0 1 in B | W0 2 in A | ...
    current stream             | merge 0   | merge 1   | ...

An event orders each two neighbours, as in `commit_copies`: a weight is merged when its W0 has
arrived, and a bucket is filled again when its weight has been merged.  No thread waits.  Where the
weights are on the CPU both kinds are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moerl.config.lora_settings import BasePlace
from moerl.weight_sync.transports.pinned_memory import host_tensors


class BaseWeights:
    """A copy of some weights of one device, in their order."""

    def __init__(self, weights: Sequence[Tensor], place: BasePlace) -> None:
        """weights: as they were loaded.  Raises TransportError (room): no such host memory."""
        own = [weight.detach() for weight in weights]
        self._device = next((weight.device for weight in own if weight.is_cuda), None)
        self._pair: list[Tensor] = []
        if self._device is None or place == "device":
            self._kept = [weight.clone() for weight in own]
            return
        self._kept = host_tensors(own)
        for kept, weight in zip(self._kept, own, strict=True):
            kept.copy_(weight, non_blocking=True)
        torch.cuda.synchronize(self._device)
        largest = max((kept.nbytes for kept in self._kept), default=0)
        self._stream = torch.cuda.Stream(self._device)
        self._pair = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in "ab"]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def __iter__(self) -> Iterator[Tensor]:
        """Each W0 on the weights' device, for the current stream, until the next is asked for."""
        if not self._pair:
            yield from self._kept
            return
        current, used = torch.cuda.current_stream(self._device), list[torch.cuda.Event]()
        self._stream.wait_stream(current)
        for number, kept in enumerate(self._kept):
            if number >= len(self._pair):
                self._stream.wait_event(used[number - len(self._pair)])
            bucket = self._pair[number % 2][: kept.nbytes].view(kept.dtype).view(kept.shape)
            with torch.cuda.stream(self._stream):
                bucket.copy_(kept, non_blocking=True)
            current.wait_event(self._stream.record_event())
            yield bucket
            used.append(current.record_event())
