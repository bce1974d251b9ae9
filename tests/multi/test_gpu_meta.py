"""The dry run counts what megatron-core builds: ranks of the recipes, on meta tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.trainer_support import ROOT

OTHERS = (
    "olmoe-1b-7b",
    "qwen3-30b-a3b",
    "glm-4.5-air",
    "gpt-oss-120b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "kimi-k2",
)
PADDING = 1e-4  # of the gradients: buffers begin parameters at multiples of 64, end buckets at 128


def built(recipe: str, rank: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.meta_build", recipe, str(rank)],
        cwd=ROOT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(recipe: str, rank: int) -> None:
    found = built(recipe, rank)
    print(found)
    told, was = found["told"], found["built"]
    for name in ("parameters", "weights", "gradients"):
        assert told[name] == was[name], name
    assert was["padding"] <= PADDING * was["gradients"]
    updated = (told["optimizer"] + told["offloaded"]) / (16 if told["offloaded"] else 12)
    assert was["shard"] == pytest.approx(updated, rel=PADDING)


def test_a_rank_of_qwen3_30b_is_what_the_dry_run_says() -> None:
    check("qwen3-30b-a3b-node8", 0)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("recipe", OTHERS)
def test_first_and_last_ranks_are_what_the_dry_run_says(recipe: str, rank: int) -> None:
    check(recipe, rank)
