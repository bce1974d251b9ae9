"""Two trainer ranks on the device double: the CPU's step, waits, and the bytes of the dry run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moerl.config.schema import ParallelConfig
from moerl.planning.memory import TrainerMemory, Training, optimizer_bytes, trainer_memory
from tests.double.gang import LAYOUTS, RANKS, Layout, scaled_spec
from tests.double.train_once import BOUNDS, largest_difference, make_folder, other_metrics
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT

WORKER = str(ROOT / "tests/double/gang_ranks.py")
AGREES = 0.05  # of the dry run's bytes
PURPOSES = ("weights", "gradients", "optimizer", "static", "snapshot")
# Waits of lines of ours, as on_trainer.py has them for one rank
PER_MICROBATCH = {"moerl/algorithms/masked_logprob.py": 1}
PER_STEP = {
    "moerl/trainer/learner/step_sums.py": 1,
    "moerl/algorithms/device_copies.py": 1,
    "moerl/trainer/learner/optimizer.py": 1,
}
Found = dict[tuple[str, str, int], dict[str, Any]]  # by platform, layout and rank


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("gang")
    make_folder(folder)
    for name in ("cuda", "cpu"):
        arguments = [WORKER, name, str(folder), *LAYOUTS]
        run_ranks(RANKS, arguments, on_double=name == "cuda")
    return {
        (name, layout, rank): torch.load(folder / f"{name}-{layout}-{rank}.pt")
        for name in ("cuda", "cpu")
        for layout in LAYOUTS
        for rank in range(RANKS)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_cpu(layout: str, found: Found) -> None:
    for rank in range(RANKS):
        here, there = found["cuda", layout, rank], found["cpu", layout, rank]
        for part, bound in BOUNDS.items():
            print(layout, rank, part, largest_difference(here[part], there[part]))
            assert largest_difference(here[part], there[part]) <= bound, part
        assert other_metrics(here["metrics"], there["metrics"]) == []
        assert here["metrics"] == found["cuda", layout, 0]["metrics"]
        # controls: a rank that trains other routes, gradients that were not reduced to the end
        assert here["other routes"] > 0.1
        assert here["unfinished"] or layout == "stages", "no stage shares parameters"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_keeps_the_budget_of_host_waits(layout: str, found: Found) -> None:
    for rank in range(RANKS):
        here = found["cuda", layout, rank]
        allowed = dict(PER_STEP)
        allowed |= {file: n * here["microbatches"] for file, n in PER_MICROBATCH.items()}
        assert not here["pageable"]
        over = {file: n for file, n in here["waits"].items() if n > allowed.get(file, 0)}
        assert not over, f"waits beyond {allowed}"


# --- bytes ----------------------------------------------------------------------------------------
def told(layout: Layout, distributed: bool) -> tuple[TrainerMemory, ...]:
    """By the dry run, of each pipeline stage."""
    trainer = layout.trainer("bf16")
    training = Training(
        dtype=trainer.dtype,
        distributed_optimizer=distributed,
        optimizer=optimizer_bytes(trainer),
        gpu=False,
    )
    return trainer_memory(scaled_spec(), trainer.parallel, training)


def misses(held: dict[str, int], plan: TrainerMemory) -> dict[str, float]:
    """By purpose: how far the plan is from what is held, where that is too far."""
    gaps = {name: abs(getattr(plan, name) / held[name] - 1) for name in PURPOSES}
    print({name: f"{gap:.4%}" for name, gap in gaps.items()})
    return {name: gap for name, gap in gaps.items() if gap > AGREES}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_of_the_dry_run(name: str, found: Found) -> None:
    layout = LAYOUTS[name]
    for rank in range(RANKS):
        held = found["cuda", name, rank]["bytes"]
        stage = rank if layout.parallel.pp > 1 else 0
        assert not misses(held, told(layout, layout.distributed)[stage])
        assert held["snapshot on the device"] == 0
        # controls: an optimizer that is cut where it is whole, or the reverse; another layout
        wrong = misses(held, told(layout, not layout.distributed)[stage])
        assert ("optimizer" in wrong) == (layout.parallel.dp > 1)
        whole = replace(layout, parallel=ParallelConfig())
        assert ("weights" in misses(held, told(whole, layout.distributed)[0])) == (name != "data")
