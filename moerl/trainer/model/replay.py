"""Keep Routing: the trainer's routers select recorded experts, the engine's or their own (R2).

Only the selection is replayed; gate weights come from the live router logits, so the router and the
chosen experts receive gradient and an expert that no record names receives exactly zero.

megatron-core calls `router.router_replay.get_replay_topk(...)` where it would take the top-k.  Its
own `RouterReplay` keeps instances in a process-global list (a second model in the process shifts
the order), accepts too few rows (the rest goes to no expert), repeated ids (probability mass
vanishes) and a wrong k, and ties a recomputed layer to a microbatch by the order of a queue, which
replays another microbatch's routes under 1F1B.  This module keeps the interface and replaces
the rest: routers are mapped by global layer number, rows are keyed by (microbatch, model chunk,
layer), every row is checked, and anything but one use per pass is an error.  Source of the
interface: megatron-core 0.19.2 `transformer/moe/router_replay.py`.

`LayerCalls` knows which microbatch a call serves.

Legend: N tokens of one rank and microbatch in router order (s-major: row = s * B + b), E experts,
K experts per token.

Which microbatch a layer's call serves, and that each record is used exactly once per pass.

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

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moerl.algorithms.device_copies import upload
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


TopK = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RouterTopK:
    """The live choice of a router, from a RECORD forward."""

    ids: Tensor  # [N, K] i64, by descending score
    margin: Tensor  # [N] f32: score of the last chosen minus score of the first not chosen


class RouteReplay(LayerCalls):
    """Routes of one step, for the decoder routers of all model chunks of one rank.

    >>> replay.load(0, {layer: rows for layer, rows in routes.items()})   # rows [N, K]
    >>> with replay.forward(0, Mode.REPLAY):
    ...     output = model(...)
    >>> replay.bind(output, 0)                                            # before backward
    >>> replay.finish_step()
    """

    def __init__(self, *chunks: Sequence[int], num_experts: int, top_k: int) -> None:
        """Begin without routes.  chunks: global 0-based MoE layers of each local model chunk."""
        super().__init__(*chunks)
        self.num_experts, self.top_k = num_experts, top_k
        self.held_bytes = self.peak_bytes = 0  # of ids before their last use
        self._rows: dict[Key, Tensor] = {}
        self._live: dict[Key, RouterTopK] = {}

    def check(self, microbatch: int, routes: Mapping[int, Tensor], chunk: int = 0) -> None:
        """Whether `load` takes these routes.  Reads nothing that a pass changes: any thread may.

        Raises RecordError: `routing_rows` (layers missing or unknown, wrong shape),
        `routing_range`, `routing_duplicate`.
        """
        if set(routes) != set(self.chunks[chunk]):
            raise RecordError(
                "routing_rows",
                f"microbatch {microbatch}: routes of layers {sorted(routes)}, "
                f"chunk {chunk} of this rank needs {list(self.chunks[chunk])}",
            )
        for layer, rows in routes.items():
            self._check(rows, Key(microbatch, chunk, layer))

    def load(
        self,
        microbatch: int,
        routes: Mapping[int, Tensor],
        chunk: int = 0,
        *,
        checked: bool = False,
    ) -> None:
        """Load the recorded ids of one microbatch and chunk: one [N, K] integer tensor per layer.

        The tensors are kept unchanged, u8 or u16, until a router needs them.  checked: they have
        passed `check`.
        Raises RecordError as `check` does, and `routing_rows` for routes that are loaded twice.
        """
        if not checked:
            self.check(microbatch, routes, chunk)
        for layer, rows in routes.items():
            key = Key(microbatch, chunk, layer)
            self._add(key, len(rows))
            self._rows[key] = rows
            self.held_bytes += rows.nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def live(self, microbatch: int, layer: int) -> RouterTopK:
        """The live choice of a RECORD forward."""
        return self._live[self._key(microbatch, layer)]

    def rows(self, key: Key) -> Tensor:
        """Loaded rows before their last use: [N, K] u8 or u16."""
        return self._rows[key]

    def take_live(self, microbatch: int, chunk: int = 0) -> dict[Key, RouterTopK]:
        """Return all live choices of one RECORD forward and drop them."""
        keys = [Key(microbatch, chunk, layer) for layer in self.chunks[chunk]]
        return {key: self._live.pop(key) for key in keys}

    def clear(self) -> None:
        """Drop everything, used or not; `peak_bytes` stays."""
        super().clear()
        self._rows.clear()
        self._live.clear()
        self.held_bytes = 0

    def choose(self, layer: int, scores: Tensor, topk: int, live: TopK) -> tuple[Tensor, Tensor]:
        """Called by the router of `layer`: (scores of the chosen [N, K], ids [N, K])."""
        running = self._running(layer)
        if running is None:
            if self._chunk_of[layer] not in self._gradient_of:
                return live()
            return self._replay(self._take_again(layer), scores, topk)
        key = self.serves(layer)
        if running.mode is Mode.OFF:
            return live()
        if running.mode is Mode.REPLAY:
            self.rows_replayed += len(self._rows[self._take_first(key, running)])
            return self._replay(key, scores, topk)
        if key in self._live:
            raise RecordError(
                "routing_rows", f"layer {layer} recorded microbatch {key.microbatch} twice"
            )
        chosen, ids = live()
        self._live[key] = RouterTopK(ids.detach(), _margin(scores.detach(), topk))
        return chosen, ids

    def _served(self, mode: Mode) -> Container[Key] | None:
        return self._live if mode is Mode.RECORD else super()._served(mode)

    def _replay(self, key: Key, scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        rows = self._rows[key]
        if rows.shape != (scores.shape[0], topk) or scores.shape[1] != self.num_experts:
            raise RecordError(
                "routing_rows",
                f"layer {key.layer} routes {scores.shape[0]} tokens to {topk} of {scores.shape[1]} "
                f"experts; the record holds {tuple(rows.shape)} of {self.num_experts}",
            )
        if self._is_last_use(key):
            self.held_bytes -= self._rows.pop(key).nbytes
        ids = upload(rows, scores.device).long()
        return scores.gather(1, ids), ids

    def _check(self, rows: Tensor, key: Key) -> None:
        where = f"microbatch {key.microbatch} layer {key.layer}"
        if rows.dim() != 2 or rows.shape[1] != self.top_k:
            raise RecordError(
                "routing_rows", f"{where}: shape {tuple(rows.shape)}, want [tokens, {self.top_k}]"
            )
        ids = rows.int()
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.num_experts):
            raise RecordError(
                "routing_range", f"{where}: an id lies outside 0..{self.num_experts - 1}"
            )
        ordered = ids.sort(dim=1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        if bool(repeated.any()):
            row = int(repeated.nonzero()[0])
            raise RecordError(
                "routing_duplicate", f"{where} row {row} repeats an expert: {ids[row].tolist()}"
            )


class LayerReplay:
    """The `router_replay` of one router; the interface megatron-core calls."""

    def __init__(self, replay: RouteReplay, layer: int) -> None:
        self.replay, self.layer = replay, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores [N, E] live -> (scores of the chosen [N, K], ids [N, K])."""
        assert default_compute_topk is not None, "the router passes its own top-k"
        take = default_compute_topk
        return self.replay.choose(
            self.layer, scores, topk, lambda: take(scores, topk, num_groups, group_topk)
        )


def attach(*chunks: Any, num_experts: int, top_k: int) -> RouteReplay:
    """Put one `LayerReplay` on every MoE router of the chunks' decoders; returns their owner.

    chunks: the unwrapped GPTModels of this rank.  Multi-token-prediction routers are unchanged.
    """
    routers: list[dict[int, Any]] = []
    for chunk in chunks:
        found = {
            layer.layer_number - 1: layer.mlp.router
            for layer in chunk.decoder.layers
            if hasattr(layer.mlp, "router")
        }
        routers.append(dict(sorted(found.items())))
    replay = RouteReplay(*(tuple(found) for found in routers), num_experts=num_experts, top_k=top_k)
    for found in routers:
        for number, router in found.items():
            router.router_replay = LayerReplay(replay, number)
    return replay


def _margin(scores: Tensor, topk: int) -> Tensor:
    """Score of the k-th minus score of the (k+1)-th expert, [N] f32; inf when all are chosen."""
    if topk >= scores.shape[1]:
        return torch.full((scores.shape[0],), torch.inf)
    best = scores.float().topk(topk + 1, dim=1).values
    return best[:, -2] - best[:, -1]
