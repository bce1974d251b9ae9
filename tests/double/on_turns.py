"""Engine and trainer take turns with one GPU: three recipes, scaled down.

The trainer is that of a run, with `TrainLoop`'s own hand-over.  The engine is its end of a publish
and the hooks of its sleep; SGLang's saver is stood in for, with memory that torch's cache lacks.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from moerl.config import Config, load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import moved_parts
from moerl.core.types import PolicyVersion
from moerl.engine.plugin import in_flight, sleep_hooks
from moerl.engine.protocol import SLEEP, WAKE
from moerl.planning import colocated
from moerl.planning.colocated import ORDER, PhaseBytes, phase_bytes
from moerl.planning.memory import engine_memory, trainer_memory, training_of
from moerl.trainer.learner.parked import Parked, _bytes
from moerl.weight_sync.held_shards import EngineLayout
from tests.double import cuda_api, on_one_gpu
from tests.double.mutations import TURN_BLUNDERS, Blunder
from tests.double.on_one_gpu import RECIPES, OneGpu, ranks, started
from tests.double.on_parked import LEFT
from tests.double.watch import OPS, PAGEABLE, WAITS, Watch, memory, purpose, watch
from tests.helpers.trainer_support import make_plan

if TYPE_CHECKING:
    from moerl.core.types import BatchPlan
    from moerl.trainer.model.parallel import Parallel

__all__ = ["ranks"]  # a fixture

KV_TOKENS = 512
NUMBERS = itertools.count()
# Waits of the host in a switch both ways, by file: each part that is copied out, and a publish.
WAITS_OF_A_SWITCH = {
    "moerl/trainer/learner/parked.py": 2,
    "moerl/weight_sync/snapshot.py": 1,
    "moerl/weight_sync/receiver.py": 2,
}
SLACK = 0.05
TURNS = 3


class Saver:
    """torch_memory_saver: memory of a tag comes from the driver, and goes back to it.

    A resume that finds no room ends the process.  Contents are lost.
    """

    enabled = True

    def __init__(self, name: str, tags: Mapping[str, list[torch.Tensor]]) -> None:
        self.name = f"saver of {name}"
        self._tags = {tag: [t.untyped_storage() for t in found] for tag, found in tags.items()}
        self._sizes: dict[str, list[int]] = {}

    def pause(self, tag: str) -> None:
        assert tag not in self._sizes, "the saver ends the process"
        self._sizes[tag] = [storage.nbytes() for storage in self._tags[tag]]
        self._resize(tag, [0] * len(self._sizes[tag]))

    def resume(self, tag: str) -> None:
        sizes = self._sizes.pop(tag)
        assert sum(sizes) <= torch.cuda.mem_get_info()[0], "the saver ends the process: no room"
        self._resize(tag, sizes)
        for storage in self._tags[tag]:
            _bytes(storage).fill_(255)

    def _resize(self, tag: str, sizes: list[int]) -> None:
        with purpose(self.name):
            for storage, size in zip(self._tags[tag], sizes, strict=True):
                storage.resize_(size)
            torch.cuda.empty_cache()


class Manager:
    """SGLang's SchedulerWeightUpdaterManager, as far as a sleep concerns it."""

    def __init__(self, both: OneGpu, ranks: Parallel, kv: torch.Tensor) -> None:
        served, model = both.engine.served.tensors(), nn.Module()
        for number, tensor in enumerate(served.values()):
            model.register_buffer(f"b{number}", tensor)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.memory_saver_adapter = Saver(
            both.name, {"weights": list(served.values()), "kv_cache": [kv]}
        )
        self.scheduler = SimpleNamespace(is_fully_idle=lambda ignore_waiting: ignore_waiting)
        self.tp_cpu_group, self.offload_tags = ranks.control, set[str]()

    def release_memory_occupation(self, asked: Any) -> None:
        for tag in asked.tags:
            self.offload_tags.add(tag)
            self.memory_saver_adapter.pause(tag)

    def resume_memory_occupation(self, asked: Any) -> None:
        for tag in sorted(asked.tags, reverse=True):
            self.offload_tags.remove(tag)
            self.memory_saver_adapter.resume(tag)


