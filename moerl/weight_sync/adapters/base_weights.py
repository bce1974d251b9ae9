"""W0 of adapted weights, kept once: in host memory, or on the device of the weights.

On the host it is page-locked and reaches a GPU through two buckets of the size of the largest
weight, so a merge holds no second model on the GPU:

    side stream      W0 0 in A | W0 1 in B | W0 2 in A | ...
    current stream             | merge 0   | merge 1   | ...

An event orders each two neighbours, as in `commit_copies`: a weight is merged when its W0 has
arrived, and a bucket is filled again when its weight has been merged.  No thread waits.  Where the
weights are on the CPU both kinds are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from moerl.config.lora_settings import BasePlace
from moerl.weight_sync.transports.pinned_memory import host_tensors


class BaseBuckets:
    """Two buffers on a GPU, and the stream that fills them in turn."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """Allocate both buffers.  num_bytes: size of the largest W0."""
        self.device, self._stream = device, torch.cuda.Stream(device)
        self._pair = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in "ab"]
        self._used = [torch.cuda.current_stream(device).record_event() for _ in "ab"]
        self._turn = 0

    def bring(self, every: Iterable[Tensor]) -> Iterator[Tensor]:
        """Copy tensors of page-locked memory to the GPU one after the other.

        A copy is valid until the next iteration, for the stream that was current at the first.
        """
        current = torch.cuda.current_stream(self.device)
        for kept in every:
            own, self._turn = self._turn, 1 - self._turn
            bucket = self._pair[own][: kept.nbytes].view(kept.dtype).view(kept.shape)
            self._stream.wait_event(self._used[own])
            with torch.cuda.stream(self._stream):
                bucket.copy_(kept, non_blocking=True)
            current.wait_event(self._stream.record_event())
            yield bucket
            self._used[own] = current.record_event()


class BaseWeights:
    """A copy of some weights, in their order; iterate to have each on the weights' device."""

    def __init__(
        self, weights: Sequence[Tensor], place: BasePlace, buckets: BaseBuckets | None = None
    ) -> None:
        """Copy the weights to their place.

        weights: the loaded tensors, on one device.  buckets: shared buffers; None makes a pair.

        Raises TransportError (room): no such host memory.
        """
        own = [weight.detach() for weight in weights]
        device = next((weight.device for weight in own if weight.is_cuda), None)
        self._buckets = None
        if device is None or place == "device":
            self._kept = [weight.clone() for weight in own]
            return
        self._kept = host_tensors(own)
        for kept, weight in zip(self._kept, own, strict=True):
            kept.copy_(weight, non_blocking=True)
        torch.cuda.synchronize(device)
        largest = max(kept.nbytes for kept in self._kept)
        self._buckets = buckets or BaseBuckets(device, largest)

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    def __iter__(self) -> Iterator[Tensor]:
        if self._buckets is None:
            return iter(self._kept)
        return self._buckets.bring(self._kept)
