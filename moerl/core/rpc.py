"""Requests and replies between the processes of a run: one ZeroMQ channel with keys of the run.

Legend: a client asks, a server answers.  Client and server hold the run's `Keys`.

- Security is ZeroMQ's CURVE.  A server admits one client key (ZAP) and a client trusts one server
  key; anyone else is refused in the handshake, and traffic is encrypted.
- A message is cut into parts, each of which is one ZeroMQ message of one frame of at most 1 MiB.
  ZeroMQ applies its size limit to a frame before the handshake is over, so a stranger costs at most
  that, for at most `_HANDSHAKE_MS`.
- A client repeats a request under its number until it is answered, because a server may die and be
  restarted at the same endpoint.  A server does not start a request twice while it is in progress,
  keeps the last answer to each client for repeats, and ignores requests older than the last.
- A client drops replies to earlier requests.  It never blocks in a send: nothing is queued for a
  server that is not connected, and a repeat is sent only when the message before has left.

A frame is a header (client, number, part, parts) and a part of a message of
`moerl.core.serialization`.
A client and its socket belong to one thread.  A server runs in one event loop.

Rejected: multipart messages (ZeroMQ bounds their frames, not their number), ZeroMQ's queues for
servers that are away (a send blocks when they are full), pickle.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio
from zmq.utils import z85

from moerl.core.atomic import atomic_write
from moerl.core.errors import MoerlError, ProtocolError, TrainerError, cause_of
from moerl.core.messages import Message, Plan, Refused, SamePlan
from moerl.core.serialization import decode, encode

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

_HEADER = struct.Struct("<8sQII")  # client, number of its request, part, parts
_MAX_FRAME = 2**20  # bytes, of CURVE's own 33 too
_PART = _MAX_FRAME - 1024  # bytes of a message in one frame
_MAX_PARTS = 2048
_QUEUED = 16  # frames between a socket and its connection
_HANDSHAKE_MS = 5000  # longest handshake
_REPEAT_S = 2.0
_LINGER_MS = 5000  # longest time that a closed client may take to deliver its last request
_KEPT_CALLERS = 1024  # clients whose last answer is kept; a publish session is one
_KEPT_BYTES = 8 * 2**20  # longer answers (plans) are built again, with equal content
_LONG = 2**16  # bytes; longer messages are decoded in a thread
_MAX_SOCKETS = 16384  # of a process: a trainer's rank 0 has one per engine and rank
_PORTS = (20000, 32000)  # below the ports of outgoing connections: a port stays free in a restart


# --- keys -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Keys:
    """The secret keys of all servers and of all clients of a run, 40 characters of Z85 each."""

    server: bytes = field(repr=False)
    client: bytes = field(repr=False)

    @staticmethod
    def make() -> Keys:
        return Keys(zmq.curve_keypair()[1], zmq.curve_keypair()[1])

    def write(self, path: Path) -> None:
        """Readable by this user only; the folder is private."""
        atomic_write(path, self.server + b"\n" + self.client + b"\n", mode=0o600)

    @staticmethod
    def read(path: Path) -> Keys:
        """Raises ProtocolError when the file is missing or damaged."""
        try:
            server, client = path.read_bytes().split()
            for key in (server, client):
                zmq.curve_public(key)
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise ProtocolError(f"{path} holds no keys of a run: {cause_of(error)}") from None
        return Keys(server, client)


_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}  # by process: a fork makes its own
_contexts_lock = threading.Lock()


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The ZeroMQ context of this process, whose ZAP thread admits the clients of its servers."""
    with _contexts_lock:
        context = _contexts.get(os.getpid())
        if context is None:
            context = _contexts[os.getpid()] = zmq.Context()
            context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
            admission = context.socket(zmq.REP)
            admission.bind("inproc://zeromq.zap.01")
            threading.Thread(target=_admit, args=(admission,), name="zap", daemon=True).start()
    return context


def _admit(admission: zmq.Socket[bytes]) -> None:
    """Answer ZAP requests: the domain of a server is the public key of its clients."""
    while True:
        version, number, domain, _address, _identity, mechanism, *rest = admission.recv_multipart()
        key = z85.encode(rest[0]) if mechanism == b"CURVE" and rest else b""
        status = b"200" if hmac.compare_digest(key, domain) else b"400"
        admission.send_multipart([version, number, status, b"", b"", b""])


def _server_socket(keys: Keys) -> zmq.Socket[bytes]:
    socket = _context().socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_secretkey = keys.server
    socket.zap_domain = zmq.curve_public(keys.client)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no ZAP thread: nobody is admitted
    socket.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops messages above it: no long reply would arrive
    return _bounded(socket)


def _client_socket(keys: Keys, endpoint: str) -> zmq.Socket[bytes]:
    socket = _context().socket(zmq.DEALER)
    socket.curve_serverkey = zmq.curve_public(keys.server)
    socket.curve_publickey = zmq.curve_public(keys.client)
    socket.curve_secretkey = keys.client
    socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue for a server that is not connected
    socket.setsockopt(zmq.SNDHWM, _QUEUED)
    _bounded(socket).connect(endpoint)
    return socket


