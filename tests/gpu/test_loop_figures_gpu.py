"""Figures of one card for `tools/gpu-check --loop`: each is a ratio of two ways in one run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moerl.runtime.trace import read_spans
from tests.helpers.device_engine import needs_kernels
from tests.helpers.device_figures import Figure, on_double
from tests.helpers.device_loop import FOLDER, PLACE, trained, trained_rows
from tests.helpers.large_random_model import SHAPE, SMALL, large_model
from tests.helpers.tiny_families import RECIPE
from tests.helpers.turn_figures import turn_figures

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 256
# Three servers are up at once, each with a cache for all requests.
SERVERS = ("engine.mem_fraction_static=0.25", "engine.max_total_tokens=160000")


def bench(file: Path, part: str, *words: str) -> dict[str, float]:
    """Ratios of bench/bare.py, and its tokens per second, by name."""
    small = on_double()
    model = large_model(FOLDER / ("small" if small else "401m"), SMALL if small else SHAPE)
    command = [sys.executable, "bench/bare.py", "--recipe", RECIPE, "--model", str(model)]
    command += ["--part", part, "--rounds", "2", "--json", str(file)]
    command += ["model.tiny.enabled=false", *PLACE, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads(file.read_text())
    rates = found["details"][f"{part} tokens/s"]
    return {one["what"].partition(": ")[2]: one["value"] for one in found["figures"]} | {
        f"tokens/s, {arm}": rate for arm, rate in rates.items()
    }


def tell(figure: Figure, name: str, found: dict[str, float]) -> None:
    for told, value in found.items():
        figure(f"{name}: {told}", value, "times" if " / " in told else "tokens/s")


@needs_kernels
@pytest.mark.parametrize("groups", [8, 64])
def test_engine_beside_sglang(groups: int, tmp_path: Path, figure: Figure) -> None:
    """Groups of eight requests."""
    words = ("--groups", str(groups), "--tokens", str(TOKENS), *SERVERS)
    found = bench(tmp_path / "figures.json", "engine", *words)
    tell(figure, f"{8 * groups} requests", found)


def test_trainer_beside_megatron(tmp_path: Path, figure: Figure) -> None:
    """With both replays, and Megatron-core's step alone; each kind of layers that is there."""
    kinds = ["local"]
    if importlib.util.find_spec("transformer_engine") is not None:
        kinds.insert(0, "transformer_engine")
    for kind in kinds:
        words = (f"trainer.transformer_impl={kind}",)
        tell(figure, kind, bench(tmp_path / f"{kind}.json", "trainer", *words))


@needs_kernels
def test_turns_beside_shared(tmp_path: Path, figure: Figure) -> None:
    """Tokens per second of whole turns, and of a run whose engine and trainer share the GPU."""
    found = trained(tmp_path, "turns")
    spans = [span for span in read_spans(found.dir.trace) if span["process"] == "trainer-0"]
    for name, (value, unit) in turn_figures(trained_rows(found), spans).items():
        figure(f"turns: {name}", value, unit)
    shared = trained_rows(trained(tmp_path, "shared"))[1:]
    took = sum(row["perf/step_s"] + row["async/trainer_wait_s"] for row in shared)
    tokens = sum(row["perf/train_tokens_per_s"] * row["perf/step_s"] for row in shared)
    figure("shared: tokens of whole steps", tokens / took, "tokens/s")
