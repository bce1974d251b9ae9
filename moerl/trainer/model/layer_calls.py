"""Which microbatch a layer's call serves, and that each record is used exactly once per pass.

Shared by replayed routes and replayed positions of sparse attention.

Which microbatch does a call serve?
    forward    the microbatch whose `forward(...)` context is open.
    recompute  the microbatch whose gradient flows: a hook on the output of each forward (`bind`)
               says so before autograd enters the graph behind it, whichever schedule is at work.
A layer is recomputed if and only if its forward ran without gradients inside a forward that has
them; that is the definition of activation checkpointing.  So this knows how often each record is
needed, needs no setting, works for any recompute granularity, and says which use is the last.
Rejected: patching megatron's checkpoint function (it has three, one of Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from moerl.core.errors import RecordError, TrainerError


class Mode(Enum):
    """Source of a layer's choice in a forward pass."""

    OFF = "off"  # live top-k
    REPLAY = "replay"  # recorded ids
    RECORD = "record"  # live top-k, stored for R2 and for the agreement audit


class Key(NamedTuple):
    """Identifies one record: layer is the global 0-based number."""

    microbatch: int
    chunk: int
    layer: int


class _Pass(NamedTuple):
    """The forward pass in progress."""

    microbatch: int
    chunk: int
    mode: Mode
    with_grad: bool


class LayerCalls:
    """The calls of one step, for some layers of all model chunks of one rank."""

    reason = "routing_rows"  # of the RecordErrors
    what = "routes"

    def __init__(self, *chunks: Sequence[int]) -> None:
        """Begin without records.  chunks: global 0-based layers with records, by model chunk."""
        self.chunks = tuple(tuple(layers) for layers in chunks)
        self.layers = tuple(layer for layers in self.chunks for layer in layers)
        self.rows_replayed = 0  # in forward passes, over layers and microbatches of the step
        self.rows_loaded = 0
        self._chunk_of = {layer: idx for idx, layers in enumerate(self.chunks) for layer in layers}
        assert len(self._chunk_of) == len(self.layers), f"chunks {self.chunks} share a layer"
        self._pass: _Pass | None = None
        self._gradient_of: dict[int, int] = {}  # chunk -> microbatch in backward
        self._loaded: set[Key] = set()
        self._forwarded: set[Key] = set()
        self._awaited: set[Key] = set()  # forwarded without gradients: will be recomputed
        self._recomputed: set[Key] = set()

    @contextmanager
    def forward(self, microbatch: int, mode: Mode, chunk: int = 0) -> Iterator[None]:
        """Layers of `chunk` inside this context serve `microbatch`, each exactly once.

        Raises RecordError when a record is missing, left over or used twice.
        """
        if self._pass is not None:
            raise TrainerError(f"microbatch {self._pass.microbatch} is still in its forward pass")
        keys = [Key(microbatch, chunk, layer) for layer in self.chunks[chunk]]
        missing = [key.layer for key in keys if key not in self._loaded]
        if mode is Mode.REPLAY and missing:
            raise RecordError(
                self.reason, f"microbatch {microbatch}: no {self.what} loaded for layers {missing}"
            )
        self._gradient_of.pop(chunk, None)  # a forward is never part of a backward pass
        self._pass = _Pass(microbatch, chunk, mode, torch.is_grad_enabled())
        try:
            yield
        finally:
            self._pass = None
        served = self._served(mode)
        unused = [key.layer for key in keys if served is not None and key not in served]
        if unused:
            raise RecordError(
                self.reason,
                f"microbatch {microbatch}: {self.what} of layers {unused} were not used",
            )

    def bind(self, output: Tensor, microbatch: int, chunk: int = 0) -> None:
        """Tie the backward pass of a replayed forward, recompute included, to its microbatch.

        output: of the chunk; its gradient is the first thing its backward pass sees.
        """

        def begin(_grad: Tensor) -> None:
            self._gradient_of[chunk] = microbatch

        if output.requires_grad:
            output.register_hook(begin)

    def serves(self, layer: int) -> Key:
        """Key of the record that a call of `layer` takes now, in a forward or a recompute."""
        chunk = self._chunk_of[layer]
        running = self._pass
        microbatch = self._gradient_of[chunk] if running is None else running.microbatch
        return Key(microbatch, chunk, layer)

    def finish_step(self) -> float:
        """Check that every loaded record was used once per pass, drop all; 1.0 = all covered.

        Raises RecordError when records were left over by the forward or by the recompute of a
        checkpointed layer.
        """
        left = sorted(self._loaded - self._forwarded) or sorted(self._awaited - self._recomputed)
        if left:
            raise RecordError(
                self.reason,
                f"{self.what} of (microbatch, chunk, layer) {[tuple(key) for key in left[:4]]} "
                "were loaded and not used",
            )
        cover = self.rows_replayed / self.rows_loaded if self.rows_loaded else 0.0
        self.clear()
        return cover

    def clear(self) -> None:
        """Drop everything, used or not."""
        self._gradient_of.clear()
        for keys in (self._loaded, self._forwarded, self._awaited, self._recomputed):
            keys.clear()
        self.rows_replayed = self.rows_loaded = 0

    def _served(self, mode: Mode) -> Container[Key] | None:
        """The records that a forward of this mode must have used; None = no record."""
        return self._forwarded if mode is Mode.REPLAY else None

    def _add(self, key: Key, num_rows: int) -> None:
        if key in self._loaded:
            raise RecordError(
                self.reason, f"microbatch {key.microbatch} layer {key.layer} is loaded already"
            )
        self._loaded.add(key)
        self.rows_loaded += num_rows

    def _running(self, layer: int) -> _Pass | None:
        """The forward pass that a call of `layer` belongs to; None in backward, and outside."""
        chunk, running = self._chunk_of[layer], self._pass
        if running is not None and running.chunk != chunk:
            raise TrainerError(f"layer {layer} of chunk {chunk} ran in chunk {running.chunk}")
        return running

    def _take_first(self, key: Key, running: _Pass) -> Key:
        if key in self._forwarded:
            raise RecordError(
                self.reason,
                f"layer {key.layer} asks for microbatch {key.microbatch} a second time",
            )
        self._forwarded.add(key)
        if running.with_grad and not torch.is_grad_enabled():
            self._awaited.add(key)
        return key

    def _take_again(self, layer: int) -> Key:
        key = self._key(self._gradient_of[self._chunk_of[layer]], layer)
        if key not in self._awaited or key in self._recomputed:
            raise RecordError(
                self.reason,
                f"layer {layer} asks for microbatch {key.microbatch} outside its forward pass "
                "and is not to be recomputed",
            )
        self._recomputed.add(key)
        return key

    def _is_last_use(self, key: Key) -> bool:
        return key not in self._awaited or key in self._recomputed

    def _key(self, microbatch: int, layer: int) -> Key:
        return Key(microbatch, self._chunk_of[layer], layer)
