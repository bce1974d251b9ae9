"""torch's interface to the store of `store_server`; ranks pass it to `init_process_group`.

Several threads may call at once (torch's watchdogs do): each request takes an idle connection or
opens one, so that a thread that waits for a key blocks no other.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import msgspec
import torch.distributed as dist

from moerl.core.errors import TrainerError, TransportError
from moerl.distributed import store_server as wire
from moerl.distributed.token_server import Channel, ServerAddress, open_channel

# torch's wrappers of a store do not keep its Python part alive.
_STORES: list[TokenStore] = []
VARIABLE = "MOERL_STORE"  # environment variable of a rank: where its round of the store is
_AGAIN_S = 0.2  # pause between attempts to connect
_SLACK_S = 20.0  # of the connection, over the time that a request waits


class TokenStore(dist.Store):
    """Raises DistStoreError (no key in time) and TransportError (no store in time)."""

    def __init__(
        self, server: ServerAddress, timeout: timedelta, deadline: float = math.inf
    ) -> None:
        """Connect.  timeout: of one call.  deadline: end of all calls in `time.monotonic()`."""
        super().__init__()
        self.deadline = deadline
        self.set_timeout(timeout)
        self._address = server
        self._idle: list[Channel] = []
        self._lock = threading.Lock()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._timeout = timeout

    def clone(self) -> TokenStore:
        _STORES.append(TokenStore(self._address, self._timeout, self.deadline))
        return _STORES[-1]

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(wire.Write({key: _bytes(value)}))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(wire.Write(dict(zip(keys, map(_bytes, values), strict=True))))

    def get(self, key: str) -> bytes:
        return self._read([key], self._timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._read(list(keys), self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._read(list(keys), timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(wire.Read(list(keys), 0.0)) is not None

    def add(self, key: str, amount: int) -> int:
        return cast(int, self._ask(wire.Add(key, amount)))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(wire.Append(key, _bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        asked = wire.Exchange(key, _bytes(expected), _bytes(desired))
        return cast(bytes, self._ask(asked))

    def delete_key(self, key: str) -> bool:
        return cast(bool, self._ask(wire.Delete(key)))

    def num_keys(self) -> int:
        return cast(int, self._ask(wire.Count()))

    # torch's C++ looks for these two by the names that they have there (init.cpp, PythonStore)
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return True  # append, multi_get and multi_set

    def _read(self, keys: list[str], timeout: timedelta) -> list[bytes]:
        deadline = min(time.monotonic() + timeout.total_seconds(), self.deadline)
        while True:
            wait_s = min(max(deadline - time.monotonic(), 0.0), wire.MAX_WAIT_S)
            found = self._ask(wire.Read(keys, wait_s))
            if found is not None:
                return cast(list[bytes], found)
            if time.monotonic() >= deadline:
                raise dist.DistStoreError(f"no value of {keys} within {timeout}")

    def _ask(self, request: wire.Request) -> object:
        channel = self._take()
        try:
            deadline = min(time.monotonic() + wire.MAX_WAIT_S + _SLACK_S, self.deadline)
            answer = wire.ask(channel, request, deadline)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._idle.append(channel)
        return answer

    def _take(self) -> Channel:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        deadline = min(time.monotonic() + self._timeout.total_seconds(), self.deadline)
        while True:
            try:
                return open_channel(self._address, min(deadline, time.monotonic() + _SLACK_S))
            except TransportError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_AGAIN_S)


def rank_store(timeout: timedelta) -> dist.Store:
    """The store of this rank's job, of the round that its agent started it in.

    Raises TrainerError outside `moerl.distributed.torchrun`.
    """
    try:
        place = json.loads(os.environ.pop(VARIABLE))
    except KeyError:
        raise TrainerError(
            f"{VARIABLE} is not set; start the ranks with python -m moerl.distributed.torchrun"
        ) from None
    server = msgspec.convert(place["server"], ServerAddress)
    _STORES.append(TokenStore(server, timeout))
    return dist.PrefixStore(f"round-{place['round']}", _STORES[-1])


def store_variable(server: ServerAddress, number: int) -> dict[str, str]:
    """The environment of ranks by which `rank_store` finds the store.  number: of the round."""
    place = {"server": msgspec.to_builtins(server), "round": number}
    return {VARIABLE: json.dumps(place)}


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
