"""An open episode: its turns, the graph of its requests, and its age.

It runs on the controller's event loop.  Messages, templates, HTTP and programs may run on another
loop, which calls `sample` once per turn.  However often an engine is interrupted, the turn resumes
in a callback of the router; its caller waits for one future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from moerl.config.task_programs import POLICY, policy_name
from moerl.core.errors import EngineError, MoerlError, RecordError
from moerl.core.types import (
    Array,
    GenerateRequest,
    Grammar,
    GraphTurn,
    LeftOut,
    PolicyVersion,
    Prompt,
    SamplingParams,
    Score,
    Segment,
    base_role,
)
from moerl.episodes.finished_episode import ENDED, FinishedEpisode, RecordedTurn, Retired
from moerl.episodes.turn import TurnInFlight
from moerl.records.header_check import blob_uris

_FIRST_VERSION = PolicyVersion(0, 0)


class EpisodeEnded(MoerlError):
    """The episode has ended: it samples no further turn."""


class VersionGone(MoerlError):
    """No engine serves the version under which a turn was to be sampled."""


class EnginePin:
    """One engine at one version, for all turns of an evaluation."""

    def __init__(self, engine: int, version: PolicyVersion) -> None:
        self.engine, self.version = engine, version
        # Set when a turn could not have this engine and version
        self.broken: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()

    def breaks(self, error: EngineError) -> None:
        if not self.broken.done():
            self.broken.set_result(error)

    def check(self, *versions: PolicyVersion) -> None:
        if any(version != self.version for version in versions):
            self.breaks(EngineError(f"engine {self.engine} took an update while it was evaluated"))


@dataclass(slots=True, eq=False)
class Home:
    """The engine on which the siblings of a group begin, so that they share their prompt."""

    engine: int


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeSpec:
    """Settings of one episode."""

    name: str  # GROUP.SIBLING and its try
    prompt: Prompt
    sampling: SamplingParams  # of each turn without a role
    prompt_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # siblings share it
    max_turns: int = 1
    audit: bool = False  # see GenerateRequest
    slice_tokens: int = 0  # most tokens that one engine call samples; 0 = no limit
    held_out: bool = False  # it belongs to an evaluation, and is not trained
    home: Home | None = None
    pin: EnginePin | None = None
    inherited: frozenset[str] = frozenset()  # blobs of an earlier try, for deletion
    watch: EpisodeWatch | None = None
    roles: Mapping[str, SamplingParams] = field(default_factory=dict)  # of turns with a role

    def role_in_turn(self, number: int) -> str:
        """Role in turn `number` from 0 where the task's roles take turns; empty: it has none."""
        names = [role for role in self.roles if role]
        return names[number % len(names)] if names else ""

    def sampling_of(self, role: str) -> SamplingParams:
        return self.roles.get(base_role(role), self.sampling)


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """A turn that the episode should sample next.

    prompt_ids: [P] i32, the whole conversation.  It begins with `inherited` tokens of the parent:
    all of them, or all but a stop token that a template has replaced.

    fork_at: number of the parent's sampled tokens that are kept; -1: all of them.
    version: the turn is sampled under these weights only, or not at all; None: under any.
    role: of the policy in this turn, such as `solver` or `solver.2`; empty: it has none.
    ends: whether these tokens, which end with a token of `stop_ids`, end the turn.
    on_tokens: receives all tokens so far, now and then; used on the controller's loop.
    """

    prompt_ids: Array
    parent: RecordedTurn | None = None
    inherited: int = 0
    origin: str = ""
    fork_at: int = -1
    version: PolicyVersion | None = None
    role: str = ""
    max_new_tokens: int = 0  # 0: the episode's own limit
    stop_ids: tuple[int, ...] = ()  # besides the stop tokens of the episode
    grammar: Grammar | None = None
    ends: Callable[[Array], Awaitable[bool]] | None = None
    on_tokens: Callable[[Array], None] | None = None


class TurnCall:
    """A turn while the router has it."""

    __slots__ = (
        "asked",
        "done",
        "engine",
        "episode",
        "sent_at",
        "shown_ids",
        "step",
        "turn",
        "wanted",
    )

    def __init__(self, episode: OpenEpisode, turn: TurnInFlight, wanted: TurnRequest) -> None:
        self.episode, self.turn, self.wanted = episode, turn, wanted
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked: GenerateRequest | None = None  # the request of this turn that is open
        self.engine: object | None = None  # state of the engine that has it
        self.sent_at = 0.0  # seconds of the event loop
        self.step = 0  # of that engine's weights when it was sent
        self.shown_ids: Array = np.zeros(0, np.int32)  # tokens that a listener knows

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class Router(Protocol):
    """Where turns are sampled (`moerl.controller.turn_router`)."""

    def submit(self, call: TurnCall) -> None:
        """Sample the turn; then `call.done` has a result, or RecordError or EngineError."""
        ...

    def withdraw(self, call: TurnCall) -> None:
        """Drop a turn whose caller has stopped waiting."""
        ...

    def current(self, episode: OpenEpisode) -> PolicyVersion:
        """The weights that would sample the next turn of an episode."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended.

    failure: why it cannot be trained, in one word; empty if it can.  detail: a sentence.
    score: by the episode's own program or environment, if any.  refused: the error of a record for
    which the episode is played again.  on_retired: receives its result, on the controller's loop.
    """

    failure: str = ""
    detail: str = ""
    score: Score | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    refused: RecordError | None = None
    on_retired: Callable[[Retired], None] = lambda how: None


