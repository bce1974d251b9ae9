"""Two trainer ranks on the device double: the CPU's step, waits, and the bytes of the dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moerl.config.lora_settings import BasePlace, LoraConfig
from moerl.config.schema import AlgorithmConfig, ParallelConfig
from moerl.data.tiny_model import make_tiny_model
from moerl.planning.memory import TrainerMemory, trainer_memory, training_of
from moerl.trainer.hf_io.hf_folder import HfFolder
from tests.double.gang import ADAPTED, LAYOUTS, RANKS, SCALED, SCALED_MODEL, Layout
from tests.double.train_once import BOUNDS, largest_difference, make_folder, other_metrics
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT

WORKER = str(ROOT / "tests/double/gang_ranks.py")
AGREES = 0.05  # of the dry run's bytes
PURPOSES = ("weights", "gradients", "optimizer", "others", "device_base", "all", "snapshot")
# Waits of lines of ours: none in a microbatch; in a step the sums of the loss, the scores of all
# microbatches, the critic's values, the routers' norm and the critic's sums.
PER_STEP = {
    "moerl/trainer/learner/step_sums.py": 1,
    "moerl/algorithms/device_copies.py": 2,
    "moerl/trainer/learner/optimizer.py": 1,
    "moerl/trainer/learner/critic.py": 1,
}
Found = dict[tuple[str, str, int], dict[str, Any]]  # by platform, layout and rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gang")
    make_folder(made)
    make_tiny_model(made / SCALED_MODEL, SCALED, seed=0)
    return made


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    for name in ("cuda", "cpu"):
        arguments = [WORKER, name, str(folder), *LAYOUTS, *ADAPTED]
        run_ranks(RANKS, arguments, on="double" if name == "cuda" else "cpu", timeout_s=240)
    return {
        (name, layout, rank): torch.load(folder / f"{name}-{layout}-{rank}.pt")
        for name in ("cuda", "cpu")
        for layout in (*LAYOUTS, *ADAPTED)
        for rank in range(RANKS)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_that_of_the_cpu(layout: str, found: Found) -> None:
    for rank in range(RANKS):
        here, there = found["cuda", layout, rank], found["cpu", layout, rank]
        assert largest_difference(here["values"], there["values"]) == 0
        for part, bound in BOUNDS.items():
            print(layout, rank, part, largest_difference(here[part], there[part]))
            assert largest_difference(here[part], there[part]) <= bound, part
        assert other_metrics(here["metrics"], there["metrics"]) == []
        assert here["metrics"] == found["cuda", layout, 0]["metrics"]
        # controls: a rank that trains other routes, gradients that were not reduced to the end
        print("controls:", here["other routes"], here["unfinished"])
        assert here["other routes"] > 0.1
        assert here["unfinished"] or layout == "stages", "no stage shares parameters"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_keeps_the_budget_of_host_waits(layout: str, found: Found) -> None:
    for rank in range(RANKS):
        here = found["cuda", layout, rank]
        assert not here["pageable"]
        over = {file: n for file, n in here["waits"].items() if n > PER_STEP.get(file, 0)}
        assert not over, f"waits beyond {PER_STEP}"


# --- bytes ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Told:
    """Bytes of a rank, as the dry run has them."""

    memory: TrainerMemory
    device_base: int  # of a GPU; the other figures are without its constants

    def of(self, purpose: str) -> int:
        if purpose == "all":
            return self.memory.static + self.memory.others + self.device_base
        if purpose == "device_base":
            return self.device_base
        found: int = getattr(self.memory, purpose)
        return found


def told(layout: Layout, folder: Path, stage: int, *, critic: bool = True) -> Told:
    config = layout.config(folder, "bf16", AlgorithmConfig())
    spec = HfFolder(str(folder)).spec
    training = training_of(config, gpu=False)
    ranks = trainer_memory(spec, layout.parallel, training, ref_models=(spec, spec), critic=critic)
    on_gpu = trainer_memory(spec, layout.parallel, replace(training, gpu=True))
    return Told(ranks[stage], on_gpu[stage].device_base)


def misses(held: dict[str, int], plan: Told) -> set[str]:
    """Purposes of which the plan is too far from what is held."""
    named = [name for name in PURPOSES if held[name] or plan.of(name)]
    gaps = {name: abs(plan.of(name) / held[name] - 1) if held[name] else 1.0 for name in named}
    print({name: f"{gap:.3%}" for name, gap in gaps.items()})
    return {name for name, gap in gaps.items() if gap > AGREES}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_are_those_of_the_dry_run(name: str, found: Found, folder: Path) -> None:
    layout, model = LAYOUTS[name], folder / SCALED_MODEL
    for rank in range(RANKS):
        held = found["cuda", name, rank]["bytes"]
        stage = rank if layout.parallel.pp > 1 else 0
        assert not misses(held, told(layout, model, stage))
        assert held["snapshot on the device"] == 0
        # controls: no critic; an optimizer that is cut where it is whole, or the reverse; one rank
        assert misses(held, told(layout, model, stage, critic=False)) == {"others", "all"}
        other = replace(layout, distributed=not layout.distributed)
        shared = layout.parallel.dp * layout.parallel.cp > 1
        wrong = {"optimizer", "others", "all"} if shared else set()
        assert misses(held, told(other, model, stage)) == wrong
        alone = replace(layout, parallel=ParallelConfig())
        assert misses(held, told(alone, model, 0)) >= {"optimizer", "others", "all"}


@pytest.mark.parametrize("name", ADAPTED)
def test_bytes_of_adapters_are_those_of_the_dry_run(name: str, found: Found, folder: Path) -> None:
    """Controls: all weights trained; experts with the rank of the others; W0 elsewhere."""
    layout, model = ADAPTED[name], folder / SCALED_MODEL
    for rank in range(RANKS):
        held = found["cuda", name, rank]["bytes"]
        plan = told(layout, model, 0, critic=False)
        assert not misses(held, plan)
        assert held["snapshot on the device"] == 0
        whole = replace(layout, lora=LoraConfig())
        assert misses(held, told(whole, model, 0, critic=False)) >= {"gradients", "optimizer"}
        wide = replace(layout, lora=replace(layout.lora, ranks={}))
        assert misses(held, told(wide, model, 0, critic=False)) >= {"gradients", "optimizer"}
        there: BasePlace = "host" if layout.lora.base == "device" else "device"
        other = replace(layout, lora=replace(layout.lora, base=there))
        assert misses(held, told(other, model, 0, critic=False)) == {"device_base", "all"}


@pytest.mark.parametrize("name", ADAPTED)
def test_a_step_of_adapters_is_that_of_the_cpu(name: str, found: Found) -> None:
    for rank in range(RANKS):
        here, there = found["cuda", name, rank], found["cpu", name, rank]
        for part, bound in BOUNDS.items():
            print(name, rank, part, largest_difference(here[part], there[part]))
            assert largest_difference(here[part], there[part]) <= bound, part
