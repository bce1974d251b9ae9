"""Keep Indexer: which recorded positions a layer's sparse attention reads.

Rules as for routes (`replay.py`): keyed by (microbatch, model chunk, layer), each used once per
pass, and a record that is missing, unused or read twice ends the step.  Unlike routes they are
not loaded: of 200,000 tokens of DeepSeek-V3.2 one layer holds 1 GB.  A layer's record is read when
the layer runs, forward or recompute, and dropped after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moerl.trainer.model.layer_calls import Key, LayerCalls, Mode
from moerl.trainer.model.sparse_attention import RecordedSparseAttention

Read = Callable[[int], Tensor]  # layer -> [B, S, K] key numbers, -1 = none


class IndexerReplay(LayerCalls):
    """Positions of one step, for the sparse attention of all model chunks of one rank."""

    reason = "indexer_rows"
    what = "positions"

    def __init__(self, *chunks: tuple[int, ...]) -> None:
        super().__init__(*chunks)
        self.always_live = False  # a control: indexers choose where routes are replayed
        self._reads: dict[tuple[int, int], Read] = {}  # by microbatch and chunk

    def load(self, microbatch: int, read: Read, num_tokens: int, chunk: int = 0) -> None:
        """Register the records of one microbatch.

        num_tokens: fed-in tokens without padding, which each layer's record covers.
        """
        for layer in self.chunks[chunk]:
            self._add(Key(microbatch, chunk, layer), num_tokens)
        self._reads[microbatch, chunk] = read

    def mode(self, asked: Mode, microbatch: int, chunk: int) -> Mode:
        """Where routers run live, the positions that were loaded are replayed too."""
        if self.always_live:
            return Mode.OFF
        if asked is Mode.REPLAY:
            return asked
        return Mode.REPLAY if (microbatch, chunk) in self._reads else Mode.OFF

    def take(self, layer: int) -> Tensor | None:
        """Called by the attention of `layer`: [B, S, K] key numbers; None = its indexer chooses."""
        running = self._running(layer)
        if running is None:
            if self._chunk_of[layer] not in self._gradient_of:
                return None
            key = self._take_again(layer)
        elif running.mode is Mode.OFF:
            return None
        else:
            key = self._take_first(self.serves(layer), running)
        return self._reads[key.microbatch, key.chunk](layer)

    def clear(self) -> None:
        super().clear()
        self._reads.clear()


def attach_indexers(*chunks: Any) -> IndexerReplay:
    """Give the sparse attention of the chunks' decoders one owner of their records; returns it."""
    found = [
        {
            layer.layer_number - 1: layer.self_attention.core_attention
            for layer in chunk.decoder.layers
        }
        for chunk in chunks
    ]
    replay = IndexerReplay(*(tuple(sorted(layers)) for layers in found))
    for layers in found:
        for attention in layers.values():
            assert isinstance(attention, RecordedSparseAttention), type(attention)
            attention.choice = replay
    return replay
