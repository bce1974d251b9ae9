"""Published seconds of weight synchronisation against the forecast of the same layout.

    python bench/plan_anchors.py [--json]

Runs on shapes alone, a second on any machine.  For each published (layout, seconds) pair: the bound
at line rate, the efficiency that the seconds amount to, and the seconds predicted from the mean
efficiency (geometric) of the *other* pairs of the same method, with the error.  What a source does
not say is assumed and marked so.  None of these systems is this one: the errors say how well bytes
and line rate explain seconds, and PUBLISHED_EFFICIENCY what an average implementation reaches.

Pairs whose engine layout is not published are left out: Perplexity (1T, 256 -> 128, 1.3 s; 235B,
128 -> 32, 2 s), Awex (1 TB, 20 / 6 s), SkyRL (235B, 3.54 s).  So are those inside one node, which
no network card takes part in (checkpoint-engine, 235B on 8 H800, 6.22 s), and models without tables
here (GLM-5, 8.48 s and 58.3 s).
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

from moerl.config.schema import ParallelConfig
from moerl.layout import model_spec
from moerl.planning.sync_cost import PUBLISHED_EFFICIENCY, Forecast, Links, forecast
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"


@dataclass(frozen=True, slots=True)
class Anchor:
    """One published figure."""

    system: str
    method: str  # plan | broadcast | hierarchical, as in PUBLISHED_EFFICIENCY
    model: str  # folder below configs/models
    trainer: ParallelConfig  # assumed where the source gives only its ranks
    engines: EngineLayout
    quantization: str
    seconds: float
    not_network_s: float  # part of the seconds that the source attributes to something else
    source: str


_MILES = "miles 31f1ca96, docs/advanced/p2p-weight-transfer.md"
_CHECKPOINT = "checkpoint-engine 59a3c4f, README.md"
_VERL = "verl 1dda039b, docs, figures of its checkpoint engines"
_K2_TRAINER = ParallelConfig(tp=4, pp=4, ep=8, dp=16, first_stage_layers=16)
_235B_TRAINER = ParallelConfig(tp=4, pp=4, ep=8, dp=4, first_stage_layers=23, last_stage_layers=23)
_30B_TRAINER = ParallelConfig(tp=2, pp=1, ep=8, dp=8)
_EP32_K2 = EngineLayout(32, 32, 4, 8, 8)  # attention tp 8 assumed
_EP32_235B = EngineLayout(32, 32, 4, 2)
_EP8_30B = EngineLayout(8, 8, 1, 2)
_K2 = ("kimi-k2", _K2_TRAINER, _EP32_K2, "fp8_block")
_235B = ("qwen3-235b-a22b", _235B_TRAINER, _EP32_235B, "none")
_30B = ("qwen3-30b-a3b", _30B_TRAINER, _EP8_30B, "none")
ANCHORS = (
    Anchor("miles point to point", "plan", *_K2, 7.23, 0.88, _MILES),
    Anchor("miles point to point", "plan", *_235B, 3.16, 0.0, _MILES),
    Anchor("miles point to point", "plan", *_30B, 2.16, 0.0, _MILES),
    Anchor("miles broadcast", "broadcast", *_K2, 53.3, 0.0, _MILES),
    Anchor("miles broadcast", "broadcast", *_235B, 10.75, 0.0, _MILES),
    Anchor("miles broadcast", "broadcast", *_30B, 2.67, 0.0, _MILES),
    Anchor(
        "verl NCCL",
        "broadcast",
        "qwen3-30b-a3b",
        ParallelConfig(ep=2, dp=2),
        EngineLayout(2, 2, 1, 15),
        "none",
        7.0,
        0.0,
        _VERL,
    ),
    Anchor(
        "checkpoint-engine, 16 H20",
        "hierarchical",
        "kimi-k2",
        _K2_TRAINER,
        EngineLayout(16, 1, 1, 1, 8),
        "fp8_block",
        14.36,
        0.0,
        _CHECKPOINT,
    ),
    Anchor(
        "checkpoint-engine, 256 H20",
        "hierarchical",
        "kimi-k2",
        _K2_TRAINER,
        EngineLayout(16, 1, 1, 16, 8),
        "fp8_block",
        16.04,
        0.0,
        _CHECKPOINT,
    ),
)


def bound(anchor: Anchor) -> float:
    """Seconds at line rate, 400 Gb/s per rank."""
    spec = model_spec(json.loads((MODELS / anchor.model / "config.json").read_text()))
    policy = WirePolicy("bfloat16", anchor.quantization)
    if anchor.method == "plan":
        found: Forecast = forecast(
            spec, anchor.trainer, anchor.engines, policy, Links(), direct=anchor.engines.num
        )
        return found.planned_s
    # a broadcast moves the model, whatever the cut of an engine
    found = forecast(spec, anchor.trainer, EngineLayout(8, 8), policy, Links())
    return found.broadcast_s if anchor.method == "broadcast" else found.hierarchical_s


def rows() -> list[dict[str, object]]:
    bounds = {anchor: bound(anchor) for anchor in ANCHORS}
    reached = {a: bounds[a] / (a.seconds - a.not_network_s) for a in ANCHORS}
    out = []
    for anchor in ANCHORS:
        others = [reached[a] for a in ANCHORS if a.method == anchor.method and a is not anchor]
        predicted = bounds[anchor] / mean(others) + anchor.not_network_s
        out.append(
            {
                "system": anchor.system,
                "method": anchor.method,
                "model": anchor.model,
                "published_s": anchor.seconds,
                "line_rate_s": round(bounds[anchor], 3),
                "efficiency": round(reached[anchor], 3),
                "predicted_s": round(predicted, 2),
                "error": round(predicted / anchor.seconds - 1, 3),
                "source": anchor.source,
            }
        )
    return out


def mean(values: list[float]) -> float:
    """Geometric: twice too fast and twice too slow cancel."""
    return math.exp(sum(map(math.log, values)) / len(values))


def efficiency(method: str, table: list[dict[str, object]]) -> float:
    """Of all pairs of a method."""
    return mean([float(str(row["efficiency"])) for row in table if row["method"] == method])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    as_json, table = parser.parse_args().json, rows()
    if as_json:
        for row in table:
            print(json.dumps(row))
        return
    print(f"{'system':<28}{'model':<17}{'published':>10}{'line rate':>10}{'share':>8}", end="")
    print(f"{'predicted':>11}{'error':>8}")
    for row in table:
        print(
            f"{row['system']:<28}{row['model']:<17}{row['published_s']:>9} s"
            f"{row['line_rate_s']:>8} s{row['efficiency']:>8.1%}{row['predicted_s']:>9} s"
            f"{row['error']:>+8.0%}"
        )
    for method, constant in PUBLISHED_EFFICIENCY.items():
        print(
            f"{method}: {efficiency(method, table):.3f} of line rate (moerl plan uses {constant})"
        )


if __name__ == "__main__":
    main()
