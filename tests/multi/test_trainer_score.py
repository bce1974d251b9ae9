"""Scoring of kept rollouts: variants, executed experts, live agreement, and the controls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moerl.audit.score_job import VARIANTS, ScoreJob, load_job
from moerl.core.errors import ConfigError
from moerl.core.serialization import encode_value
from moerl.records.blob_store import BlobStore
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import LAYERS, make_model, make_plan

LIMIT = 1e-5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ScoreJob:
    root = tmp_path_factory.mktemp("score")
    store = BlobStore(root / "blobs", "n0")
    rollouts = [r for group in make_plan(store).groups for r in group.rollouts()]
    (root / "rollouts").write_bytes(encode_value(rollouts))
    return ScoreJob(
        model=str(make_model(root / "model")),
        rollouts=str(root / "rollouts"),
        blob_dir=str(root / "blobs"),
        blob_node="n0",
        out="",
        variants=list(VARIANTS),
        dtypes=["fp32", "bf16"],
        max_tokens_per_microbatch=64,
        version="0.0",
    )


def _run(job: ScoreJob, folder: Path, ranks: int, ep: int) -> dict[str, np.ndarray]:
    from dataclasses import replace

    out = folder / f"found{ranks}.npz"
    replace(job, out=str(out), ep=ep).save(folder / "job.json")
    run_ranks(ranks, ["-m", "moerl.audit.score_ranks", "--job", str(folder / "job.json")])
    return dict(np.load(out))


def test_two_expert_parallel_ranks_score_like_one(job: ScoreJob, tmp_path: Path) -> None:
    one, two = _run(job, tmp_path, 1, 1), _run(job, tmp_path, 2, 2)
    num_sampled = int(one["num_sampled"].sum())
    for name in VARIANTS:
        assert one[f"fp32/{name}"].shape == (num_sampled,)
        assert np.abs(one[f"fp32/{name}"] - two[f"fp32/{name}"]).max() <= LIMIT, name
    both = one["fp32/both"]
    of_indexers = {name for name in VARIANTS if "indexer" in name}
    for name in VARIANTS.keys() - {"both"} - of_indexers:
        assert np.abs(one[f"fp32/{name}"] - both).max() > 100 * LIMIT, name
    assert of_indexers
    for name in of_indexers:  # this model's attention is dense
        assert np.array_equal(one[f"fp32/{name}"], both), name
    assert 0 < np.abs(one["bf16/both"] - both).max() < 0.3
    for found in (one, two):
        slots = int(found["fp32/slots"])
        assert slots == LAYERS * int(found["fp32/tokens"]) > 0
        assert int(found["fp32/executed"]) == slots
        assert int(found["fp32/slots_agree"]) < slots  # random routes are not the live ones
        roots = len(found["fp32/root_margin"])
        assert 0 < roots < slots - int(found["fp32/slots_agree"])  # the rest follows from them
        assert roots <= int(found["fp32/slots_clean"]) < slots
        pairs = found["fp32/layer_pairs"]
        assert found["fp32/layers"].tolist() == list(range(LAYERS))
        totals = [slots, int(found["fp32/slots_agree"]), int(found["fp32/slots_clean"]), roots]
        assert pairs.sum(0).tolist() == totals
        assert (np.diff(found["fp32/layer_margin"], axis=1) > 0).all()
        assert found["fp32/moved"].shape == found["kept"].shape == (num_sampled,)
        assert found["fp32/moved"].mean() > 0.5  # random routes differ early
        assert found["kept"].min() >= 1
    np.testing.assert_array_equal(one["fp32/layer_pairs"], two["fp32/layer_pairs"])
    np.testing.assert_array_equal(one["fp32/moved"], two["fp32/moved"])


def test_unknown_variant_is_refused(job: ScoreJob, tmp_path: Path) -> None:
    from dataclasses import replace

    replace(job, variants=["routes"]).save(tmp_path / "job.json")
    with pytest.raises(ConfigError, match="routes"):
        load_job(tmp_path / "job.json")
