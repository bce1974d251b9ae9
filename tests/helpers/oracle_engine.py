"""Stub services whose answers and delays are functions of names, not of the order of calls.

Every delay is drawn, so that under the fake clock no two events fall on one moment: how often the
event loop turns, and which of two tasks it runs first, changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from moerl.core.episode_view import EpisodeView
from moerl.core.errors import EngineError, RecordError, ScoreError
from moerl.core.ids import without_life
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    LogprobBlob,
    MaskBlob,
    PolicyVersion,
    Prompt,
    RoutingBlob,
    Score,
    Segment,
)
from moerl.engine.host.reply_parser import SharedPrompts
from moerl.records import BlobStore
from tests.helpers.controllers import StubScorer
from tests.helpers.stub_engine import KILLED, Reply, StubEngine

VOCABULARY, EXPERTS, TOP_K = 256, 4, 2
FIRST_TOKEN = 128  # the tokens before it have a meaning in the chat tokenizer
LONGEST = 80  # tokens of a turn
UPDATE_S = 0.005
_HINTS = 7  # rejected candidates in a row of a sampling mask


def draw(*key: object) -> int:
    """A number of 32 bits that depends on nothing but `key`."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=4).digest(), "little")


def delay_s(low: float, high: float, *key: object) -> float:
    return low + (high - low) * draw("delay", *key) / 2**32


def turn_name(name: str) -> str:
    """EPISODE.tNUMBER without life and try: the first turn of a text may be called EPISODE."""
    bare = without_life(name)
    last = bare.rpartition(".")[2]
    return bare if last.startswith("t") else f"{bare}.t0"


@dataclass
class World:
    """Facts that the engines of a run share."""

    store: BlobStore
    seed: int = 0
    mode: str = "abort_resume"  # rollout.in_flight_mode
    # (turn, try) -> the reason of the refusal that answers its first call
    refusals: Mapping[tuple[str, int], str] = field(default_factory=dict)
    longest: Callable[[str], int] = lambda turn: LONGEST
    tries: dict[str, list[str]] = field(default_factory=dict)  # names that each turn has had

    def key(self, rollout_id: str) -> tuple[str, int]:
        """The turn and the number of its try."""
        turn = turn_name(rollout_id)
        names = self.tries.setdefault(turn, [])
        if rollout_id not in names:
            names.append(rollout_id)
        return turn, names.index(rollout_id)

    def length(self, key: tuple[str, int]) -> int:
        """Tokens of the whole turn."""
        longest = self.longest(key[0])
        return longest // 4 + draw(self.seed, key, "length") % (longest - longest // 4)


