"""Discrete-event simulation of a run: step times, idle times, and staleness.

Pure arithmetic on measured or stated service times.  It models the admission rule of
`moerl.controller.buffer`, groups that end with their last sibling, a scorer with a number of
workers, one publish in flight, and the cost of each in-flight mode.  `bench/sim_pipeline.py`
compares it with measured runs.

An engine is a processor-sharing queue: with b running requests a decode step takes `token_s + b *
request_token_s`.  All requests of an engine advance by the same number of tokens, so one counter
per engine gives each end, and an event costs a heap operation, not a loop over requests.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

InFlightMode = Literal["drain", "abort_resume", "in_place", "retract"]
MODES: tuple[InFlightMode, ...] = ("abort_resume", "drain", "in_place", "retract")
_RECOMPUTES = ("abort_resume", "retract")  # these prefill interrupted requests again


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
    call_s: float = 0.0  # an engine is blocked while it starts a group
    prefill_token_s: float = 0.0  # per prompt token, and per token recomputed after an update
    snapshot_s: float = 0.0  # the trainer is blocked while weights are copied
    transfer_s: float = 0.0  # from then until an engine can commit
    pause_s: float = 0.0  # an engine is blocked while it commits
    overhead_s: float = 0.0  # per step of the trainer, neither training nor waiting
    scorers: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Choice:
    """Settings that the user chooses."""

    engines: int
    depth: int  # rollout.buffer_depth; 0 = synchronous
    mode: InFlightMode = "abort_resume"
    max_groups_in_flight: int = 1_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run of so many steps, from the first request to the end of the last step."""

    wall_s: float
    step_s: float  # in the steady middle of the run
    trainer_idle: float  # share of the time, in the steady middle
    engine_idle: float  # share of the wall time without a running request, mean over engines
    lag_mean: float  # per token
    lag_max: int
    recomputed_tokens: float  # share of the sampled ones that were prefilled again


def simulate(workload: Workload, costs: Costs, choice: Choice, steps: int) -> Outcome:
    """Run `steps` optimizer steps; the result is a function of the arguments alone."""
    return _Run(workload, costs, choice, steps).outcome()


@dataclass(slots=True)
class _Engine:
    """Progress of all requests of an engine, with a heap of their ends."""

    costs: Costs
    version: int = 0
    tokens: float = 0.0  # advanced since the start
    at_s: float = 0.0  # moment of `tokens`
    stalled_s: float = 0.0  # no progress before this time
    busy_s: float = 0.0
    epoch: int = 0  # of the valid completion event
    ends: list[tuple[float, int]] = field(default_factory=list)  # (tokens, group) of requests
    begun: float = 0.0  # sum over running requests of `tokens` at their start
    changes: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    updating: bool = False

    @property
    def running(self) -> int:
        return len(self.ends)

    def advance(self, now_s: float) -> None:
        if self.ends:
            self.busy_s += now_s - self.at_s
            moving = now_s - max(self.at_s, self.stalled_s)
            if moving > 0:
                self.tokens += moving / self._token_s()
        self.at_s = now_s

    def next_end_s(self) -> float:
        left = max(0.0, self.ends[0][0] - self.tokens)
        return max(self.at_s, self.stalled_s) + left * self._token_s()

    def stall(self, seconds: float) -> None:
        self.stalled_s = max(self.at_s, self.stalled_s) + seconds

    def lags(self, begun: float, ended: float, step: int) -> dict[int, float]:
        """Tokens by lag of a request that advanced from `begun` to `ended`."""
        found: dict[int, float] = {}
        until = ended
        for start, version in reversed(self.changes):
            tokens = until - max(start, begun)
            if tokens > 0:
                found[step - version] = found.get(step - version, 0.0) + tokens
            until = min(until, start)
            if start <= begun:
                break
        return found

    def _token_s(self) -> float:
        return self.costs.token_s + self.costs.request_token_s * len(self.ends)


@dataclass(slots=True)
class _Group:
    engine: int
    left: int  # requests that still run
    wait_s: float
    begun: float  # the engine's `tokens` at the start
    ends: list[float]