@dataclass
class Turns:
    """One GPU and those who have it; `found` has bytes of engine and trainer by phase."""

    both: OneGpu
    manager: Manager
    parked: Parked
    plan: BatchPlan
    asleep: tuple[str, ...]  # parts of the engine
    step: int = 0
    found: dict[str, tuple[int, int]] = field(default_factory=dict)
    switches: list[Watch] = field(default_factory=list)
    trained: dict[str, torch.Tensor] = field(default_factory=dict)  # on the host

    def engine(self, what: str, *parts: str) -> None:
        with purpose(f"engine of {self.both.name}"):
            done, told = sleep_hooks.change(self.manager, what, list(parts))
        assert done, told

    def serve(self) -> None:
        """A forward pass, of which torch's cache keeps the activations."""
        with purpose(f"engine of {self.both.name}"):
            torch.zeros(1 << 18, device="cuda")

    def note(self, phase: str) -> None:
        """With what the caches of torch hold: nobody else can have it."""
        name = self.both.name
        saver = memory(f"saver of {name}").held
        engine = memory(f"engine of {name}").held + saver
        self.found[phase] = engine, memory(f"trainer of {name}").held

    def turn(self) -> None:
        """From one GENERATE to the next."""
        self.serve()
        self.engine(SLEEP, *self.asleep)
        with purpose(f"trainer of {self.both.name}"):
            with watch() as back:
                self.parked.back()
            self.both.learner.step(self.plan)
            torch.cuda.empty_cache()  # what is planned for is not what a step has in between
            self.note("train")
            self.step += 1
            self.trained = weights(self.both)
        self.hand_over(back)

    def hand_over(self, back: Watch) -> None:
        from moerl.trainer.train_loop import TrainLoop  # imports Megatron

        with purpose(f"trainer of {self.both.name}"), watch() as seen:
            TrainLoop._hand_over(self._loop(), self.parked)  # type: ignore[arg-type]
        seen.seen += back.seen
        self.switches.append(seen)
        self.engine(WAKE, "kv_cache")
        self.note("generate")

    def _loop(self) -> Any:
        both = self.both
        publisher = SimpleNamespace(
            wait=lambda: {}, before_update=both.engine.snapshot.before_write
        )
        return SimpleNamespace(
            config=both.config,
            tracer=SimpleNamespace(span=lambda *_, **__: nullcontext()),
            version=PolicyVersion(0, self.step),
            parallel=both.learner.parallel,
            publisher=publisher,
            _before_update=publisher.before_update,
            _publish=self._publish,
        )

    def _publish(self) -> None:
        if "weights" in self.manager.offload_tags:
            self.engine(WAKE, "weights")
        assert self.both.publish(self.step) == [], "the engine has other weights than the trainer"
        self.note("hand_over")


def weights(both: OneGpu) -> dict[str, torch.Tensor]:
    named = both.learner.model.gpt.named_parameters()
    return {name: parameter.detach().cpu().clone() for name, parameter in named}


def configured(name: str) -> Config:
    words = [*RECIPES[name], "cluster.colocated=turns", "rollout.in_flight_mode=retract"]
    words += ["engine.max_total_tokens=4096"] if "gpu1" in str(words) else []
    config = resolve(load_config(name, words))
    moves = [part for part in ORDER if not (config.lora.rank and part == "engine_weights")]
    config = replace(config, turn=replace(config.turn, moves=moves))
    check(config, starts=False)
    return config


