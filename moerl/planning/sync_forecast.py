"""`moerl plan RECIPE`: forecast of a publish, from shapes alone.

Needs the recipe and the model's config.json, neither torch nor a GPU, so it runs on a login node
before a cluster is reserved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from moerl.config import Config
from moerl.config.load import CONFIG_ROOT
from moerl.config.mesh import check_mesh
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.core.json_files import read_model_config
from moerl.layout import ModelSpec, model_spec
from moerl.planning.layout_check import Spread
from moerl.planning.sync_cost import PUBLISHED_EFFICIENCY, Forecast, Links
from moerl.weight_sync.buckets import WirePolicy, engine_wants
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import TRAINER

Layouts = tuple[ModelSpec, ParallelConfig, EngineLayout, WirePolicy]

GB = 1e9  # bytes, as network cards are sold
SHOWN_HOPS = 8  # per relay round; --json has all


def planned_layouts(config: Config, shapes: Mapping[str, Any] | None = None) -> list[Layouts]:
    """Model, layouts of both sides, and wire policy of a recipe, per size of engines.

    shapes: the model's config.json; None: read it.  Raises ConfigError or ModelError for a recipe
    without a readable model folder.
    """
    trainer = config.trainer.parallel
    check_mesh(trainer)
    shapes = shapes or recipe_shapes(config)
    spec, policy = model_spec(shapes), _policy(config, shapes)
    counts = Counter(config.engine.sizes.values())
    return [
        (spec, trainer, _engines(config, tp, num), policy) for tp, num in sorted(counts.items())
    ]


def _engines(config: Config, tp: int, num: int) -> EngineLayout:
    engine = config.engine
    return EngineLayout(
        tp=tp,
        ep=engine.ep,
        dp=engine.attention_dp,
        num=num,
        dense_tp=int(engine.args.get("moe_dense_tp_size") or 0),
    )


def _policy(config: Config, shapes: Mapping[str, Any]) -> WirePolicy:
    asked = config.engine.args.get("quantization")
    if asked not in (None, "none", "fp8"):
        raise ConfigError("engine.args.quantization", asked, "use none or fp8")
    return WirePolicy(config.engine.dtype, engine_wants(asked, shapes), config.sync.bucket_bytes)


def recipe_shapes(config: Config) -> dict[str, Any]:
    """The model's config.json.  Raises ConfigError for a recipe without a readable folder."""
    name = config.model.path
    if not name:
        raise ConfigError(
            "model.path",
            name,
            "moerl plan needs a folder with a config.json; a run of a tiny model keeps one in "
            "runs/NAME/model",
        )
    path = next((p for p in (Path(name), CONFIG_ROOT / name) if p.exists()), Path(name))
    return read_model_config(path)


def as_json(found: Forecast, links: Links, efficiency: float | None) -> dict[str, object]:
    """All that `describe` prints, in bytes and seconds."""
    shares = _shares(efficiency)
    return asdict(found) | {
        "rank_ratio": found.rank_ratio,
        "nic_ratio": found.nic_ratio,
        "links": asdict(links),
        "efficiency": shares,
        "predicted_plan_s": found.planned_s / shares["plan"],
        "predicted_broadcast_s": found.broadcast_s / shares["broadcast"],
        "predicted_hierarchical_s": found.hierarchical_s / shares["hierarchical"],
    }