class EpisodeWatch(Protocol):
    """Hears of the turns of an episode, on the controller's loop."""

    def sampled(self, episode: OpenEpisode, call: TurnCall) -> None:
        """A turn has further tokens."""
        ...

    def turn_ended(self, episode: OpenEpisode, turn: RecordedTurn) -> None: ...


class EpisodeRunner(Protocol):
    """A way to play episodes: `EnvironmentRunner`, or a runner of `moerl.agents`."""

    async def start(self) -> None:
        """Called once, first, on the controller's event loop."""
        ...

    async def run(self, episode: OpenEpisode) -> Outcome:
        """Play an episode to its end.  Its own faults are in the outcome."""
        ...

    def end(self, name: str) -> None:
        """End an episode: `run` returns soon.  Unknown names are ignored."""
        ...

    async def close(self) -> None:
        """End everything."""
        ...


class OpenEpisode:
    """Used from the controller's event loop."""

    def __init__(self, spec: EpisodeSpec, router: Router) -> None:
        self.spec, self._router = spec, router
        self.turns: list[RecordedTurn] = []  # in the order in which they ended
        self.newest = _FIRST_VERSION  # of its tokens; an older engine would break the order
        self.engine = -1  # of the last request
        self.uris = set(spec.inherited)  # every blob that was sealed for it
        self.resumed = 0  # requests for the rest of an interrupted turn
        self.num_heard = 0  # tokens of all replies
        self.unlogged: list[tuple[GenerateRequest, Segment]] = []  # see rollout.journal_tokens
        self.is_released = spec.pin is not None  # its owner has taken its blobs over
        self.count_lost: Callable[[int], None] | None = None  # receives tokens of withdrawn turns
        self._graph: dict[str, GraphTurn] = {}  # requested turns, by name
        self._calls: dict[str, TurnCall] = {}  # turns that are being sampled, by name
        self._oldest: dict[str, PolicyVersion] = {}  # of the tokens of each turn
        self._ended = False
        now = asyncio.get_running_loop().time()
        self._begun, self._busy_since, self._busy_s = now, 0.0, 0.0

    @property
    def name(self) -> str:
        return self.spec.name

    async def sample(self, wanted: TurnRequest) -> RecordedTurn:
        """The next turn.  Raises EpisodeEnded, VersionGone, RecordError, EngineError."""
        if self._ended:
            raise EpisodeEnded(f"episode {self.name} has ended")
        parent = "" if wanted.parent is None else wanted.parent.name
        name = self.begin(parent, policy_name(wanted.role))
        call = TurnCall(self, self._turn(name, wanted), wanted)
        self._is_sampling(call)
        try:
            self._router.submit(call)
            await call.done
            recorded = self._recorded(call)
        except BaseException as error:
            self._router.withdraw(call)
            self._drop(name, error)
            raise
        finally:
            self._was_sampled(call)
        self.turns.append(recorded)
        if self.spec.watch is not None:
            self.spec.watch.turn_ended(self, recorded)
        return recorded

    def fork(self, turn: RecordedTurn, at: int, count: int) -> list[TurnRequest]:
        """Requests for other ends of a turn, behind the first `at` of its sampled tokens.

        They share their prompt, so they travel in one message and one prefill serves them, and are
        sampled under the current weights or not at all.
        """
        if not 0 <= at < turn.num_sampled:
            raise ValueError(f"{turn.name} has {turn.num_sampled} sampled tokens, fork at {at}")
        inherited = len(turn.sampled.prompt_ids) + at
        prompt_ids = turn.token_ids[:inherited]
        wanted = TurnRequest(
            prompt_ids,
            turn,
            inherited,
            "forked",
            fork_at=at,
            version=self._router.current(self),
            max_new_tokens=turn.sampled.sampling.max_new_tokens - at,
        )
        return [wanted] * count

    def begin(self, parent: str, role: str = POLICY) -> str:
        """The name of a turn that begins.  It is left out unless it is recorded."""
        name = f"{self.name}.t{len(self._graph)}"
        self._graph[name] = GraphTurn(name, parent, role, "cancelled")
        return name

    def calls_tools(self, name: str, tools: tuple[str, ...]) -> None:
        """The answer of a turn calls these functions."""
        self._graph[name] = replace(self._graph[name], tools=tools)

    def leave_out(self, name: str, why: LeftOut) -> None:
        """A turn is not trained."""
        self._graph[name] = replace(self._graph[name], left_out=why)
        self._oldest.pop(name, None)
        self.turns = [turn for turn in self.turns if turn.name != name]

    def end(self) -> None:
        """Sample no further turn, and withdraw running turns."""
        self._ended = True
        for call in self._calls.values():
            call.fail(EpisodeEnded(f"episode {self.name} was ended"))

    def finish(self, outcome: Outcome) -> FinishedEpisode:
        """End the episode, and return its record."""
        self.end()
        failure = outcome.failure
        left_out: LeftOut = "ended" if failure == ENDED else "failed" if failure else ""
        seconds = asyncio.get_running_loop().time() - self._begun
        counts = {"turns": len(self.turns), "resumed": self.resumed, "engine_s": self._busy_s}
        counts |= {"program_s": seconds - self._busy_s, **outcome.counts}
        graph = tuple(self._graph.values())
        if left_out:
            graph = tuple(replace(turn, left_out=turn.left_out or left_out) for turn in graph)
        return FinishedEpisode(
            episode_id=self.name,
            prompt=self.spec.prompt,
            turns=tuple(self.turns),
            uris=frozenset(self.uris),
            failure=failure,
            detail=outcome.detail,
            refused=outcome.refused,
            own_score=None if failure else outcome.score,
            counts=counts,
            on_retired=outcome.on_retired,
            graph=graph,
        )

    # --- for the router ---------------------------------------------------------------------------
    def add(self, call: TurnCall, reply: Segment) -> None:
        """A reply to a turn.  Raises RecordError."""
        self.uris |= blob_uris(reply)
        self.num_heard += reply.num_sampled
        versions = [piece.version for piece in reply.pieces if len(piece.output_ids)]
        parent = call.wanted.parent
        if parent is not None and versions and versions[0] < parent.newest:
            detail = f"{self.name}: {versions[0]} after {parent.newest}"
            raise RecordError("versions", detail)
        call.turn.add(reply)
        if versions:
            self.newest = max([*versions, self.newest])
            self._oldest.setdefault(call.turn.name, versions[0])
        if self.spec.watch is not None and not call.turn.finished:
            self.spec.watch.sampled(self, call)

    # --- state ------------------------------------------------------------------------------------
    @property
    def calls(self) -> list[TurnCall]:
        """Turns that are being sampled."""
        return list(self._calls.values())

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled in recorded and running turns."""
        running = sum(call.turn.num_sampled for call in self._calls.values())
        return sum(turn.num_sampled for turn in self.turns) + running

    def blob_uris(self) -> set[str]:
        """Every blob that was sealed for it."""
        return self.uris

    def oldest_step(self, *, runs_through_updates: bool) -> int | None:
        """Step of the oldest weights that sampled a token; None when no token is known.

        runs_through_updates: requests go on while weights change, so a running request may have
        tokens of the weights that it was sent to.
        """
        steps = [version.step for version in self._oldest.values()]
        if runs_through_updates:
            steps += [call.step for call in self._calls.values() if call.engine is not None]
        return min(steps, default=None)

    # --- plumbing ---------------------------------------------------------------------------------
    def _turn(self, name: str, wanted: TurnRequest) -> TurnInFlight:
        own, parent = self.spec.sampling_of(wanted.role), wanted.parent
        sampling = own
        if wanted.max_new_tokens or wanted.stop_ids or wanted.grammar:
            sampling = replace(
                own,
                grammar=wanted.grammar,
                max_new_tokens=wanted.max_new_tokens or own.max_new_tokens,
                stop_token_ids=(*own.stop_token_ids, *wanted.stop_ids),
            )
        continues = parent is not None and wanted.inherited == parent.num_tokens
        return TurnInFlight(
            name,
            wanted.prompt_ids,
            sampling,
            audit=self.spec.audit,
            rows_known=wanted.inherited - 1 if continues else 0,  # the last token is fed only now
            slice_tokens=self.spec.slice_tokens,
        )

    def _recorded(self, call: TurnCall) -> RecordedTurn:
        """Raises RecordError when the turn does not continue its parent."""
        wanted, turn = call.wanted, call.turn
        # Tokens of stop texts say where this turn ends, not how it is sampled.
        own, most = self.spec.sampling_of(wanted.role), turn.sampling.max_new_tokens
        own = own if own.max_new_tokens == most else replace(own, max_new_tokens=most)
        at, sampled = wanted.fork_at, turn.sampled(own, wanted.role)
        recorded = RecordedTurn(
            wanted.parent, wanted.inherited, wanted.origin, turn.name, sampled, at
        )
        left_out: LeftOut = "held_out" if self.spec.held_out else ""
        parent = self._graph[turn.name].parent
        in_graph = recorded.sampled.in_graph(turn.name, parent, left_out)
        self._graph[turn.name] = replace(in_graph, fork_at=at)
        return recorded

    def _drop(self, name: str, error: BaseException) -> None:
        if isinstance(error, RecordError):
            self.leave_out(name, "refused")
        elif isinstance(error, EngineError | VersionGone):
            self.leave_out(name, "no_answer")
        else:
            self.leave_out(name, "cancelled")

    def _is_sampling(self, call: TurnCall) -> None:
        if not self._calls:
            self._busy_since = asyncio.get_running_loop().time()
        self._calls[call.turn.name] = call

    def _was_sampled(self, call: TurnCall) -> None:
        del self._calls[call.turn.name]
        if not self._calls:
            self._busy_s += asyncio.get_running_loop().time() - self._busy_since