class _Run:
    def __init__(self, workload: Workload, costs: Costs, choice: Choice, steps: int) -> None:
        self.workload, self.costs, self.choice, self.steps = workload, costs, choice, steps
        self.engines = [_Engine(costs) for _ in range(choice.engines)]
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._groups: dict[int, _Group] = {}
        self._ready: list[int] = []
        self._started = self._in_flight = self._scoring = 0
        self._queue: list[int] = []  # groups that wait for a scorer
        self._next_step = 0
        self._training = False
        self._publishing = 0  # engines that have not committed the version in flight
        self._to_snapshot = False
        self._idle_since = self._idle_s = 0.0
        self._taken: list[tuple[float, float]] = []  # when a batch was taken, idle seconds so far
        self._lags: dict[int, float] = {}
        self._recomputed = 0.0
        self._sampled = 0.0

    def outcome(self) -> Outcome:
        self._fill()
        while self._next_step < self.steps or self._training:
            assert self._events, "the simulated run has no next event"
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        for engine in self.engines:
            engine.advance(self.now_s)
        total = sum(self._lags.values())
        step_s, trainer_idle = self._steady()
        return Outcome(
            wall_s=self.now_s,
            step_s=step_s,
            trainer_idle=trainer_idle,
            engine_idle=1 - statistics.fmean(e.busy_s for e in self.engines) / self.now_s,
            lag_mean=sum(lag * tokens for lag, tokens in self._lags.items()) / total,
            lag_max=max(self._lags),
            recomputed_tokens=self._recomputed / self._sampled,
        )

    def _steady(self) -> tuple[float, float]:
        """Seconds and idle share of a step, without the first and last batches."""
        edge = self.choice.depth + 1
        first, last = (edge, self.steps - edge) if self.steps > 2 * edge else (0, self.steps - 1)
        if first >= last:
            return self.now_s, self._idle_s / self.now_s
        (begin_s, idle_before_s), (end_s, idle_s) = self._taken[first], self._taken[last]
        spent_s = end_s - begin_s
        return spent_s / (last - first), (idle_s - idle_before_s) / spent_s

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._order, act))

    # --- engines ------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Start groups that the admission rule allows, each on the least busy engine."""
        newest = max(engine.version for engine in self.engines)
        while self._room(newest) > 0:
            open_engines = [i for i, engine in enumerate(self.engines) if self._admits(engine)]
            if not open_engines:
                return
            self._start(min(open_engines, key=lambda i: self.engines[i].running))

    def _admits(self, engine: _Engine) -> bool:
        if engine.updating and self.choice.mode == "drain":
            return False
        if self._in_flight >= self.choice.max_groups_in_flight:
            return False
        return self._room(engine.version) > 0

    def _room(self, version: int) -> int:
        """Groups that may still start under a version: the rule of `moerl.controller.buffer`."""
        batch = self.workload.groups_per_step
        live = self._started - self._next_step * batch
        bound = (self.choice.depth - (self._next_step - version) + 1) * batch
        return min(bound - live, self.steps * batch - self._started)

    def _start(self, index: int) -> None:
        engine, group_id = self.engines[index], self._started
        lengths, wait_s = self.workload.group(group_id)
        engine.advance(self.now_s)
        prefill_s = self.workload.prompt_tokens * self.costs.prefill_token_s
        engine.stall(self.costs.call_s + prefill_s)
        ends = [engine.tokens + length for length in lengths]
        self._groups[group_id] = _Group(index, len(ends), wait_s, engine.tokens, ends)
        for end in ends:
            heapq.heappush(engine.ends, (end, group_id))
        engine.begun += engine.tokens * len(ends)
        self._started += 1
        self._in_flight += 1
        self._watch(engine)

    def _watch(self, engine: _Engine) -> None:
        """Schedule the next end of a request on this engine, after every change."""
        engine.epoch += 1
        if engine.ends:
            epoch = engine.epoch
            self._after(engine.next_end_s() - self.now_s, lambda: self._ended(engine, epoch))

    def _ended(self, engine: _Engine, epoch: int) -> None:
        if epoch != engine.epoch:
            return
        engine.advance(self.now_s)
        end, group_id = heapq.heappop(engine.ends)
        engine.tokens = max(engine.tokens, end)  # rounding
        group = self._groups[group_id]
        engine.begun -= group.begun
        group.left -= 1
        if not group.left:
            self._in_flight -= 1
            self._queue.append(group_id)
            self._score()
        self._watch(engine)
        self._commit_drained(engine)
        self._fill()

    # --- scoring --------------------------------------------------------------------------------
    def _score(self) -> None:
        while self._queue and self._scoring < self.costs.scorers:
            group_id = self._queue.pop(0)
            self._scoring += 1
            wait_s = self._groups[group_id].wait_s
            self._after(wait_s, lambda group_id=group_id: self._scored(group_id))  # type: ignore[misc]

    def _scored(self, group_id: int) -> None:
        self._scoring -= 1
        heapq.heappush(self._ready, group_id)
        self._score()
        self._take()

    # --- trainer --------------------------------------------------------------------------------
    def _take(self) -> None:
        if self._training or len(self._ready) < self.workload.groups_per_step:
            return
        self._idle_s += self.now_s - self._idle_since
        self._taken.append((self.now_s, self._idle_s))
        self._training = True
        for group in (
            self._groups.pop(heapq.heappop(self._ready))
            for _ in range(self.workload.groups_per_step)
        ):
            for end in group.ends:
                lags = self.engines[group.engine].lags(group.begun, end, self._next_step)
                for lag, tokens in lags.items():
                    self._lags[lag] = self._lags.get(lag, 0.0) + tokens
                self._sampled += end - group.begun
        self._next_step += 1
        train_s = self.costs.train_s[(self._next_step - 1) % len(self.costs.train_s)]
        self._after(train_s + self.costs.overhead_s, self._trained)
        self._fill()

    def _trained(self) -> None:
        if self._next_step >= self.steps:
            self._training = False  # the last version is not published
        elif self._publishing:
            self._to_snapshot, self._idle_since = True, self.now_s
        else:
            self._after(self.costs.snapshot_s, self._snapshot_done)

    def _snapshot_done(self) -> None:
        self._training, self._idle_since = False, self.now_s
        self._publishing = len(self.engines)
        version = self._next_step
        for engine in self.engines:
            self._after(self.costs.transfer_s, lambda e=engine: self._update(e, version))  # type: ignore[misc]
        self._take()

    # --- publish --------------------------------------------------------------------------------
    def _update(self, engine: _Engine, version: int) -> None:
        """The weights have arrived: commit now, or with `drain` when no request is running."""
        engine.updating = True
        engine.changes.append((float("inf"), version))  # its position is known at the commit
        if self.choice.mode == "drain":
            self._commit_drained(engine)
        else:
            self._commit(engine)

    def _commit_drained(self, engine: _Engine) -> None:
        if self.choice.mode == "drain" and engine.updating and not engine.ends:
            self._commit(engine)

    def _commit(self, engine: _Engine) -> None:
        engine.advance(self.now_s)
        engine.stall(self.costs.pause_s)
        if self.choice.mode in _RECOMPUTES and engine.ends:
            done = engine.tokens * len(engine.ends) - engine.begun
            prompts = self.workload.prompt_tokens * len(engine.ends)
            engine.stall((done + prompts) * self.costs.prefill_token_s)
            self._recomputed += done
        _, engine.version = engine.changes[-1]
        engine.changes[-1] = (engine.tokens, engine.version)
        engine.changes = engine.changes[-64:]
        engine.updating = False
        self._watch(engine)
        self._publishing -= 1
        self._after(0.0, self._fill)  # after all commits at this time
        if not self._publishing and self._to_snapshot:
            self._to_snapshot = False
            self._idle_s += self.now_s - self._idle_since
            self._after(self.costs.snapshot_s, self._snapshot_done)


