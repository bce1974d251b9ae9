"""Ranks of the recipes of released models on meta tensors, against the dry run's figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.trainer_support import ROOT

# Recipe -> overrides.
CASES: dict[str, tuple[str, ...]] = {
    "olmoe-1b-7b": ("cluster=node8",),
    "qwen3-30b-a3b-node8": ("cluster=node8",),
    "qwen3-30b-a3b": (),
    "glm-4.5-air": (),
    "gpt-oss-120b": (),
    "qwen3-235b-a22b": (),
    "deepseek-v3": (),
    "kimi-k2": (),
}
# With adapters.
ADAPTED: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b-lora": ("cluster=node8",),
    "qwen3-30b-a3b-node8-colocated": ("cluster=node8",),
    "deepseek-v3-lora": (),
}
PADDING = 1e-4  # of the gradients: buffers begin parameters at multiples of 64, end buckets at 128


class Rank(NamedTuple):
    number: int
    built: dict[str, Any]  # tests.helpers.meta_build.Built
    told: dict[str, int]  # moerl.planning.memory.TrainerMemory


def ranks(
    layers: str,
    recipe: str,
    *overrides: str,
    numbers: str = "0,-1",
    python: Path = Path(sys.executable),
    environment: Mapping[str, str] | None = None,
) -> list[Rank]:
    """The first and the last rank of a recipe's trainer, built in one process."""
    command = [str(python), "-m", "tests.helpers.meta_build", layers, numbers, recipe, *overrides]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"TORCHDYNAMO_DISABLE": "1"} | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"number"')]
    assert len(found) == len(numbers.split(",")), done.stdout[-2000:]
    return [Rank(**one) for one in found]


def check(rank: Rank) -> None:
    print(rank)
    built, told = rank.built, rank.told
    assert built["unknown"] == []
    for name in ("parameters", "weights", "gradients", "base"):
        assert told[name] == built[name], name
    size = 16 if told["offloaded"] else 12  # bytes of the optimizer per parameter
    assert told["optimizer"] + told["offloaded"] == size * built["updated"]
    assert built["padding"] <= PADDING * built["gradients"]