def _bounded(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.RCVHWM, _QUEUED)
    return socket


# --- frames ---------------------------------------------------------------------------------------
def _cut(client: bytes, number: int, data: bytes) -> list[bytes]:
    """The frames of a message."""
    count, view = max(1, -(-len(data) // _PART)), memoryview(data)
    if count > _MAX_PARTS:
        raise ProtocolError(f"a message of {len(data)} bytes; {_MAX_PARTS * _PART} at most")
    return [
        _HEADER.pack(client, number, part, count) + view[part * _PART : (part + 1) * _PART]
        for part in range(count)
    ]


@dataclass(slots=True)
class _Parts:
    """The parts of one message that have arrived."""

    number: int = -1
    found: dict[int, bytes] = field(default_factory=dict)

    def add(self, part: int, parts: int, frame: bytes) -> bytes | None:
        """The message, once it is whole."""
        self.found[part] = frame[_HEADER.size :]
        if len(self.found) < parts:
            return None
        found, self.found = self.found, {}
        return b"".join(found[part] for part in sorted(found))


def _header(frame: bytes) -> tuple[bytes, int, int, int] | None:
    """(client, number, part, parts); None when it is none of ours."""
    if len(frame) < _HEADER.size:
        return None
    client, number, part, parts = _HEADER.unpack_from(frame)
    return (client, number, part, parts) if part < parts <= _MAX_PARTS else None


# --- the server -----------------------------------------------------------------------------------
@dataclass(slots=True)
class _Caller:
    """A client's newest request."""

    connection: bytes = b""  # that it came by last: a reconnect has a new one
    parts: _Parts = field(default_factory=_Parts)
    is_running: bool = False
    answer: list[bytes] = field(default_factory=list)  # frames; [] = none, or too long to keep


class RpcServer:
    """Bound at construction, in any thread; `serve` runs in one event loop until cancelled."""

    def __init__(
        self, endpoint: str, keys: Keys, handle: Callable[[Message], Awaitable[Message]]
    ) -> None:
        """Listen at an endpoint: tcp://HOST:PORT, tcp://HOST:* for any free port, or ipc://PATH.

        handle: its error is sent as Refused.  Requests of different clients are handled at once.
        """
        self._socket = _server_socket(keys)
        self._handle = handle
        self._callers: OrderedDict[bytes, _Caller] = OrderedDict()  # by client, oldest first
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = _bind(self._socket, endpoint)

    async def serve(self) -> None:
        socket = zmq.asyncio.Socket.from_socket(self._socket)
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 2:  # more frames: not of this channel
                    self._take(socket, *frames)
        finally:
            for task in self._tasks:
                task.cancel()

    def close(self) -> None:
        self._socket.close()

    def _take(self, socket: zmq.asyncio.Socket, connection: bytes, frame: bytes) -> None:
        header = _header(frame)
        if header is None:
            return
        client, number, part, parts = header
        caller = self._caller(client)
        if number < caller.parts.number:  # a late copy of a request that was answered
            return
        if number > caller.parts.number:
            caller = self._callers[client] = _Caller(parts=_Parts(number))
        caller.connection = connection
        if caller.is_running:
            return
        if caller.answer:
            if part == 0:
                self._start(self._send(socket, caller, caller.answer))
            return
        data = caller.parts.add(part, parts, frame)
        if data is not None:
            caller.is_running = True
            self._start(self._answer(socket, client, caller, data))

    def _caller(self, client: bytes) -> _Caller:
        caller = self._callers.setdefault(client, _Caller())
        self._callers.move_to_end(client)
        if len(self._callers) > _KEPT_CALLERS:
            self._callers.popitem(last=False)
        return caller

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(
        self, socket: zmq.asyncio.Socket, client: bytes, caller: _Caller, data: bytes
    ) -> None:
        try:
            reply = await self._reply(data)
            number = caller.parts.number
            # encoding a plan of thousands of rollouts would block the loop for tens of milliseconds
            if isinstance(reply, Plan | SamePlan):
                frames = await asyncio.to_thread(_encoded, client, number, reply)
            else:
                frames = _encoded(client, number, reply)
            if sum(map(len, frames)) <= _KEPT_BYTES:
                caller.answer = frames
        finally:
            caller.is_running = False
        if self._callers.get(client) is caller:  # else it has given this request up
            await self._send(socket, caller, frames)

    async def _reply(self, data: bytes) -> Message:
        try:
            long = len(data) > _LONG
            message = await asyncio.to_thread(decode, data) if long else decode(data)
            return await self._handle(message)
        except MoerlError as error:
            return Refused(cause_of(error))
        except Exception as error:
            log.exception("a request could not be served")
            return Refused(cause_of(error))

    async def _send(self, socket: zmq.asyncio.Socket, caller: _Caller, frames: list[bytes]) -> None:
        for frame in frames:
            await socket.send_multipart([caller.connection, frame])
            if len(frames) > 1:
                await asyncio.sleep(0)  # other requests are taken between the parts of a plan


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    host = endpoint.removesuffix(":*")
    if host == endpoint:
        socket.bind(endpoint)
        return endpoint
    return f"{host}:{socket.bind_to_random_port(host, *_PORTS, 1000)}"


def _encoded(client: bytes, number: int, reply: Message) -> list[bytes]:
    """The frames of a reply; of a refusal when it cannot be encoded: the client must not wait."""
    try:
        return _cut(client, number, encode(reply))
    except Exception as error:
        log.exception("a reply could not be encoded")
        refused = Refused(f"{type(reply).__name__} could not be encoded: {cause_of(error)}")
        return _cut(client, number, encode(refused))


# --- the client -----------------------------------------------------------------------------------
class RpcClient:
    """Asks the server at `endpoint`, one request at a time."""

    def __init__(
        self, endpoint: str, keys: Keys, *, timeout_s: float = 60.0, peer: str = "the controller"
    ) -> None:
        """A client of an endpoint.  peer: name for errors.

        timeout_s: longest wait for a reply, unless a call sets its own.
        """
        self.endpoint, self.timeout_s, self._peer = endpoint, timeout_s, peer
        self.socket = _client_socket(keys, endpoint)
        self._client = secrets.token_bytes(8)
        self._parts = _Parts(0)  # of the reply to the newest request
        self._frames: list[bytes] = []  # of the newest request
        self._unsent: deque[bytes] = deque()
        self._repeat_at = 0.0  # monotonic

    def request(self, message: Message, timeout_s: float | None = None) -> Message:
        """Send and wait.  Raises TrainerError when refused, ProtocolError when late or unknown."""
        reply = decode(self.request_encoded(message, timeout_s))
        if isinstance(reply, Refused):
            raise TrainerError(f"{type(message).__name__} was refused: {reply.cause}")
        return reply

    def request_encoded(self, message: Message, timeout_s: float | None = None) -> bytes:
        """The undecoded reply, also a Refused: for a plan that is passed on to other ranks."""
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        for _, data in request_all({0: (self, message)}, time.monotonic() + wait_s):
            return data
        self.close()
        raise ProtocolError(
            f"{self._peer} at {self.endpoint} did not answer {type(message).__name__} "
            f"in {wait_s:g} s"
        )

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

    def post(self, message: Message) -> None:
        """Send once, if the server is connected, without waiting for the reply."""
        self.begin(message)
        self._send_due()

    def close(self) -> None:
        self.socket.close(_LINGER_MS)

    # --- steps of a request, for callers that wait on several sockets -----------------------------
    def begin(self, message: Message) -> None:
        """Begin the next request; replies to the request before are dropped from here on."""
        number = self._parts.number + 1
        self._parts = _Parts(number)
        self._frames = _cut(self._client, number, encode(message))
        self._unsent = deque(self._frames)
        self._repeat_at = time.monotonic() + _REPEAT_S

    def advance(self) -> bytes | None:
        """Send due frames and read arrived frames; returns the reply, once it is whole."""
        if not self._unsent and time.monotonic() >= self._repeat_at:
            self._unsent.extend(self._frames)
        self._send_due()
        return self._receive()

    @property
    def events(self) -> int:
        """The events to wait for before the next `advance`."""
        return zmq.POLLIN | zmq.POLLOUT if self._unsent else zmq.POLLIN

    @property
    def wait_s(self) -> float:
        """Longest wait before the next `advance`."""
        return _REPEAT_S if self._unsent else max(self._repeat_at - time.monotonic(), 0.0)

    def _send_due(self) -> None:
        while self._unsent:
            try:
                self.socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:  # not connected, or as much in transit as the connection takes
                return
            self._unsent.popleft()
            self._repeat_at = time.monotonic() + _REPEAT_S

    def _receive(self) -> bytes | None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            header = _header(frames[0]) if len(frames) == 1 else None
            if header is None or header[:2] != (self._client, self._parts.number):
                continue
            self._repeat_at = time.monotonic() + _REPEAT_S  # a long reply is on its way
            if (data := self._parts.add(*header[2:], frames[0])) is not None:
                return data


def request_all(
    requests: Mapping[int, tuple[RpcClient, Message]], deadline: float
) -> Iterator[tuple[int, bytes]]:
    """Send one request to each server, all at once; the undecoded replies as they come in time."""
    waiting = {key: client for key, (client, _) in requests.items()}
    for client, message in requests.values():
        client.begin(message)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for key, client in list(waiting.items()):
            if (data := client.advance()) is not None:
                del waiting[key]
                yield key, data
        if waiting:
            wait_s = min(left_s, *(client.wait_s for client in waiting.values()))
            sockets = [(client.socket, client.events) for client in waiting.values()]
            zmq.zmq_poll(sockets, 1 + int(1000 * wait_s))


async def ask(endpoint: str, keys: Keys, message: Message) -> Message:
    """One request over a connection of its own, in an event loop; the caller sets the deadline."""
    client = RpcClient(endpoint, keys)
    try:
        client.begin(message)
        poller = zmq.asyncio.Poller()
        while (data := client.advance()) is None:
            poller.register(client.socket, client.events)
            await poller.poll(1 + int(1000 * client.wait_s))
        return decode(data)
    finally:
        client.close()
