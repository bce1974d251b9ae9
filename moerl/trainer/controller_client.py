"""The trainer's side of the control socket: one request, one reply, with a deadline.

Frames of a request are [token, name, message], of a reply [name, message].  A request is repeated
under its name until it is answered, since a controller may die and be restarted at the same
endpoint; a late reply to an earlier name is dropped.  A request that is not answered in time is an
error.  The training loop and the publishing thread have separate clients (ZeroMQ sockets are not
shared between threads).
"""

from __future__ import annotations

import secrets
import time
from typing import TypeVar

import zmq

from moerl.errors import ProtocolError, TrainerError
from moerl.messages import Message, Refused
from moerl.serialization import decode, encode

Reply = TypeVar("Reply")

_REPEAT_S = 2.0


class ControllerClient:
    """Talks to the controller at `endpoint` (tcp://HOST:PORT)."""

    def __init__(self, endpoint: str, token: str, *, timeout_s: float) -> None:
        """timeout_s: longest wait for a reply, unless a call sets its own."""
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self._token = token.encode()
        self._name, self._last_request = secrets.token_bytes(8), 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(endpoint)

    def request(self, message: Message, timeout_s: float | None = None) -> Message:
        """Send and wait.  Raises TrainerError when refused, ProtocolError when late or unknown."""
        reply = decode(self.request_encoded(message, timeout_s))
        if isinstance(reply, Refused):
            raise TrainerError(f"{type(message).__name__} was refused: {reply.cause}")
        return reply

    def request_encoded(self, message: Message, timeout_s: float | None = None) -> bytes:
        """The undecoded reply, also a Refused: for a plan that is passed on to other ranks."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        self._last_request += 1
        name, data = self._name + self._last_request.to_bytes(8, "big"), encode(message)
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._socket.send_multipart([self._token, name, data])
            answer = self._receive(name, min(left_s, _REPEAT_S))
            if answer is None:
                continue
            return answer
        self.close()
        raise ProtocolError(
            f"the controller at {self.endpoint} did not answer {type(message).__name__} "
            f"in {wait_s:g} s"
        )

    def _receive(self, name: bytes, wait_s: float) -> bytes | None:
        """The reply to the request of this name; None when it is late."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            if self._socket.poll(max(1, int(left_s * 1000))):
                replied, answer = self._socket.recv_multipart()
                if replied == name:
                    return answer
        return None

    def expect(
        self, message: Message, reply_type: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """`request`, and the reply must be of one type.  Raises ProtocolError otherwise."""
        reply = self.request(message, timeout_s)
        if not isinstance(reply, reply_type):
            raise ProtocolError(
                f"{type(message).__name__} was answered with {type(reply).__name__}, "
                f"want {reply_type.__name__}"
            )
        return reply

    def close(self) -> None:
        self._socket.close()
