"""The line between rank 0 and the couriers of all trainer ranks, one per engine.

Rank 0 binds a socket per engine and asks; a courier thread on every rank (rank 0 too) answers.  The
training threads take no part, and engines do not wait for one another.  Every question has a number
that its answer repeats: an answer that comes after its deadline is dropped, never taken for
another's.

Frames of a question: [courier, number, message]; of an answer: [token, number, message].
Rejected: a process group for this (a rank that is late blocks the others, and a group cannot be
asked with a deadline).
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import zmq

from moerl.errors import MoerlError, TrainerError, TransportError
from moerl.sync.courier import Berth, Courier, FrozenShard, Moved
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)

_HELLO = b"hello"
_MAX_MESSAGE = 64 * 2**20  # bytes: read before its token is, and 8 bytes per bucket at most
_LAST_WORDS_MS = 5000  # that a closed line may take to pass on what it was told


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send all of one frozen version."""

    version: PolicyVersion
    berths: dict[int, Berth]  # by engine rank
    timeout_s: float


class Resend(msgspec.Struct, frozen=True, tag=True):
    """Send some buckets once more."""

    buckets: dict[int, tuple[int, ...]]  # by engine rank
    timeout_s: float


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The session ended badly: its staging buffers are gone."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The engine left the run: nothing is sent to it any more."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    moved: dict[int, Moved]  # by engine rank


class Broken(msgspec.Struct, frozen=True, tag=True):
    """This rank could not send."""

    cause: str


Question = Send | Resend | Drop | Leave
Answer = Sent | Broken
_QUESTION = msgspec.msgpack.Decoder(Question)
_ANSWER = msgspec.msgpack.Decoder(Answer)


class Line:
    """Rank 0's end of the line of one engine; used by one thread after `wait_for_couriers`."""

    def __init__(self, address: str, token: str, world_size: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        self.endpoint = f"tcp://{address}:{self._socket.bind_to_random_port(f'tcp://{address}')}"
        self._token, self._world_size = token.encode(), world_size
        self._couriers: dict[int, bytes] = {}
        self._number = 0

    def wait_for_couriers(self, deadline: float) -> None:
        """Every rank has said hello.  Raises TrainerError when one is late."""
        while len(self._couriers) < self._world_size:
            frames = self._receive(deadline)
            if frames is None:
                missing = sorted(set(range(self._world_size)) - self._couriers.keys())
                raise TrainerError(f"the couriers of ranks {missing} did not say hello")
            identity, word, rank = frames
            if word == _HELLO:
                self._couriers[int(rank)] = identity

    def ask(self, questions: Mapping[int, Question], deadline: float) -> dict[int, Sent]:
        """One question per rank, asked at once.  Raises TransportError: late, or one is broken."""
        self._number += 1
        number = str(self._number).encode()
        for rank, question in questions.items():
            body = msgspec.msgpack.encode(question)
            self._socket.send_multipart([self._couriers[rank], number, body])
        ranks = {self._couriers[rank]: rank for rank in questions}
        answers: dict[int, Sent] = {}
        while len(answers) < len(questions):
            frames = self._receive(deadline)
            if frames is None:
                late = sorted(questions.keys() - answers.keys())
                raise TransportError("deadline", f"trainer ranks {late} did not send in time")
            identity, word, body = frames
            if word != number or identity not in ranks:
                continue  # an answer to a question that was given up
            answer = _ANSWER.decode(body)
            if isinstance(answer, Broken):
                raise TransportError("peer", f"trainer rank {ranks[identity]}: {answer.cause}")
            answers[ranks[identity]] = answer
        return answers

    def tell(self, message: Drop | Leave) -> None:
        """To all ranks, without waiting."""
        body = msgspec.msgpack.encode(message)
        for identity in self._couriers.values():
            self._socket.send_multipart([identity, b"0", body])

    def close(self) -> None:
        self._socket.close(_LAST_WORDS_MS)

    def _receive(self, deadline: float) -> tuple[bytes, bytes, bytes] | None:
        """(courier, number, body) of the next message with the right token, or None when late."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.poll(int(left_s * 1000) + 1):
                return None
            frames = self._socket.recv_multipart()
            if len(frames) == 4 and hmac.compare_digest(frames[1], self._token):
                return frames[0], frames[2], frames[3]


@dataclass(slots=True, eq=False)
class Offer:
    """The frozen shard as couriers see it: `freeze` is told by the training thread."""

    shard: FrozenShard
    changed: threading.Condition

    def wait_for(self, version: PolicyVersion, timeout_s: float) -> None:
        """Raises TransportError when the rank does not freeze that version in time."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.shard.version == version, timeout_s):
                raise TransportError(
                    "deadline", f"version {version} is not frozen, {self.shard.version} is"
                )


class CourierThread(threading.Thread):
    """Answers the line of one engine on one rank, until the engine leaves."""

    def __init__(self, endpoint: str, token: str, rank: int, courier: Courier, offer: Offer):
        super().__init__(name=f"courier-{endpoint}", daemon=True)
        self._token, self._rank = token.encode(), rank
        self._courier, self._offer = courier, offer
        self._endpoint = endpoint

    def run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._endpoint)
        socket.send_multipart([self._token, _HELLO, str(self._rank).encode()])
        while True:
            number, body = socket.recv_multipart()
            question = _QUESTION.decode(body)
            if isinstance(question, Leave):
                self._courier.drop()
                socket.close()
                return
            answer = self._answer(question)
            if answer is not None:
                socket.send_multipart([self._token, number, msgspec.msgpack.encode(answer)])

    def _answer(self, question: Send | Resend | Drop) -> Answer | None:
        try:
            match question:
                case Send():
                    deadline = time.monotonic() + question.timeout_s
                    self._offer.wait_for(question.version, question.timeout_s)
                    return Sent(self._courier.send(question.berths, deadline))
                case Resend():
                    deadline = time.monotonic() + question.timeout_s
                    return Sent(self._courier.resend(question.buckets, deadline))
                case Drop():
                    self._courier.drop()
                    return None
        except Exception as error:
            log.warning("a bucket could not be sent", exc_info=not isinstance(error, MoerlError))
            self._courier.drop()
            return Broken(f"{type(error).__name__}: {error}")