def planned(both: OneGpu, monkeypatch: pytest.MonkeyPatch) -> PhaseBytes:
    """Of the dry run, without CUDA, NCCL and what a step has in between."""
    for constant in ("NCCL", "RUNTIME"):
        monkeypatch.setattr(colocated, constant, 0)
    config, served = both.config, sum(t.nbytes for t in both.engine.served.tensors().values())
    training = replace(training_of(config, gpu=True), bucket=0)  # a snapshot on the host has none
    (told,) = trainer_memory(both.spec, config.trainer.parallel, training)
    bare = replace(told, activations=0, head=0, replay=0, runtime=0)
    bucket = min(served, config.sync.bucket_bytes)  # all of it is one bucket
    engine = engine_memory(both.spec, EngineLayout(), served, KV_TOKENS, "bfloat16", bucket=bucket)
    return phase_bytes(bare, engine, moved_parts(config), gpu=True)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler without requests; what an earlier engine released is not this one's."""
    monkeypatch.setattr(in_flight, "retract", lambda _scheduler: 0)
    monkeypatch.setattr(in_flight, "go_on", lambda _scheduler: None)
    monkeypatch.setattr(sleep_hooks, "_released", {})
    monkeypatch.setattr(on_one_gpu, "configured", configured)


def opened(
    recipe: str,
    ranks: Parallel,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: BatchPlan | None = None,
) -> Turns:
    """At the first GENERATE, in a GPU that has room for the plan and little more.

    plan: of the batch, in this folder; else one is made.
    """
    monkeypatch.setattr(cuda_api, "MEMORY", 80 * 2**30)  # until its size is known
    gc.collect()  # of earlier ones, which would make room later
    before, name = held(), f"{recipe} {next(NUMBERS)}"
    both = started(recipe, ranks, folder, name)
    told = planned(both, monkeypatch)
    token = engine_memory(both.spec, EngineLayout(), 0, 1, "bfloat16", bucket=0).kv_token
    with purpose(f"saver of {name}"):
        kv = torch.zeros(KV_TOKENS * token, dtype=torch.uint8, device="cuda")
    asleep = ("kv_cache", *(() if both.config.lora.rank else ("weights",)))
    with purpose(f"trainer of {name}"):
        parked = Parked(both.learner, ranks.device)
        plan = plan or make_plan(both.learner.store, max_tokens=48)
    found = Turns(both, Manager(both, ranks, kv), parked, plan, asleep, trained=weights(both))
    for tag in ("weights", "kv_cache"):  # SGLang allocates both under the saver
        found.manager.memory_saver_adapter.pause(tag)
        found.manager.memory_saver_adapter.resume(tag)
    for side in ("engine", "trainer"):
        with purpose(f"{side} of {name}"):
            torch.cuda.empty_cache()
    found.engine(SLEEP, *asleep)
    monkeypatch.setattr(cuda_api, "MEMORY", before + int(told.most * (1 + SLACK)) + LEFT)
    found.hand_over(Watch())
    return found


def held() -> int:
    """Bytes of all purposes."""
    return sum(memory(name).held for name in OPS.purposes(0))


