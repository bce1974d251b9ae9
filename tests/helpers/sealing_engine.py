"""A stub engine that seals its log-probabilities as a blob, as engine hosts do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.types import GenerateRequest, LogprobBlob, PolicyVersion, Segment
from moerl.records import BlobStore
from tests.helpers.chat_tokenizer import SIZE
from tests.unit.test_controller import StubEngine


class SealingEngine(StubEngine):
    """Samples four words, other ones with each call unless it is `greedy`."""

    def __init__(self, store: BlobStore, *, greedy: bool = False, first_call: int = 0) -> None:
        super().__init__()
        self.store, self._greedy = store, greedy
        self._calls, self._one = itertools.count(first_call), asyncio.Lock()
        self.hangs_at = 0  # replies after which it hangs; 0 = never
        self.cuts: set[int] = set()  # replies that an update cuts, from 1 on

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:  # each has its reply when it is done
            await super().submit([request])

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Segment | RecordError]:
        async with self._one:
            if self.hangs_at and len(self.requests) == self.hangs_at:
                self.open.clear()
            if len(self.requests) + 1 in self.cuts:
                self.interrupted.set()
            try:
                return await super().generate(requests)
            finally:
                self.interrupted.clear()

    def _reply(self, request: GenerateRequest, version: PolicyVersion) -> Segment | RecordError:
        reply = super()._reply(request, version)
        if isinstance(reply, RecordError) or not len(reply.output_ids):
            return reply
        count, call = len(reply.output_ids), 0 if self._greedy else next(self._calls)
        words = np.random.default_rng(call).integers(SIZE // 2, SIZE, count).astype(np.int32)
        (ref,) = self.store.seal(request.name, [reply.logprobs])
        return replace(
            reply,
            output_ids=words,
            logprobs=np.zeros(0, np.float32),
            sealed_logprobs=LogprobBlob(ref, 0, count),
        )
