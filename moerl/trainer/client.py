"""The trainer's side of the control socket: one request, one reply, with a deadline.

Frames of a request are [token, message], of a reply [message].  A request that is not answered in
time is an error and the socket is not used again: a late reply must never answer a later question.
The training loop and the publishing thread each hold a client of their own (ZeroMQ sockets are not
shared between threads).
"""

from __future__ import annotations

from typing import TypeVar

import zmq

from moerl.errors import ProtocolError, TrainerError
from moerl.protocols import Message, Refused, decode, encode

Reply = TypeVar("Reply")


class ControllerClient:
    """Talks to the controller at `endpoint` (tcp://HOST:PORT)."""

    def __init__(self, endpoint: str, token: str, *, timeout_s: float) -> None:
        """timeout_s: longest wait for a reply, unless the call says otherwise."""
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self._token = token.encode()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(endpoint)

    def ask(self, message: Message, timeout_s: float | None = None) -> Message:
        """Send and wait.  Raises TrainerError when refused, ProtocolError when late or unknown."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        self._socket.send_multipart([self._token, encode(message)])
        if not self._socket.poll(int(wait_s * 1000)):
            self.close()
            raise ProtocolError(
                f"the controller at {self.endpoint} did not answer {type(message).__name__} "
                f"in {wait_s:g} s"
            )
        reply = decode(self._socket.recv_multipart()[-1])
        if isinstance(reply, Refused):
            raise TrainerError(f"{type(message).__name__} was refused: {reply.cause}")
        return reply

    def expect(
        self, message: Message, reply_type: type[Reply], timeout_s: float | None = None
    ) -> Reply:
        """`ask`, and the reply must be of one type.  Raises ProtocolError otherwise."""
        reply = self.ask(message, timeout_s)
        if not isinstance(reply, reply_type):
            raise ProtocolError(
                f"{type(message).__name__} was answered with {type(reply).__name__}, "
                f"want {reply_type.__name__}"
            )
        return reply

    def close(self) -> None:
        self._socket.close()
