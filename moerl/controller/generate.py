"""One engine call: send the next request of each rollout, add its reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from moerl.config.schema import SamplingConfig
from moerl.errors import RecordError
from moerl.types import GenerateRequest, ModelShape, SamplingParams, Segment

Replies = Sequence[Segment | RecordError]
EngineCall = Callable[[Sequence[GenerateRequest]], Awaitable[Replies]]


class Partial(Protocol):
    """A rollout or an episode that is being sampled."""

    def request(self) -> GenerateRequest: ...

    def add(self, segment: Segment) -> None:
        """Raises RecordError when the segment does not continue the rollout."""
        ...


async def generate(
    partials: Sequence[Partial], call: EngineCall
) -> tuple[Replies, dict[int, RecordError]]:
    """Returns the replies, and the errors of refused records by index."""
    replies = await call([partial.request() for partial in partials])
    refused: dict[int, RecordError] = {}
    for index, (partial, reply) in enumerate(zip(partials, replies, strict=True)):
        try:
            if isinstance(reply, RecordError):
                raise reply
            partial.add(reply)
        except RecordError as error:
            refused[index] = error
    return replies, refused


def sampling_params(config: SamplingConfig, model: ModelShape) -> SamplingParams:
    """Every parameter of a request, from the settings and the model's stop tokens."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_token_ids=model.eos_token_ids,
        ignore_eos=config.ignore_eos,
    )