# --- choosing ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Advice:
    """The smallest setup that keeps the trainer busy, and all compared outcomes."""

    choice: Choice
    outcome: Outcome
    table: tuple[tuple[Choice, Outcome], ...]


_STEADY_STEPS = 6
CLOSE = 1.03  # step times within this factor count as equal


def advise(workload: Workload, costs: Costs, *, max_engines: int, max_lag: int) -> Advice:
    """Engines, depth and mode for a workload.

    The fewest engines whose step time is within CLOSE of the time of all engines at the largest
    depth, then the smallest depth, then the first of MODES within CLOSE: ties go to fresher data
    and exact modes.
    """
    depths = sorted({depth for depth in (0, 1, 2, 4, 8) if depth <= max_lag} | {max_lag})
    table: dict[Choice, Outcome] = {}

    def ask(choice: Choice) -> Outcome:
        if choice not in table:
            steps = 2 * (choice.depth + 1) + _STEADY_STEPS
            table[choice] = simulate(workload, costs, choice, steps)
        return table[choice]

    low, high = 1, max_engines
    enough_s = CLOSE * ask(Choice(max_engines, depths[-1], MODES[0])).step_s
    while low < high:  # a step takes less time with more engines
        middle = (low + high) // 2
        if ask(Choice(middle, depths[-1], MODES[0])).step_s <= enough_s:
            high = middle
        else:
            low = middle + 1
    every = [ask(Choice(low, depth, mode)) for depth in depths for mode in MODES]
    limit = CLOSE * min(outcome.step_s for outcome in every)
    choice = next(
        Choice(low, depth, mode)
        for depth in depths
        for mode in MODES
        if ask(Choice(low, depth, mode)).step_s <= limit
    )
    return Advice(choice, table[choice], tuple(table.items()))


def scaled(workload: Workload, mean_tokens: float) -> Workload:
    """The same distribution of lengths with another mean."""
    factor = mean_tokens / statistics.fmean(workload.lengths)
    return replace(workload, lengths=[max(1, round(n * factor)) for n in workload.lengths])