class OracleEngine(StubEngine):
    """Answers each request in its own time; an update cuts, or runs through, as `World.mode` says.

    The tokens, log-probabilities, masks and routes of a place in a turn depend on the turn, its
    try, the place and the version.
    """

    def __init__(self, world: World, *, number: int = 0) -> None:
        super().__init__(number=number)
        self.world = world
        self._history = [(0.0, self.version)]  # version from a time on
        self._stops: dict[str, asyncio.Event] = {}  # set: the request is to end now
        self._sealed, self._shared = 0, SharedPrompts()

    @property
    def is_sampling(self) -> bool:
        return bool(self._stops)

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self._shared.expect(request)
        for request in requests:
            task = asyncio.create_task(self._play(request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def abort(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._stops:
                self._stops[name].set()

    def kill(self) -> None:
        super().kill()
        self._end_all()

    async def _update(self, version: PolicyVersion) -> None:
        self.open.clear()
        if self.world.mode not in ("in_place", "retract"):
            self._end_all()
        await asyncio.sleep(UPDATE_S)
        self.version = version
        self._history.append((asyncio.get_running_loop().time(), version))
        self.open.set()

    def _end_all(self) -> None:
        for end in self._stops.values():
            end.set()

    async def _play(self, request: GenerateRequest) -> None:
        self.requests.append(request)
        end = self._stops[request.name] = asyncio.Event()
        try:
            reply: Reply | EngineError = await self._answer(request, end)
        except EngineError as error:
            reply = error
        self._shared.leave(request)
        del self._stops[request.name]
        self.mailbox.put(request.name, reply)

    async def _answer(self, request: GenerateRequest, end: asyncio.Event) -> Reply:
        """Raises EngineError."""
        await self.open.wait()
        world, begin = self.world, asyncio.get_running_loop().time()
        key = world.key(request.rollout_id)
        pace_s = delay_s(0.0007, 0.0013, world.seed, key, request.num_sampled)
        left = world.length(key) - request.num_sampled
        count = min(left, request.sampling.max_new_tokens)
        finish = Finish.STOP if count == left else Finish.LENGTH
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(count * pace_s):
                await end.wait()
        if self.dead:
            raise EngineError(KILLED)
        if not request.num_sampled and (reason := world.refusals.get(key)):
            return RecordError(reason, f"{request.rollout_id} was to be refused")
        if end.is_set():
            now = asyncio.get_running_loop().time()
            count, finish = min(count, int((now - begin) / pace_s)), Finish.ABORT
        times = [begin + (place + 1) * pace_s for place in range(count)]
        return self._segment(request, key, times, finish)

    def _version_at(self, time_s: float) -> PolicyVersion:
        return next(version for begin, version in self._history[::-1] if begin <= time_s)

    def _segment(
        self,
        request: GenerateRequest,
        key: tuple[str, int],
        times: Sequence[float],
        finish: Finish,
    ) -> Segment:
        """One piece for each version that the tokens, sampled at `times`, have."""
        versions = [self._version_at(time_s) for time_s in times] or [self.version]
        starts = [at for at in range(len(versions)) if not at or versions[at] != versions[at - 1]]
        pieces = []
        for begin, end in zip(starts, [*starts[1:], len(times)], strict=True):
            ends = finish if end == len(times) else Finish.ABORT
            piece = self._piece(request, key, (begin, end), versions[begin], ends)
            kept = bool(begin) and self.world.mode == "in_place"
            pieces.append(replace(piece, kept_kv=kept))
        return replace(pieces[0], rest=tuple(pieces[1:]))

    def _piece(
        self,
        request: GenerateRequest,
        key: tuple[str, int],
        part: tuple[int, int],
        version: PolicyVersion,
        finish: Finish,
    ) -> Segment:
        begin, end = part
        places = range(request.num_sampled + begin, request.num_sampled + end)
        ids = [self._token(key, place, version) for place in places]
        if finish == Finish.STOP and request.sampling.stop_token_ids:
            ids[-1] = request.sampling.stop_token_ids[0]
        logprobs = [-0.001 * (draw(key, place, str(version), "p") % 4000) for place in places]
        plain = Segment(
            request.rollout_id,
            np.asarray(ids, np.int32),
            np.zeros(0, np.float32),
            version,
            finish,
            None, None, None, self.number, 0, 0.0, 0.0,
        )  # fmt: skip
        if not ids:
            return plain
        arrays = {"logprobs": np.asarray(logprobs, np.float32)}
        row = request.num_tokens + begin - 1 if begin else request.rows_from
        shared = self._rows(request, key, (row, request.num_tokens + end - 1), version, arrays)
        if request.audit and row and not begin:  # its prefix, fed once more
            arrays["audit"] = _routes((key, "audit", str(version)), row)
        if request.sampling.truncates:
            arrays["offsets"], arrays["entries"] = _masks(key, ids)
        self._sealed += 1
        blob = f"{request.name}-{self.number}-{self._sealed}"
        refs = dict(zip(arrays, self.world.store.seal(blob, list(arrays.values())), strict=True))

        def routes(name: str, begin: int) -> RoutingBlob | None:
            if name not in refs:
                return None
            rows = begin + refs[name].shape[1]
            return RoutingBlob(refs[name], begin, rows, version, (0,), EXPERTS)

        if new := routes("prompt", 0):
            self._shared.keep(request, version, arrays["prompt"], new)
        behind = request.num_tokens - 1 if shared or new else row
        masks = (refs["offsets"], refs["entries"]) if "offsets" in refs else None
        return replace(
            plain,
            prompt_rows=new or shared,
            routing=routes("routes", behind),
            audit_rows=routes("audit", 0),
            sealed_logprobs=LogprobBlob(refs["logprobs"], 0, len(ids)),
            sampling_mask=MaskBlob(*masks, 0, len(ids)) if masks else None,
        )

    def _rows(
        self,
        request: GenerateRequest,
        key: tuple[str, int],
        part: tuple[int, int],
        version: PolicyVersion,
        arrays: dict[str, Array],
    ) -> RoutingBlob | None:
        """Add the rows of a part to `arrays`; returns those of the prompt that a sibling has."""
        begin, end = part
        if begin:
            arrays["routes"] = _routes((key, begin, str(version)), end - begin)
            return None
        prompt = request.num_tokens - 1
        whole = _routes((request.token_ids.tolist(), str(version)), prompt)
        whole = np.concatenate([whole, _routes((key, prompt, str(version)), end - prompt)], axis=1)
        split = self._shared.split(request, whole)
        rows, arrays["routes"] = np.split(whole, [split], axis=1)
        shared = self._shared.find(request, version, rows) if split else None
        if split and shared is None:
            arrays["prompt"] = rows
        return shared

    def _token(self, key: tuple[str, int], place: int, version: PolicyVersion) -> int:
        chosen = draw(self.world.seed, key, place, str(version))
        return FIRST_TOKEN + chosen % (VOCABULARY - FIRST_TOKEN)


def _routes(key: object, count: int) -> Array:
    """[1, count, TOP_K] u8, the experts of a row in ascending order."""
    first = np.random.default_rng(draw(key)).integers(0, EXPERTS - 1, (1, count, 1))
    return np.concatenate([first, first + 1], axis=2).astype(np.uint8)


def _masks(key: object, ids: Sequence[int]) -> list[Array]:
    rows = [sorted({token, draw(key, token) % _HINTS}) for token in ids]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    return [offsets, np.asarray([entry for row in rows for entry in row], np.int32)]


@dataclass
class OracleScorer(StubScorer):
    """Rewards 0, 1/4, ... 1 by the texts; an environment of 0 to 2 replies."""

    fails: frozenset[int] = frozenset()  # prompts that cannot be scored
    breaks: frozenset[int] = frozenset()  # prompts whose environment raises
    equal: frozenset[int] = frozenset()  # prompts whose rewards are equal
    steps: bool = False  # rewards of turns, too

    async def rewards(self, prompt: Prompt, episodes: Sequence[EpisodeView]) -> list[Score]:
        responses = [episode.responses for episode in episodes]
        await asyncio.sleep(delay_s(0.001, 0.004, "score", prompt.index, responses))
        if prompt.index in self.fails:
            raise ScoreError(f"prompt {prompt.index} was to fail")
        return [self._score(prompt, texts) for texts in responses]

    def _score(self, prompt: Prompt, texts: Sequence[str]) -> Score:
        chosen = draw("reward", prompt.index, list(texts))
        turns = tuple(draw("turn", text) % 8 / 8 for text in texts) if self.steps else ()
        reward = 0.5 if prompt.index in self.equal else chosen % 5 / 4
        return Score(reward, turns=turns, errors=float(chosen // 5 % 3))

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        key = "reply", prompt.index, list(responses)
        await asyncio.sleep(delay_s(0.002, 0.02, key))
        if prompt.index in self.breaks:
            raise ScoreError(f"the environment of prompt {prompt.index} was to fail")
        if len(responses) > draw(key) % 4:
            return ""
        return " ".join(str(FIRST_TOKEN + draw(key, word) % 100) for word in range(3))


class OraclePrompts:
    """Prompts of 3 to 9 tokens.  labels: of the tasks of a mixture, in turn."""

    def __init__(self, labels: Sequence[str] = ("",)) -> None:
        self._labels = labels

    def prompt(self, index: int) -> Prompt:
        length = 3 + draw("prompt", index) % 7
        ids = tuple(FIRST_TOKEN + draw("prompt", index, at) % 100 for at in range(length))
        task = self._labels[index % len(self._labels)]
        return Prompt(index, ids, f"p{index}", index % 10, {"hint": index}, task)
