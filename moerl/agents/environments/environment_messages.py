"""Messages between the controller's process and a worker with environments: lengths and msgpack.

Both ends decode into fixed types: nothing that a worker sends runs in the controller's process.
"""

from __future__ import annotations

import asyncio

import msgspec

from moerl.agents.chat_messages import Json
from moerl.agents.environments.episode_environment import (
    EpisodeEnd,
    Observation,
    PolicyAnswer,
    StartFields,
)
from moerl.core.errors import MoerlError
from moerl.runtime.frames import HEAD, size_in


class WorkerGone(MoerlError):
    """The other end is gone, or sent bytes that are no message."""


class SetUp(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker; it answers with a `WorkerReply` of serial 0."""

    environment: str
    options: Json
    tools: list[Json]  # schemas of the tools of every episode
    reply_bytes: int


class Reset(msgspec.Struct, frozen=True, tag=True):
    serial: int
    start: StartFields


class Step(msgspec.Struct, frozen=True, tag=True):
    serial: int
    episode: str
    answer: PolicyAnswer


class Close(msgspec.Struct, frozen=True, tag=True):
    serial: int
    episode: str


class ToolResult(msgspec.Struct, frozen=True, tag=True):
    """To the call of the same serial."""

    serial: int
    text: str


class WorkerReply(msgspec.Struct, frozen=True, tag=True):
    """To the request of the same serial.  failure continues "has an environment that ..."."""

    serial: int
    observation: Observation | None = None
    ended: EpisodeEnd | None = None
    failure: str = ""


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    """An environment calls a tool of its episode; serial: the worker's own."""

    serial: int
    episode: str
    name: str
    arguments: str


class Blocked(msgspec.Struct, frozen=True, tag=True):
    """The environment of an episode has kept the worker's loop busy; empty: the loop runs."""

    episode: str
    seconds: float = 0.0


ToWorker = SetUp | Reset | Step | Close | ToolResult
FromWorker = WorkerReply | ToolCall | Blocked
encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


async def read_frame(reader: asyncio.StreamReader, most: int) -> bytes:
    """The next message.  Raises WorkerGone at the end, and above `most` bytes."""
    try:
        size = size_in(await reader.readexactly(HEAD))
        if size > most:
            raise WorkerGone(f"sent a message of {size} bytes; {most} are allowed")
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        raise WorkerGone("closed its connection") from None