def wrong_phases(found: Turns, told: PhaseBytes) -> list[str]:
    """Phases in which a side has other bytes than planned, by 5 % of both."""
    wrong = []
    for phase, held in found.found.items():
        wanted = getattr(told, phase)
        print(f"{found.both.name}, {phase}: {held}, plan {wanted}")
        near = SLACK * sum(wanted) + LEFT
        if any(abs(a - b) > near for a, b in zip(held, wanted, strict=True)):
            wrong.append(f"{phase}: {held} in place of {wanted}")
    return wrong


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", RECIPES)
def test_bytes_of_each_phase_are_the_plans(
    name: str, ranks: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = opened(name, ranks, tmp_path, monkeypatch)
    told = planned(found.both, monkeypatch)
    for _ in range(2):
        found.turn()
        assert set(found.found) == {"train", "hand_over", "generate"}
        assert wrong_phases(found, told) == []
    assert memory(device=1).live == 0
    found.both.engine.close()


@pytest.mark.usefixtures("quiet")
def test_steps_in_turns_are_bitwise_those_without(
    ranks: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters too.  Control: another step."""
    for name in RECIPES:
        plain = started(name, ranks, tmp_path, f"{name} without turns")
        plan, wanted = make_plan(plain.learner.store, max_tokens=48), [weights(plain)]
        for _ in range(TURNS + 1):
            plain.learner.step(plan)
            wanted.append(weights(plain))
        found = opened(name, ranks, tmp_path, monkeypatch, plan)
        assert differing(wanted[0], found.trained) == []
        for after in wanted[1:-1]:
            found.turn()
            assert differing(after, found.trained) == []
        assert differing(wanted[-1], found.trained)
        for both in (plain, found.both):
            both.engine.close()


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.usefixtures("quiet")
def test_waits_of_a_switch(
    ranks: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of host memory nothing is page-locked again after the first step, which makes moments."""
    found = opened("quickstart", ranks, tmp_path, monkeypatch)
    found.turn()
    with locked(monkeypatch) as made:
        for _ in range(TURNS):
            found.turn()
    assert wrong_switches(found, made) == []
    found.both.engine.close()


@pytest.mark.usefixtures("quiet")
def test_an_engine_does_not_wake_into_memory_of_the_trainer(
    ranks: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saver would end its process.  It sleeps on, and wakes when there is room."""
    found = opened("quickstart", ranks, tmp_path, monkeypatch)
    found.engine(SLEEP, "kv_cache")
    with purpose("trainer"):
        kept = torch.zeros(torch.cuda.mem_get_info()[0], dtype=torch.uint8, device="cuda")
    with purpose(f"engine of {found.both.name}"):
        done, told = sleep_hooks.change(found.manager, WAKE, ["kv_cache"])
    assert not done, told
    assert "0 are free: a trainer rank keeps them" in told
    assert found.manager.offload_tags == {"kv_cache"}
    del kept
    with purpose("trainer"):
        torch.cuda.empty_cache()
    found.engine(WAKE, "kv_cache")
    assert found.manager.offload_tags == set()
    found.both.engine.close()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("blunder", TURN_BLUNDERS, ids=[b.name for b in TURN_BLUNDERS])
def test_blunders_of_a_turn_are_caught(
    blunder: Blunder, ranks: Parallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import moerl.trainer.train_loop  # noqa: F401

    blunder.apply(monkeypatch)
    caught = ""
    try:
        found = opened("quickstart", ranks, tmp_path, monkeypatch)
        found.turn()
        with locked(monkeypatch) as made:
            found.turn()
        wrong = wrong_phases(found, planned(found.both, monkeypatch))
        caught = "; ".join([*wrong, *wrong_switches(found, made)])
    except Exception as error:
        caught = str(error).splitlines()[0]
    print(f"{blunder.name}: {caught or 'NOT CAUGHT'}")
    assert caught


@contextmanager
def locked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of host memory that is page-locked in a block."""
    made: list[int] = []
    register = cuda_api.Runtime.cudaHostRegister

    def noted(address: int, num_bytes: int, flags: int) -> int:
        made.append(num_bytes)
        return register(address, num_bytes, flags)

    with monkeypatch.context() as patched:
        patched.setattr(cuda_api.Runtime, "cudaHostRegister", staticmethod(noted))
        yield made


def wrong_switches(found: Turns, made: list[int]) -> list[str]:
    """Waits of the host that differ from the known ones, in switches after the first step."""
    wrong = [f"{num_bytes} bytes page-locked" for num_bytes in made]
    for seen in found.switches[2:]:
        waits = dict(seen.own_files(*WAITS))
        print(f"{found.both.name}: waits of a switch {waits}")
        if waits != WAITS_OF_A_SWITCH or seen.count(PAGEABLE, own=True):
            wrong.append(f"waits {waits}, pageable {seen.own_lines(PAGEABLE)}")
    return wrong
