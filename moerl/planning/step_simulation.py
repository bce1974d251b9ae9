"""Forecast of steps by discrete-event simulation: engines and trainer divided, in turns, or both.

Steps are simulated, since the tails of answers make closed forms too low by up to half.

An engine is a processor-sharing queue: with b running requests a decode step takes `token_s + b *
request_token_s`.  All its requests advance by the same number of tokens, so one counter per engine
gives each end, and an event costs a heap operation, not a loop over requests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moerl.config import Config
from moerl.config.clusters import EngineSlot, TrainerSlot, is_local, moved_parts, placement
from moerl.core.errors import MoerlError
from moerl.layout.shards import hf_shapes
from moerl.planning.memory import engine_memory, trainer_memory, training_of
from moerl.planning.printout import GB, grid
from moerl.planning.publish_forecast import BUS_GB_S, MEMORY_GB_S, Layouts

_FLOP_S = 400e12  # of a GPU, in training and prefill: 40 % of an H100
_PAUSE_S, _SWITCH_S = 0.5, 2.0  # of a commit; of a switch in one direction, beside copies
_MEAN, _SIGMA = 0.25, 0.8  # lengths are lognormal; the mean is a share of the longest
_PROMPT = 512  # tokens, where the recipe has no limit
_DRAWN, _STEADY = 4096, 6


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and waits of groups.  Group i draws its lengths from a generator seeded with i."""

    groups_per_step: int
    group_size: int
    lengths: Sequence[int]  # sampled tokens of observed rollouts, drawn with replacement
    waits_s: Sequence[float] = (0.0,)  # tool and scoring time of groups, in their order
    prompt_tokens: int = 0

    def group(self, index: int) -> tuple[list[int], float]:
        draw = random.Random(index)
        lengths = [draw.choice(self.lengths) for _ in range(self.group_size)]
        return lengths, self.waits_s[index % len(self.waits_s)]


@dataclass(frozen=True, slots=True)
class Costs:
    """Service times in seconds."""

    train_s: Sequence[float]  # per step, cyclic
    token_s: float  # per decode step, for any number of requests
    request_token_s: float  # more per decode step, per running request
    prefill_token_s: float = 0.0  # per prompt token, and per token that a publish or turn drops
    snapshot_s: float = 0.0  # the trainer is blocked while weights are copied
    transfer_s: float = 0.0  # from then until an engine can commit
    pause_s: float = 0.0  # an engine is blocked while it commits
    keeps_cache: bool = False  # requests that run go on with their KV cache after a commit
    overhead_s: float = 0.0  # per step of the trainer, neither training nor waiting
    close_s: float = 0.0  # engines fall asleep, before a turn of the trainer
    open_s: float = 0.0  # engines wake up, behind it
    scorers: int = 0  # 0 = any number


