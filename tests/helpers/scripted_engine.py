"""An engine that answers with given tokens, for tests of the gateway without a model.

Records have no routes and no masks; log-probabilities stand in the reply.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moerl.core.errors import EngineError, RecordError
from moerl.core.types import Finish, GenerateRequest, PolicyVersion, Segment


@dataclass
class ScriptedEngine:
    """answers: output tokens of the next turns; the length limit of a request cuts them.

    interrupt_at: the next calls end as aborted after so many tokens, each under a new version.
    hangs: calls wait until they are aborted.
    tells: of a request that streams, after how many tokens it tells them; `told` waits there for
    `goes_on`.
    """

    answers: deque[list[int]] = field(default_factory=deque)
    interrupt_at: deque[int] = field(default_factory=deque)
    hangs: bool = False
    fails: Exception | None = None
    version: int = 0
    tells: int = 1
    goes_on: asyncio.Event | None = None  # None: it never waits
    told: list[int] = field(default_factory=list)  # number of tokens, each time
    loses: int = 0  # tokens that were told and are not in the reply
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    _rest: dict[str, list[int]] = field(default_factory=dict)  # of interrupted turns
    _ends: dict[str, asyncio.Event] = field(default_factory=dict)

    def say(self, *answers: Iterable[int]) -> None:
        self.answers += [list(answer) for answer in answers]

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> Sequence[Segment | RecordError]:
        return [await self._reply(request) for request in requests]

    async def stream(
        self, request: GenerateRequest, heard: Callable[[np.ndarray], None]
    ) -> Segment | RecordError:
        assert request.streams
        reply = await self._reply(request)
        if not isinstance(reply, Segment):
            return reply
        for count in range(self.tells, len(reply.output_ids), self.tells):
            self.told.append(count)
            heard(reply.output_ids[:count])
            await asyncio.sleep(0)
            if self.goes_on is not None:
                await self._wait(request)
        if self.loses:
            kept, self.loses = len(reply.output_ids) - self.loses, 0
            self._rest[request.rollout_id] = reply.output_ids[kept:].tolist()
            return replace(reply, output_ids=reply.output_ids[:kept], finish=Finish.ABORT)
        return reply

    async def _wait(self, request: GenerateRequest) -> None:
        """Until it goes on, or the request is aborted."""
        assert self.goes_on is not None
        self._ends[request.name] = asyncio.Event()
        waits = [self.goes_on.wait(), self._ends[request.name].wait()]
        tasks = list(map(asyncio.ensure_future, waits))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()

    async def abort(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            if name in self._ends:
                self._ends[name].set()

    async def _reply(self, request: GenerateRequest) -> Segment | RecordError:
        self.requests.append(request)
        if isinstance(self.fails, RecordError):
            return self.fails
        if self.fails is not None:
            raise EngineError(str(self.fails))
        if self.hangs:
            self._ends[request.name] = asyncio.Event()
            await self._ends[request.name].wait()
            return self._segment(request, [], Finish.ABORT)
        await asyncio.sleep(0)
        left = self._rest.pop(request.rollout_id, None)
        return self._sampled(request, self.answers.popleft() if left is None else left)

    def _sampled(self, request: GenerateRequest, answer: list[int]) -> Segment:
        stops = set(request.sampling.stop_token_ids)
        stop = next((place for place, token in enumerate(answer, 1) if token in stops), None)
        ends = [(request.sampling.max_new_tokens, Finish.LENGTH)]
        ends += [(stop, Finish.STOP)] if stop else []
        if self.interrupt_at:
            ends.append((self.interrupt_at.popleft(), Finish.ABORT))
        count, finish = min(ends, key=lambda end: end[0])
        assert count <= len(answer), "the script has too few tokens"
        self._rest[request.rollout_id] = answer[count:]
        segment = self._segment(request, answer[:count], finish)
        self.version += finish is Finish.ABORT
        return segment

    def _segment(self, request: GenerateRequest, ids: list[int], finish: Finish) -> Segment:
        return Segment(
            rollout_id=request.rollout_id,
            output_ids=np.asarray(ids, np.int32),
            logprobs=-0.01 * np.asarray(ids, np.float32),
            version=PolicyVersion(0, self.version),
            finish=finish,
            routing=None,
            sampling_mask=None,
            audit_rows=None,
            engine=0,
            cached_tokens=0,
            start_s=0.0,
            end_s=0.0,
        )
