"""torchrun's rendezvous without an open store: `--rdzv-backend moerl`.

torch's own (c10d, also `--standalone`) keeps its state as pickles in a TCPStore that listens on all
interfaces and asks callers for nothing.  Here the agent of slot 0 serves `store_server`, on one
address, behind a token; agents and ranks find it by a file that its owner alone can read.

    --rdzv-endpoint   that file; empty for a job of one node
    --rdzv-conf       slot=N (index of this node), port=P (of slot 0; 0 = any), join_timeout=S
    --local-addr      the address of this node, on which slot 0 listens

The set of nodes is fixed: a round forms when all have joined.  An agent whose ranks failed joins
again; the others see it, end their ranks and join too.  A lost connection to slot 0 ends nothing:
the ranks' own time limits decide, and an agent that finds slot 0 restarted joins again.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import msgspec
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError, TransportError
from moerl.distributed.store_server import JoinRound, Request, StoreServer, WaitingSlots, ask
from moerl.distributed.token_server import Channel, ServerAddress, open_channel
from moerl.distributed.token_store import TokenStore, store_variable

BACKEND = "moerl"
_JOIN_S = 600.0  # how long a node waits for the others, unless join_timeout
_ASK_S = 2.0  # limit of one request: torch's agent does not watch its ranks meanwhile
_PAUSE_S = 0.2  # between requests to join
_AWAY_S = 5.0  # until the next attempt, when slot 0 was not reached


@dataclass(frozen=True, slots=True)
class JobPlace:
    """This node's place in the job."""

    slot: int
    slots: int
    address: str
    port: int  # that slot 0 listens on
    file: Path | None  # that names the store; None for one node


class MoerlRendezvous(RendezvousHandler):
    """One agent's membership; `store_server.Rounds` decides about rounds."""

    def __init__(self, place: JobPlace, run_id: str, join_s: float) -> None:
        """Raises TransportError when slot 0 cannot listen."""
        self._place, self._run_id, self._join_s = place, run_id, join_s
        self._server = self._serve() if place.slot == 0 else None
        self._number = 0  # of this agent's round
        self._channel: Channel | None = None
        self._address: ServerAddress | None = None  # of the store behind `_channel`
        self._closed, self._next_try = False, 0.0
        self._store: TokenStore | None = None  # torch keeps a wrapper only

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        attempt, deadline = secrets.token_hex(8), time.monotonic() + self._join_s
        while not (number := self._ask(JoinRound(self._place.slot, attempt))):
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{self._place.slots} nodes did not meet within {self._join_s:g} s"
                )
            time.sleep(_PAUSE_S)
        assert self._address is not None, "an answer has come from there"
        self._number = number
        os.environ |= store_variable(self._address, number)  # ranks inherit it
        self._store = TokenStore(self._address, timedelta(seconds=self._join_s))
        return RendezvousInfo(
            dist.PrefixStore(f"agents-{number}", self._store),
            self._place.slot,
            self._place.slots,
            RendezvousStoreInfo(self._address.host, self._address.port),
        )

    def num_nodes_waiting(self) -> int:
        """0 also while slot 0 cannot be reached."""
        return 0 if time.monotonic() < self._next_try else self._ask(WaitingSlots(self._number))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed = True
        self._close_channel()
        if self._server is not None:
            self._server.close()
            if self._place.file is not None:
                self._place.file.unlink(missing_ok=True)
        return True

    def _serve(self) -> StoreServer:
        place = self._place
        server = StoreServer(place.address, place.slots, place.port)
        if place.file is not None:
            text = json.dumps(msgspec.to_builtins(server.server_address))
            atomic_write(place.file, text, mode=0o600)
        return server

    def _ask(self, request: Request) -> int:
        """The store's answer; 0 when it cannot be reached."""
        deadline = time.monotonic() + _ASK_S
        try:
            if self._channel is None:
                self._address = self._find()
                self._channel = open_channel(self._address, deadline)
            return cast(int, ask(self._channel, request, deadline))
        except (TransportError, OSError, ValueError):
            self._close_channel()
            self._next_try = time.monotonic() + _AWAY_S
            return 0

    def _find(self) -> ServerAddress:
        """Raises OSError or ValueError (msgspec's) before slot 0 has written the file."""
        if self._server is not None:
            return self._server.server_address
        assert self._place.file is not None, "creator has checked"
        return msgspec.json.decode(self._place.file.read_bytes(), type=ServerAddress)

    def _close_channel(self) -> None:
        if self._channel is not None:
            with suppress(OSError):
                self._channel.close()
        self._channel = None


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The factory of torchrun's `--rdzv-backend moerl`.  Raises ConfigError, TransportError."""
    slot = params.get_as_int("slot", 0)
    port = params.get_as_int("port", 0)
    assert slot is not None, "it has a default"
    assert port is not None, "it has a default"
    if params.min_nodes != params.max_nodes:
        raise ConfigError("--nnodes", f"{params.min_nodes}:{params.max_nodes}", "one number")
    if params.max_nodes > 1 and not params.endpoint:
        raise ConfigError("--rdzv-endpoint", "", "a file that all nodes of the job see")
    place = JobPlace(
        slot=slot,
        slots=params.max_nodes,
        address=params.local_addr or "127.0.0.1",
        port=port,
        file=Path(params.endpoint) if params.endpoint else None,
    )
    return MoerlRendezvous(place, params.run_id, float(params.get("join_timeout", _JOIN_S)))


def register() -> None:
    rendezvous_handler_registry.register(BACKEND, create)


def creator() -> object:
    """Entry point of `torchrun.handlers`, so that torch's own torchrun knows the backend too."""
    return create
