"""The key-value store in which the ranks of one job meet, and the rounds of its torchrun agents.

It takes the place of torch's TCPStore, with three differences: every caller proves the token
first, it listens on one address, and nothing that it holds is ever unpickled by us.

A round forms when every slot (node of the job) wants to join.  A new round drops the keys of the
round before, whose ranks have all ended, because an agent ends its ranks before it joins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from moerl.core.errors import TransportError
from moerl.distributed.token_server import Channel, TokenServer

_ASK, _ANSWER = 0, 1  # kinds of frame
_SILENT_S = 15.0  # a slot that waits asks several times a second; later its agent is taken for dead
MAX_WAIT_S = 10.0  # of one request; callers ask again


class Write(msgspec.Struct, tag=True, array_like=True, frozen=True):
    values: dict[str, bytes]


class Read(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The values of all keys once all exist, else None after wait_s."""

    keys: list[str]
    wait_s: float


class Add(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The sum of a counter, which is kept as decimal text like TCPStore's."""

    key: str
    amount: int


class Exchange(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Compare and set; the value afterwards."""

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, tag=True, array_like=True, frozen=True):
    key: str
    value: bytes


class Delete(msgspec.Struct, tag=True, array_like=True, frozen=True):
    key: str


class Count(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class JoinRound(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Number of the round that this attempt of a slot belongs to; 0: not yet, ask again."""

    slot: int
    attempt: str


class WaitingSlots(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """How many slots wait for the next round."""

    number: int


Request = Write | Read | Add | Exchange | Append | Delete | Count | JoinRound | WaitingSlots
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def ask(channel: Channel, request: Request, deadline: float) -> object:
    """One request and its answer.  Raises TransportError."""
    channel.send(_ASK, msgspec.msgpack.encode(request), deadline)
    kind, answer = channel.receive(deadline)
    if kind != _ANSWER:
        raise TransportError("peer", f"frame kind {kind} is not an answer of the store")
    return msgspec.msgpack.decode(answer)


class Rounds:
    """Which attempt of which slot is in the current round.  Not thread-safe."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.number = 0  # of the current round
        self._slots, self._clock = slots, clock
        self._members: dict[int, str] = {}  # attempt by slot
        self._waiting: dict[int, tuple[str, float]] = {}  # attempt and last request by slot

    def join(self, slot: int, attempt: str) -> int:
        """Number of the round of this attempt; 0 while others are missing."""
        if not 0 <= slot < self._slots:
            raise TransportError("refused", f"slot {slot} of a job of {self._slots}")
        if self._members.get(slot) != attempt:
            self._waiting[slot] = (attempt, self._clock())
            self._form()
        return self.number if self._members.get(slot) == attempt else 0

    def behind(self, number: int) -> int:
        """How many slots wait for a round after `number`."""
        self._drop_silent()
        return len(self._waiting) if number == self.number else self._slots

    def _form(self) -> None:
        self._drop_silent()
        if len(self._waiting) == self._slots:
            self._members = {slot: attempt for slot, (attempt, _) in self._waiting.items()}
            self._waiting.clear()
            self.number += 1

    def _drop_silent(self) -> None:
        oldest = self._clock() - _SILENT_S
        self._waiting = {s: (a, at) for s, (a, at) in self._waiting.items() if at >= oldest}


class StoreServer:
    """Serves one job; `server_address` tells callers where and with which token."""

    def __init__(self, address: str, slots: int = 1, port: int = 0, token: str = "") -> None:
        """port and token as of `TokenServer`.  Raises TransportError when the port is taken."""
        self._values: dict[str, bytes] = {}
        self._rounds = Rounds(slots)
        self._changed = threading.Condition()
        self._server = TokenServer(address, self._serve, port, token)
        self.server_address = self._server.server_address

    def close(self) -> None:
        self._server.close()

    def _serve(self, channel: Channel) -> None:
        while True:
            kind, payload = channel.receive(None)
            if kind != _ASK:
                raise TransportError("refused", f"frame kind {kind} is not a request to the store")
            try:
                answer = self._answer(_REQUEST.decode(payload))
            except (msgspec.MsgspecError, ValueError) as error:
                raise TransportError("refused", f"a request to the store: {error}") from error
            channel.send(_ANSWER, msgspec.msgpack.encode(answer), time.monotonic() + MAX_WAIT_S)

    def _answer(self, request: Request) -> object:
        if isinstance(request, Read):
            return self._read(request.keys, min(request.wait_s, MAX_WAIT_S))
        if isinstance(request, JoinRound):
            return self._join(request)
        with self._changed:
            if isinstance(request, WaitingSlots):
                return self._rounds.behind(request.number)
            if isinstance(request, Delete):
                return self._values.pop(request.key, None) is not None
            if isinstance(request, Count):
                return len(self._values)
            answer = self._change(request)
            self._changed.notify_all()
            return answer

    def _read(self, keys: Sequence[str], wait_s: float) -> list[bytes] | None:
        with self._changed:
            there = self._changed.wait_for(lambda: self._has(keys), wait_s)
            return [self._values[key] for key in keys] if there else None

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _join(self, join: JoinRound) -> int:
        with self._changed:
            before = self._rounds.number
            number = self._rounds.join(join.slot, join.attempt)
            if self._rounds.number != before:
                self._values.clear()
            return number

    def _change(self, change: Write | Add | Exchange | Append) -> object:
        if isinstance(change, Write):
            self._values.update(change.values)
            return None
        if isinstance(change, Add):
            total = int(self._values.get(change.key, b"0")) + change.amount
            self._values[change.key] = str(total).encode()
            return total
        if isinstance(change, Append):
            self._values[change.key] = self._values.get(change.key, b"") + change.value
            return None
        return _exchange(self._values, change)


def _exchange(values: dict[str, bytes], exchange: Exchange) -> bytes:
    """As TCPStore: an absent key equals an empty expected value."""
    held = values.get(exchange.key)
    if held is None and exchange.expected:
        return exchange.expected
    if (held or b"") == exchange.expected:
        values[exchange.key] = held = exchange.desired
    return held or b""