def describe(
    found: Forecast,
    links: Links,
    layouts: Layouts,
    efficiency: float | None,
) -> str:
    """The printed report."""
    spec, trainer, engines, policy = layouts
    wire = policy.dtype if policy.quantization == "none" else f"fp8 blocks and {policy.dtype}"
    lines = [
        f"{spec.family}, {_gb(found.model_bytes)} GB on the wire ({wire}), "
        f"{found.expert_share:.0%} routed experts",
        f"trainer: {found.trainer_ranks:,} ranks, tp {trainer.tp} pp {trainer.pp} cp {trainer.cp} "
        f"dp {trainer.dp} ep {trainer.ep} etp {trainer.etp}",
        f"engines: {found.engines} x {found.ranks_per_engine} ranks, ep {engines.ep}, attention "
        f"over {engines.tp // engines.dp}, dense layers over {engines.dense_tp or engines.tp}",
        "",
        _row("per rank, GB", "min", "mean", "max"),
        _row("an engine rank receives", *_three(found.received)),
        _row("a trainer rank sends", *_three(found.sent)),
        _row("  without relay", *_three(found.sent_without_relay)),
        _row("boxes to one engine", *(f"{n:,.0f}" for n in _ends(found.parts))),
        "",
        *_traffic(found),
        "",
        _row(f"seconds, {links.nic_gb_s:g} GB/s a card", "plan", "broadcast", "hierarchical"),
        _row("line rate (bound)", *_seconds(found, dict.fromkeys(PUBLISHED_EFFICIENCY, 1.0))),
        _row(_at(efficiency), *_seconds(found, _shares(efficiency))),
        "",
        f"bounds: engine ingress {_gb(found.received.high)} GB per rank, every needed byte once; "
        f"trainer egress {_gb(found.sent.high)} GB per rank for the engines that it serves itself, "
        "none for others",
        f"buffers: trainer rank {_gb(found.trainer_buffer)} GB (weight snapshot, two buckets), "
        f"engine rank {_gb(found.engine_buffer)} GB (staging)",
        _relay(found),
    ]
    if found.nodes_per_engine == 1:
        lines.append(
            "engines of one node: cards of a hierarchical broadcast carry no more than the plan; "
            "the plan saves the gather and the copies inside a node"
        )
    return "\n".join(lines)


def _traffic(found: Forecast) -> list[str]:
    return [
        _row("traffic, GB", "plan", "broadcast", "ratio"),
        _row("into one engine", _gb(found.engine_bytes), _gb(_per_engine(found)), ""),
        _row(
            "into all engine ranks",
            _gb(found.planned_bytes),
            _gb(found.broadcast_bytes),
            f"{found.rank_ratio:.2f}",
        ),
        _row(
            "through network cards",
            _gb(found.planned_bytes),
            _gb(found.broadcast_nic_bytes),
            f"{found.nic_ratio:.2f}",
        ),
        _row("gather on the trainer", "0", _gb(found.gather_bytes), ""),
    ]


def _shares(efficiency: float | None) -> dict[str, float]:
    return PUBLISHED_EFFICIENCY | (
        {} if efficiency is None else dict.fromkeys(PUBLISHED_EFFICIENCY, efficiency)
    )


def _at(efficiency: float | None) -> str:
    return "at published shares" if efficiency is None else f"at {efficiency:.0%} of line rate"


def _seconds(found: Forecast, shares: Mapping[str, float]) -> list[str]:
    bounds = (found.planned_s, found.broadcast_s, found.hierarchical_s)
    return [f"{s / share:.3g}" for s, share in zip(bounds, shares.values(), strict=True)]


def _per_engine(found: Forecast) -> float:
    return found.broadcast_bytes / found.engines


def _relay(found: Forecast) -> str:
    direct = sum(hop.src == TRAINER for hop in found.hops)
    parts = [f"relay: the trainer serves {direct} of {found.engines} engines"]
    for number, hops in groupby(found.hops, key=lambda hop: hop.round):
        pairs = [f"{hop.src} -> {hop.dst}" for hop in hops]
        rest = len(pairs) - SHOWN_HOPS
        if number:
            shown = ", ".join(pairs[:SHOWN_HOPS]) + (f" and {rest} more" if rest > 0 else "")
            parts.append(f"round {number}: {shown}")
    return "; ".join(parts)


def _row(label: str, *cells: str) -> str:
    return f"{label:<26}" + "".join(f"{cell:>14}" for cell in cells)


def _ends(spread: Spread) -> tuple[float, float, float]:
    return spread.low, spread.mean, spread.high


def _three(spread: Spread) -> list[str]:
    return [_gb(value) for value in _ends(spread)]


def _gb(num_bytes: float) -> str:
    value = num_bytes / GB
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
