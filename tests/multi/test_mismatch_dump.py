"""A dump that any system could have written, scored like the records it was made from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moerl.audit.mismatch_command import _context, measure, score
from moerl.audit.mismatch_page import write_page
from moerl.config import load_config, resolve
from moerl.core.errors import RecordError
from moerl.core.types import Rollout
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from tests.helpers.trainer_support import make_model, make_plan


def row(rollout: Rollout, store: BlobStore) -> dict[str, object]:
    (routing,), (mask,) = rollout.routing, rollout.sampling_mask
    offsets, kept = store.load(mask.offsets).tolist(), store.load(mask.ids).tolist()
    bounds = pairwise(offsets)
    return {
        "id": rollout.rollout_id,
        "token_ids": rollout.token_ids.tolist(),
        "prompt_len": rollout.prompt_len,
        "logprobs": read_logprobs(store, rollout).astype(float).tolist(),
        "routing": store.load(routing.ids).transpose(1, 0, 2).tolist(),
        "sampling_mask": [kept[begin:end] for begin, end in bounds],
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "top_k": rollout.sampling.top_k,
        "lag": 2,
    }


@pytest.mark.full
def test_a_dump_is_scored_like_its_records(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    config = resolve(
        load_config(
            "quickstart",
            [f"model.path={model}", "trainer.parallel.dp=1", "trainer.parallel.ep=1"],
        )
    )
    context = _context(config, tmp_path / "own")
    rollouts = [r for group in make_plan(context.blobs()).groups for r in group.rollouts()]
    dump = tmp_path / "other.jsonl"
    lines = [json.dumps(row(rollout, context.blobs())) for rollout in rollouts]
    dump.write_text("\n".join(lines))
    found = measure(config, tmp_path / "audit", dump=dump, dtypes=["fp32"])
    job = score(context, rollouts, tmp_path / "own", variants=["both"], dtypes=["fp32"])
    mine, theirs = np.load(job.out), np.load(tmp_path / "audit" / "scores.npz")
    np.testing.assert_array_equal(mine["engine"], theirs["engine"])
    assert np.abs(mine["fp32/both"] - theirs["fp32/both"]).max() <= 1e-5
    assert found["engine_dtype"] == "unknown precision"
    where = found["where"]["fp32"]
    assert [part["lag"] for part in where["lag"]] == [2]
    assert where["attribution"]["k3"]["numerics"] > 0.01, "random records fit no model"
    assert {token["rollout"].split(":", 1)[1] for token in where["worst"]} <= {
        rollout.rollout_id for rollout in rollouts
    }
    assert "other.jsonl" in write_page(tmp_path / "page.html", found).read_text()
    # Control: one route less, and the line is named before any process starts.
    broken = row(rollouts[1], context.blobs())
    broken["routing"] = broken["routing"][:-1]  # type: ignore[index]
    dump.write_text("\n".join([lines[0], json.dumps(broken), *lines[2:]]))
    with pytest.raises(RecordError, match=r"other.jsonl line 2: routing"):
        measure(config, tmp_path / "broken", dump=dump, dtypes=["fp32"])