@dataclass(frozen=True, slots=True)
class Topology:
    """engines: never sleep.  shared: engines on the trainer's devices, in turns with it."""

    engines: int
    depth: int  # rollout.buffer_depth; 0 = synchronous
    shared: int = 0
    max_groups_in_flight: int = 1_000_000


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Of a run from its first request to the end of its last step.

    step_s, trainer_idle: in its steady middle.  recomputed: share of sampled tokens.
    """

    wall_s: float
    step_s: float
    trainer_idle: float
    recomputed: float


def simulate(workload: Workload, costs: Costs, topology: Topology, steps: int) -> SimulatedRun:
    """Run `steps` optimizer steps; the result is a function of the arguments alone."""
    return _Run(workload, costs, topology, steps).outcome()


@dataclass(slots=True, eq=False)
class _Engine:
    costs: Costs
    is_shared: bool
    is_asleep: bool = False
    tokens: float = 0.0  # advanced since the start
    begun: float = 0.0  # sum over running requests of `tokens` at their start
    ends: list[tuple[float, int]] = field(default_factory=list)  # (tokens, group), a heap
    at_s: float = 0.0  # moment of `tokens`
    free_s: float = 0.0  # no progress before

    def advance(self, now_s: float) -> None:
        if self.ends and not self.is_asleep:
            self.tokens += max(0.0, now_s - max(self.at_s, self.free_s)) / self._token_s()
        self.at_s = now_s

    def end_s(self) -> float:
        """When its next request ends."""
        if self.is_asleep or not self.ends:
            return float("inf")
        left = max(0.0, self.ends[0][0] - self.tokens)
        return max(self.at_s, self.free_s) + left * self._token_s()

    def stall(self, now_s: float, seconds: float) -> None:
        self.advance(now_s)
        self.free_s = max(self.at_s, self.free_s) + seconds

    def _token_s(self) -> float:
        return self.costs.token_s + self.costs.request_token_s * len(self.ends)


@dataclass(slots=True)
class _Group:
    left: int  # requests that still run
    wait_s: float
    begun: float  # the engine's `tokens` at the start


class _Run:
    def __init__(self, workload: Workload, costs: Costs, topology: Topology, steps: int) -> None:
        self.work, self.costs, self.topology, self.steps = workload, costs, topology, steps
        kinds = [False] * topology.engines + [True] * topology.shared
        self.engines = [_Engine(costs, is_shared) for is_shared in kinds]
        self.now_s = self.idle_since = self.idle_s = self.sampled = self.recomputed = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.groups: list[_Group] = []
        self.ready = self.in_flight = self.step = self.version = self.order = 0
        self.scorers_free_s = [0.0] * costs.scorers
        self.training = self.publishing = self.to_snapshot = False
        self.taken: list[tuple[float, float]] = []  # when a batch was taken, idle seconds so far

    def outcome(self) -> SimulatedRun:
        self.fill()
        while self.step < self.steps or self.training:
            engine = min(self.engines, key=_Engine.end_s)
            if self.events and self.events[0][0] <= engine.end_s():
                self.now_s, _, act = heapq.heappop(self.events)
                act()
            else:
                self.now_s = engine.end_s()
                self.ended(engine)
        edge = self.topology.depth + 1
        first, last = (edge, self.steps - edge) if self.steps > 2 * edge else (0, self.steps - 1)
        (begin_s, idle_before_s), (end_s, idle_s) = self.taken[first], self.taken[last]
        if first >= last:
            begin_s, idle_before_s, end_s, last = 0.0, 0.0, self.now_s, first + 1
        idle, step_s = (
            (idle_s - idle_before_s) / (end_s - begin_s),
            (end_s - begin_s) / (last - first),
        )
        return SimulatedRun(self.now_s, step_s, idle, self.recomputed / self.sampled)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.events, (self.now_s + seconds, self.order, act))

    # --- engines ------------------------------------------------------------------------------
    def fill(self) -> None:
        """Start groups by the rule of `moerl.controller.buffer`, each on the least busy engine."""
        bound = min(self.version + 1 + self.topology.depth, self.steps) * self.work.groups_per_step
        while awake := [engine for engine in self.engines if not engine.is_asleep]:
            is_full = self.in_flight >= self.topology.max_groups_in_flight
            if is_full or len(self.groups) >= bound:
                return
            engine = min(awake, key=lambda engine: len(engine.ends))
            engine.stall(self.now_s, self.work.prompt_tokens * self.costs.prefill_token_s)
            lengths, wait_s = self.work.group(len(self.groups))
            for length in lengths:
                heapq.heappush(engine.ends, (engine.tokens + length, len(self.groups)))
            self.groups.append(_Group(len(lengths), wait_s, engine.tokens))
            engine.begun += engine.tokens * len(lengths)
            self.sampled += sum(lengths)
            self.in_flight += 1

    def ended(self, engine: _Engine) -> None:
        engine.advance(self.now_s)
        end, index = heapq.heappop(engine.ends)
        engine.tokens = max(engine.tokens, end)  # rounding
        group = self.groups[index]
        engine.begun -= group.begun
        group.left -= 1
        if not group.left:
            self.in_flight -= 1
            begin_s = max([self.now_s, *self.scorers_free_s[:1]])
            if self.scorers_free_s:
                heapq.heapreplace(self.scorers_free_s, begin_s + group.wait_s)
            self.after(begin_s + group.wait_s - self.now_s, self.scored)
        self.fill()

    def drop_cache(self, engine: _Engine) -> None:
        """Running requests are prefilled again."""
        done = engine.tokens * len(engine.ends) - engine.begun
        tokens = done + self.work.prompt_tokens * len(engine.ends)
        engine.stall(self.now_s, tokens * self.costs.prefill_token_s)
        self.recomputed += done

    def scored(self) -> None:
        self.ready += 1
        self.take()

    # --- trainer ------------------------------------------------------------------------------
    def take(self) -> None:
        if self.training or self.ready < self.work.groups_per_step:
            return
        self.idle_s += self.now_s - self.idle_since
        self.taken.append((self.now_s, self.idle_s))
        self.training = True
        self.ready -= self.work.groups_per_step
        seconds = self.costs.train_s[self.step % len(self.costs.train_s)] + self.costs.overhead_s
        self.step += 1
        shared = [engine for engine in self.engines if engine.is_shared and not engine.is_asleep]
        for engine in shared:
            engine.advance(self.now_s)
            engine.is_asleep = True
        self.after(seconds + (self.costs.close_s if shared else 0.0), self.trained)
        self.fill()

    def trained(self) -> None:
        if self.step >= self.steps:
            self.training = False  # the last version is not published
        elif self.publishing:
            self.to_snapshot, self.idle_since = True, self.now_s
        else:
            self.after(self.costs.snapshot_s, self.frozen)

    def frozen(self) -> None:
        self.publishing = True
        self.after(self.costs.transfer_s, self.commit)
        if not self.topology.shared:  # else engines take their weights while the trainer waits
            self.training, self.idle_since = False, self.now_s
            self.take()

    def commit(self) -> None:
        self.version += 1
        self.publishing = False
        for engine in self.engines:
            if not engine.is_asleep:
                engine.stall(self.now_s, self.costs.pause_s)
                if not self.costs.keeps_cache:
                    self.drop_cache(engine)
        if self.topology.shared:
            self.training, self.idle_since = False, self.now_s
            self.take()
            if not self.training:  # else two batches share a turn
                self.after(self.costs.pause_s + self.costs.open_s, self.open)
            return
        self.fill()
        if self.to_snapshot:
            self.to_snapshot = False
            self.idle_s += self.now_s - self.idle_since
            self.after(self.costs.snapshot_s, self.frozen)

    def open(self) -> None:
        for engine in self.engines:
            if engine.is_asleep and not self.training:
                engine.advance(self.now_s)
                engine.is_asleep = False
                self.drop_cache(engine)
        self.fill()


# --- topologies of a recipe ----------------------------------------------------------------------
# Service times come from bytes and operations at assumed rates; a run's metrics have measured ones.
def describe(config: Config, layouts: Layouts, received: float) -> str:
    """A table; empty without GPUs that the recipe fits.  received: bytes of an engine rank."""
    try:
        placed, tp = placement(config), layouts[2].tp
    except MoerlError:  # the forecast of a publish says it
        return ""
    slots: list[EngineSlot | TrainerSlot] = [*placed.engines, *placed.trainers]
    gpus = len({(slot.node.name, gpu) for slot in slots for gpu in slot.devices})
    if not gpus:
        return ""
    depth, found = config.rollout.buffer_depth, dict[str, SimulatedRun]()
    for name, topology, trainers in _topologies(config, gpus, tp):
        workload, costs = _service(config, layouts, received, trainers, turns=topology.shared > 0)
        found[name] = simulate(workload, costs, topology, 2 * (depth + 1) + _STEADY)
    rows = [
        (f"steps of {gpus} GPUs", "seconds", "idle", "again"),
        *(
            (name, f"{one.step_s:.1f}", f"{one.trainer_idle:.0%}", f"{one.recomputed:.0%}")
            for name, one in sorted(found.items(), key=lambda item: item[1].step_s)
        ),
    ]
    prompt, longest = _prompt(config), config.sampling.max_new_tokens
    return "\n".join(
        [
            *grid(rows, 28, 10, 12, 12),
            f"simulated at rollout.buffer_depth {depth}; idle: share of the trainer's time; again: "
            "sampled tokens that are prefilled again, as a share",
            f"assumed: answers of {_MEAN * longest:,.0f} tokens (lognormal, sigma {_SIGMA}, at "
            f"most {longest:,}), prompts of {prompt:,}; {_FLOP_S / 1e12:g} TFLOP/s and "
            f"{MEMORY_GB_S:,.0f} GB/s of a GPU; {_SWITCH_S:g} s a switch, copies at "
            f"{BUS_GB_S:g} GB/s; rewards at once; memory is not checked",
        ]
    )


def _prompt(config: Config) -> int:
    return config.task.max_prompt_tokens or _PROMPT


def _topologies(config: Config, gpus: int, tp: int) -> Iterator[tuple[str, Topology, int]]:
    """Name, topology, and GPUs of the trainer.  Shares of a quarter, a half, three, and its own.

    Engines and trainer take turns on one machine only, as `check_cluster` says.
    """
    parallel, rollout, most = config.trainer.parallel, config.rollout, gpus // tp
    depth, flying = rollout.buffer_depth, rollout.max_groups_in_flight
    own = config.engine.count if config.cluster.colocated == "none" else 0
    model = parallel.tp * parallel.pp * parallel.cp
    in_turns = is_local(config.cluster)
    if in_turns:
        yield "turns", Topology(0, depth, most, flying), gpus
    for engines in sorted({own, most // 4, most // 2, 3 * most // 4}):
        trainers = gpus - engines * tp
        if engines and trainers > 0 and trainers % model == 0:
            name = f"{engines * tp} + {trainers}"
            mark = " (this recipe)" if engines == own else ""
            yield f"divided {name}{mark}", Topology(engines, depth, 0, flying), trainers
            if in_turns:
                shared = Topology(engines, depth, most - engines, flying)
                yield f"hybrid, {engines * tp} awake", shared, trainers


def _service(
    config: Config, layouts: Layouts, received: float, trainers: int, *, turns: bool
) -> tuple[Workload, Costs]:
    spec, parallel, engine, _ = layouts
    kept = spec.experts_per_token / max(1, spec.experts)
    active = sum(
        math.prod(shape) * (kept if ".experts." in name else 1.0)
        for name, shape in hf_shapes(spec).items()
    )
    longest, rollout = config.sampling.max_new_tokens, config.rollout
    mean, prompt = _MEAN * longest, _prompt(config)
    draw, middle = random.Random(0), math.log(mean) - _SIGMA**2 / 2
    drawn = (round(draw.lognormvariate(middle, _SIGMA)) for _ in range(_DRAWN))
    lengths = [max(1, min(longest, length)) for length in drawn]
    workload = Workload(rollout.groups_per_step, rollout.group_size, lengths, (0.0,), prompt)
    kv_token = engine_memory(spec, engine, received, 0, config.engine.dtype).kv_token
    token_s = 2 * active / _FLOP_S / engine.tp
    tokens = rollout.groups_per_step * rollout.group_size * (prompt + sum(lengths) / _DRAWN)
    ranks = trainer_memory(spec, parallel, training_of(config, gpu=True))
    copied = {"optimizer": "optimizer", "trainer_weights": "weights"}
    parked = [name for part, name in copied.items() if turns and part in moved_parts(config)]
    copies = sum(max(getattr(rank, name) for rank in ranks) for name in parked)
    switch_s = _SWITCH_S + copies / GB / BUS_GB_S
    return workload, Costs(
        train_s=[8 * active * tokens / _FLOP_S / trainers],  # 6, and 2 to recompute
        token_s=received / GB / MEMORY_GB_S,
        request_token_s=token_s + kv_token * (prompt + mean / 2) / GB / MEMORY_GB_S,
        prefill_token_s=token_s,
        transfer_s=received / GB / BUS_GB_S,
        pause_s=_PAUSE_S,
        keeps_cache=config.rollout.in_flight_mode == "in_place" and not turns,
        close_s=switch_s,
        open_s=switch_s,
    )
