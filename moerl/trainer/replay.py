"""Keep Routing: the trainer's routers select the experts that the engine recorded.

Only the selection is replayed; gate weights come from the live router logits, so the router and the
chosen experts receive gradient and an expert that no record names receives exactly zero.

megatron-core calls `router.router_replay.get_replay_topk(...)` where it would take the top-k.  Its
own `RouterReplay` keeps instances in a process-global list (a second model in the process shifts
the order), accepts too few rows (the rest goes to no expert), repeated ids (probability mass
vanishes) and a wrong k.  This module keeps that one interface and replaces the rest: instances are
mapped by global layer number, data is keyed by (microbatch, layer), every row is checked and used
exactly once per forward, and anything else is an error.  Source of the interface:
megatron-core 0.16.1 `transformer/moe/router_replay.py`.

Legend: N tokens of one rank and microbatch in router order (s-major: row = s * B + b), E experts,
K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from moerl.errors import RecordError, TrainerError

TopK = Callable[..., tuple[Tensor, Tensor]]


class Mode(Enum):
    """What routers do in a forward pass."""

    OFF = "off"  # live top-k
    REPLAY = "replay"  # recorded ids
    RECORD = "record"  # live top-k, kept for the agreement audit


@dataclass(frozen=True, slots=True)
class LiveChoice:
    """What a router would choose by itself, from a RECORD forward."""

    ids: Tensor  # [N, K] i64, by descending score
    margin: Tensor  # [N] f32: score of the last chosen minus score of the first not chosen


class RouteReplay:
    """Routes of one step, for the decoder routers of one model.

    >>> replay.load(0, {layer: rows for layer, rows in routes.items()})   # rows [N, K]
    >>> with replay.forward(0, Mode.REPLAY):
    ...     model(...)
    >>> replay.finish_step()
    """

    def __init__(self, layers: tuple[int, ...], *, num_experts: int, top_k: int) -> None:
        """layers: global 0-based numbers of the MoE layers on this rank."""
        self.layers, self.num_experts, self.top_k = layers, num_experts, top_k
        self.mode = Mode.OFF
        self.rows_replayed = 0  # over layers and microbatches since the last finish_step
        self.rows_loaded = 0
        self._microbatch = -1
        self._rows: dict[tuple[int, int], Tensor] = {}
        self._used: set[tuple[int, int]] = set()
        self._live: dict[tuple[int, int], LiveChoice] = {}

    def load(self, microbatch: int, routes: Mapping[int, Tensor]) -> None:
        """Give the recorded ids of one microbatch: one [N, K] integer tensor per layer.

        Raises RecordError: `routing_rows` (layers missing or unknown, wrong shape, loaded twice),
        `routing_range`, `routing_duplicate`.
        """
        if set(routes) != set(self.layers):
            raise RecordError(
                "routing_rows",
                f"microbatch {microbatch}: routes of layers {sorted(routes)}, "
                f"this rank needs {list(self.layers)}",
            )
        for layer, rows in routes.items():
            key = (microbatch, layer)
            if key in self._rows:
                raise RecordError(
                    "routing_rows", f"microbatch {microbatch} layer {layer} is loaded already"
                )
            self._rows[key] = self._checked(rows, microbatch, layer)
            self.rows_loaded += len(rows)

    @contextmanager
    def forward(self, microbatch: int, mode: Mode) -> Iterator[None]:
        """Routers inside this context serve `microbatch`; on exit each must have run exactly once.

        Raises RecordError `routing_rows` when a row is missing, left over or asked for twice.
        """
        if self.mode is not Mode.OFF or self._microbatch >= 0:
            raise TrainerError(f"microbatch {self._microbatch} is still in its forward pass")
        missing = [layer for layer in self.layers if (microbatch, layer) not in self._rows]
        if mode is Mode.REPLAY and missing:
            raise RecordError(
                "routing_rows", f"microbatch {microbatch}: no routes loaded for layers {missing}"
            )
        self.mode, self._microbatch = mode, microbatch
        try:
            yield
        finally:
            self.mode, self._microbatch = Mode.OFF, -1
        served = self._used if mode is Mode.REPLAY else self._live
        unused = [layer for layer in self.layers if (microbatch, layer) not in served]
        if mode is not Mode.OFF and unused:
            raise RecordError(
                "routing_rows", f"microbatch {microbatch}: routes of layers {unused} were not used"
            )

    def live(self, microbatch: int, layer: int) -> LiveChoice:
        """The live choice of a RECORD forward."""
        return self._live[microbatch, layer]

    def recorded(self, microbatch: int, layer: int) -> Tensor:
        """The loaded ids, [N, K] i64."""
        return self._rows[microbatch, layer]

    def finish_step(self) -> float:
        """Check that everything loaded was replayed, forget it, return the covered fraction (1.0).

        Raises RecordError `routing_rows` when loaded rows were left over.
        """
        left = sorted(set(self._rows) - self._used)
        if left:
            raise RecordError(
                "routing_rows", f"routes of (microbatch, layer) {left[:4]} were loaded and not used"
            )
        cover = self.rows_replayed / self.rows_loaded if self.rows_loaded else 0.0
        self.clear()
        return cover

    def clear(self) -> None:
        """Forget everything, used or not."""
        self._rows.clear()
        self._used.clear()
        self._live.clear()
        self.rows_replayed = self.rows_loaded = 0

    def choose(self, layer: int, scores: Tensor, topk: int, live: TopK) -> tuple[Tensor, Tensor]:
        """Called by the router of `layer`: (scores of the chosen [N, K], ids [N, K])."""
        if self.mode is Mode.OFF:
            return live()
        key = (self._microbatch, layer)
        if self.mode is Mode.RECORD:
            if key in self._live:
                raise RecordError(
                    "routing_rows", f"layer {layer} recorded microbatch {key[0]} twice"
                )
            chosen, ids = live()
            self._live[key] = LiveChoice(ids.detach(), _margin(scores.detach(), topk))
            return chosen, ids
        if key in self._used:
            raise RecordError(
                "routing_rows", f"layer {layer} asks for microbatch {key[0]} a second time"
            )
        rows = self._rows[key]
        if rows.shape != (scores.shape[0], topk) or scores.shape[1] != self.num_experts:
            raise RecordError(
                "routing_rows",
                f"layer {layer} routes {scores.shape[0]} tokens to {topk} of {scores.shape[1]} "
                f"experts; the record holds {tuple(rows.shape)} of {self.num_experts}",
            )
        self._used.add(key)
        self.rows_replayed += len(rows)
        return scores.gather(1, rows), rows

    def _checked(self, rows: Tensor, microbatch: int, layer: int) -> Tensor:
        where = f"microbatch {microbatch} layer {layer}"
        if rows.dim() != 2 or rows.shape[1] != self.top_k:
            raise RecordError(
                "routing_rows", f"{where}: shape {tuple(rows.shape)}, want [tokens, {self.top_k}]"
            )
        ids = rows.long()
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
        return ids


class LayerReplay:
    """What one router holds as its `router_replay`; the interface megatron-core calls."""

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


def attach(model: Any, *, num_experts: int, top_k: int) -> RouteReplay:
    """Put one `LayerReplay` on every MoE router of `model.decoder` and return their owner.

    model: the unwrapped GPTModel.  Multi-token-prediction routers are left alone.
    """
    routers: dict[int, Any] = {}
    for layer in model.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            routers[layer.layer_number - 1] = router
    replay = RouteReplay(tuple(sorted(routers)), num_experts=num_experts, top_k=top_k)
    for number, router in routers.items():
        router.router_replay = LayerReplay(replay, number)
    return replay


def _margin(scores: Tensor, topk: int) -> Tensor:
    """Score of the k-th minus score of the (k+1)-th expert, [N] f32; inf when all are chosen."""
    if topk >= scores.shape[1]:
        return torch.full((scores.shape[0],), torch.inf)
    best = scores.float().topk(topk + 1, dim=1).values
    return best[:, -2] - best[:, -1]
