"""The interface between a publish session and the transport of its bytes.

An engine rank opens a `Staging` buffer and passes its endpoint on in a control message; each
trainer rank connects a `Link` to it and puts bytes at offsets.  A put is one-sided for the caller:
threads of the Staging do the work of the receiving side (accept, receive, acknowledge), so a
session never waits for the program of a peer.

    engine rank                                  trainer rank
    staging = transport.open(num_bytes)
    staging.endpoint  --- control message --->   link = transport.connect(endpoint, deadline)
                                                 link.put(offset, bytes, deadline) ...
                                                 link.flush(deadline)
                      <-- control message ---    "flushed"
    staging.fetch(deadline)
    staging.buffer now holds the bytes

Deadlines are `time.monotonic()` seconds.  Every call ends by its deadline or raises TransportError;
after an error a Link is not used again.  A Staging whose session failed is closed and never reused:
a late sender then writes into memory that no process reads.  The death of either side is an error
and no hang, and a new engine is served without touching the links of the others.

Rejected: collectives (a broadcast has no endpoint and no retry), pickled tensors over HTTP.
Idea: the registered segments and one-sided writes of Mooncake's Transfer Engine.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from torch import Tensor

from moerl.core.errors import TransportError

T = TypeVar("T")


class Staging(Protocol):
    """The receiving end, owned by one engine rank."""

    endpoint: bytes  # small; only `Transport.connect` interprets it
    buffer: Tensor  # flat uint8 of the requested size

    def fetch(self, deadline: float) -> None:
        """Return once every byte that senders have flushed is in `buffer`.

        Raises TransportError.  Nothing to do where senders write into the buffer itself, or where a
        flush is answered after its bytes are there.
        """
        return

    def close(self) -> None:
        """Release everything, files included; senders get errors from now on.  Repeatable."""
        ...


class Link(Protocol):
    """The sending end of one trainer rank to one Staging; used by one thread."""

    def put(self, offset: int, data: Tensor, deadline: float) -> None:
        """Write a flat contiguous uint8 tensor at `offset` of the remote buffer.

        May return early; `data` must stay unchanged until the next `flush`.  Raises TransportError
        when the range is outside the buffer (reason "range"), the peer is gone ("peer") or the
        deadline passed ("deadline").
        """
        ...

    def view(self, offset: int, num_bytes: int) -> Tensor | None:
        """The remote range as local memory, to pack into without a copy; None if not mapped."""
        return None

    def flush(self, deadline: float) -> None:
        """Return once all puts have reached the remote side.  Raises TransportError."""
        ...

    def close(self) -> None:
        """Repeatable."""
        ...


class Transport(Protocol):
    """Opens stagings and links; keeps no state outside them."""

    name: str

    def open(self, num_bytes: int) -> Staging:
        """A buffer that senders can reach.  Raises TransportError without room for it."""
        ...

    def connect(self, endpoint: bytes, deadline: float) -> Link:
        """Raises TransportError: endpoint unknown or not permitted, peer gone, deadline passed."""
        ...


def check_range(offset: int, num_bytes: int, size: int) -> None:
    """Raise TransportError unless [offset, offset + num_bytes) lies inside a buffer of `size`."""
    if offset < 0 or num_bytes < 0 or offset + num_bytes > size:
        raise TransportError(
            "range", f"bytes {offset}..{offset + num_bytes} are outside a buffer of {size}"
        )


def read_endpoint(endpoint: bytes, kind: type[T], transport: str) -> T:
    """Decode the endpoint that a Staging wrote as JSON.  Raises TransportError `refused`."""
    try:
        return msgspec.json.decode(endpoint, type=kind)
    except msgspec.DecodeError as error:
        raise TransportError("refused", f"not an endpoint of {transport}: {error}") from error
