"""Messages of an engine host for stub engines, which have a `generate` that answers all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moerl.core.errors import EngineError, RecordError
from moerl.core.messages import Answers
from moerl.core.types import GenerateRequest, Segment
from moerl.engine.host.mailbox import Mailbox


class StubMailbox:
    """Each message is one call of `generate`; a call that raises fails its requests."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        raise NotImplementedError

    @property
    def mailbox(self) -> Mailbox:
        found: Mailbox = self.__dict__.setdefault("_mailbox", Mailbox())
        return found

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        running: set[asyncio.Task[None]] = self.__dict__.setdefault("_running", set())
        task = asyncio.create_task(self._run(requests))
        running.add(task)
        task.add_done_callback(running.discard)

    async def _run(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            replies: Sequence[Segment | RecordError | EngineError] = await self.generate(requests)
            if len(replies) != len(requests):
                raise EngineError(f"{len(replies)} replies to {len(requests)} requests")
        except EngineError as error:
            replies = [error] * len(requests)
        for request, reply in zip(requests, replies, strict=True):
            self.mailbox.put(request.name, reply)

    async def collect(self) -> Answers:
        return await self.mailbox.collect()

    async def abort(self, names: Sequence[str]) -> None: ...
