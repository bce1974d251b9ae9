"""Router health: load, entropy and dead experts of a step, agreement by layer, and their plots."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.config import load_config, resolve
from moerl.data.packing import BytesRead
from moerl.observe.charts import MAX_CELLS, Heatmap, draw_heatmap
from moerl.observe.report import write_report
from moerl.observe.report_sections import router_heatmaps
from moerl.runtime.run_dir import RunDir
from moerl.trainer.learner.step_sums import StepSums, load_metrics
from moerl.trainer.passes.probe import Findings, RouteAgreement, judge

LAYERS = (1, 3)
EXPERTS = 8


def sums_of(*routes: dict[int, np.ndarray]) -> StepSums:
    """Sums of a rank that has read these microbatches."""
    sums = StepSums(load=torch.zeros(len(LAYERS), EXPERTS, dtype=torch.float64))
    for batch in routes:
        read = BytesRead()
        for layer, ids in batch.items():
            for part in np.array_split(ids, 3):  # as one rollout after the other is read
                read.count_experts(layer, part)
        sums.count_experts(LAYERS, read.experts)
    return sums


def random_routes(seed: int) -> dict[int, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        layer: np.array([draw.permutation(EXPERTS - layer)[:2] for _ in range(50)], np.uint8)
        for layer in LAYERS
    }


def test_the_load_is_what_a_count_by_hand_says() -> None:
    first, second = random_routes(0), random_routes(1)
    found = load_metrics(sums_of(first, second).load, LAYERS)
    entropies, worst = [], 0.0
    for layer in LAYERS:
        ids = np.concatenate([first[layer], second[layer]]).reshape(-1).tolist()
        share = [ids.count(expert) / len(ids) for expert in range(EXPERTS)]
        entropies.append(-sum(p * math.log(p) for p in share if p) / math.log(EXPERTS))
        worst = max(worst, max(share) * EXPERTS)
        assert found[f"routing/load_entropy_frac/layer_{layer}"] == pytest.approx(entropies[-1])
        assert found[f"routing/dead_experts/layer_{layer}"] == share.count(0.0) == layer
    assert found["routing/load_entropy_frac_mean"] == pytest.approx(sum(entropies) / 2)
    assert found["routing/load_entropy_frac_min"] == pytest.approx(min(entropies))
    assert found["routing/load_max_over_mean"] == pytest.approx(worst)
    assert found["routing/dead_experts"] == sum(LAYERS)


def test_even_and_collapsed_routers_are_the_ends_of_the_scale() -> None:
    even = np.arange(EXPERTS, dtype=np.uint8).reshape(-1, 2)
    collapsed = np.tile(np.array([[0, 1]], np.uint8), (9, 1))
    found = load_metrics(sums_of({1: even, 3: collapsed}).load, LAYERS)
    assert found["routing/load_entropy_frac/layer_1"] == pytest.approx(1.0)
    assert found["routing/dead_experts/layer_1"] == 0
    assert found["routing/load_entropy_frac_min"] == pytest.approx(math.log(2) / math.log(EXPERTS))
    assert found["routing/load_max_over_mean"] == pytest.approx(EXPERTS / 2)
    assert found["routing/dead_experts"] == EXPERTS - 2


def test_loads_add_over_minibatches_and_a_step_without_records_has_none() -> None:
    whole = sums_of(random_routes(0), random_routes(1))
    total = StepSums()
    total += sums_of(random_routes(0))
    total += sums_of(random_routes(1))
    assert torch.equal(total.load, whole.load)
    assert load_metrics(StepSums().load, ()) == load_metrics(sums_of().load, LAYERS) == {}


def test_agreement_is_reported_by_layer() -> None:
    routes = RouteAgreement(pairs=20, agree=18, clean=20, roots=2)
    found = judge(Findings(routes=routes, layers={1: (10.0, 10.0), 3: (10.0, 8.0)}))
    assert found["probe/live_agree_frac"] == 0.9
    assert found["probe/live_agree_frac/layer_1"] == 1.0
    assert found["probe/live_agree_frac/layer_3"] == 0.8
    assert not [name for name in judge(Findings(layers={1: (0.0, 0.0)})) if "layer" in name]


def rows() -> list[dict]:
    layers = {f"probe/live_agree_frac/layer_{n}": 1 - 0.01 * n for n in (0, 2, 10)}
    load = {"routing/load_entropy_frac_mean": 0.9, "routing/dead_experts": 1.0}
    return [{"step": 0, "time_s": 1.0} | layers | load, {"step": 1, "time_s": 2.0}]


def test_the_report_shows_routers_by_layer(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    loads = [{"step": 0, "layers": [0, 2], "counts": [[4, 0], [1, 3]]}]
    loads.append(loads[0] | {"step": 1, "counts": [[2, 2], [4, 0]]})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    run.expert_load.write_text("".join(json.dumps(load) + "\n" for load in loads))
    agreement, load = router_heatmaps(rows(), loads)
    assert (list(agreement.y), list(agreement.x)) == ([0, 2, 10], [1])
    assert [list(row) for row in load.values] == [[1.0, 1.0], [2.0, 0.0]], "of the newest step"
    page = write_report(run, resolve(load_config("quickstart"))).read_text()
    assert "<h2" in page
    for title in (agreement.title, load.title, "Entropy of the load", "Experts without a token"):
        assert title in page
    assert "<image" not in page, "the page loads no images"


def test_nothing_probed_draws_nothing() -> None:
    assert router_heatmaps([{"step": 0}], []) == []
    assert draw_heatmap(Heatmap("t", "x", "y", [], [], [], 0.0, 1.0)) is None


def test_many_experts_are_averaged_in_blocks() -> None:
    wide = [[1.0] * 384 for _ in range(3)]
    svg = draw_heatmap(Heatmap("t", "expert", "layer", range(384), [0, 1, 2], wide, 0.0, 1.0))
    assert svg is not None
    assert 3 * MAX_CELLS <= svg.count("<path") < 3 * MAX_CELLS + 60
    assert ">378<" in svg or ">383<" in svg or ">377<" in svg
