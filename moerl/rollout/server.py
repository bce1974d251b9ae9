"""The controller's door for the trainer: one ZeroMQ ROUTER on the private interface.

Frames of a request: [identity, token, message]; of a reply: [identity, message].  Each request is
answered by a task of its own, so a publish is served while a plan is awaited.  A wrong token is
answered with Refused and changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from moerl.errors import MoerlError
from moerl.protocols import Message, Refused, decode, encode
from moerl.rollout.controller import cause_of

log = logging.getLogger(__name__)


class TrainerServer:
    """Binds a free port of `address` at construction; `serve` runs until cancelled."""

    def __init__(
        self, address: str, token: str, handle: Callable[[Message], Awaitable[Message]]
    ) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._token, self._handle = token.encode(), handle
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = f"tcp://{address}:{self._socket.bind_to_random_port(f'tcp://{address}')}"

    async def serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            task = asyncio.get_running_loop().create_task(self._answer(frames))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, frames: list[bytes]) -> None:
        identity, *rest = frames
        reply: Message
        if len(rest) != 2 or not hmac.compare_digest(rest[0], self._token):
            reply = Refused("the run's token is missing or wrong")
        else:
            reply = await self._reply(rest[1])
        await self._socket.send_multipart([identity, encode(reply)])

    async def _reply(self, data: bytes) -> Message:
        try:
            return await self._handle(decode(data))
        except asyncio.CancelledError:
            raise
        except MoerlError as error:
            return Refused(cause_of(error))
        except Exception as error:
            log.exception("a trainer message could not be served")
            return Refused(cause_of(error))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._socket.close()
