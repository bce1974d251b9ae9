"""The controller's server for the trainer: one ZeroMQ ROUTER on the private interface.

Frames of a request: [identity, token, name, message]; of a reply: [identity, name, message].  Each
request has its own task, so a publish is served while a plan is awaited.  A wrong token is answered
with Refused and changes nothing.

A trainer repeats a request under the same name until it is answered, because a controller may die
in between.  A request in progress is not started twice, and the answer goes to the identity that
asked last (a reconnect has a new identity).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from moerl.errors import MoerlError, cause_of
from moerl.messages import Message, Plan, Refused
from moerl.serialization import decode, encode

log = logging.getLogger(__name__)

_MAX_REQUEST = 256 * 2**20  # bytes; a request is read before its token is checked
_KEPT_ANSWERS = 64  # for requests repeated while their answer was in transit
_KEPT_BYTES = 65536  # longer answers (plans) are built again, with equal content


class TrainerServer:
    """Binds a free port of `address` at construction; `serve` runs until cancelled."""

    def __init__(
        self,
        address: str,
        token: str,
        handle: Callable[[Message], Awaitable[Message]],
        endpoint: str = "",
    ) -> None:
        """endpoint: of an earlier server of this run; empty = any free port of `address`."""
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        self._token, self._handle = token.encode(), handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[bytes, bytes] = {}  # name of a request -> identity to answer
        self._answers: OrderedDict[bytes, bytes] = OrderedDict()  # the last few, by name
        if endpoint:
            self._socket.bind(endpoint)
            self.endpoint = endpoint
        else:
            # below the range of outgoing connections, so that the port stays free during a restart
            port = self._socket.bind_to_random_port(f"tcp://{address}", 20000, 32000, 1000)
            self.endpoint = f"tcp://{address}:{port}"

    async def serve(self) -> None:
        while True:
            identity, *rest = await self._socket.recv_multipart()
            if len(rest) != 3 or not hmac.compare_digest(rest[0], self._token):
                refused = encode(Refused("the run's token is missing or wrong"))
                await self._socket.send_multipart([identity, rest[1] if rest[1:] else b"", refused])
                continue
            _, name, data = rest
            if name in self._answers:
                await self._socket.send_multipart([identity, name, self._answers[name]])
            elif name in self._asking:
                self._asking[name] = identity
            else:
                self._asking[name] = identity
                task = asyncio.get_running_loop().create_task(self._answer(name, data))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _answer(self, name: bytes, data: bytes) -> None:
        reply = await self._reply(data)
        # Encoding a plan of thousands of rollouts would block the loop for tens of milliseconds.
        is_long = isinstance(reply, Plan)
        answer = await asyncio.to_thread(encode, reply) if is_long else encode(reply)
        if len(answer) <= _KEPT_BYTES:
            self._answers[name] = answer
        if len(self._answers) > _KEPT_ANSWERS:
            self._answers.popitem(last=False)
        await self._socket.send_multipart([self._asking.pop(name), name, answer])

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
