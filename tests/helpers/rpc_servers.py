"""A server of `moerl.core.rpc` on a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from moerl.core.messages import Message
from moerl.core.rpc import Keys, RpcServer
from tests.helpers.patience import patience


@contextmanager
def serving(
    keys: Keys,
    handle: Callable[[Message], Awaitable[Message]],
    endpoint: str = "tcp://127.0.0.1:*",
) -> Iterator[RpcServer]:
    server = RpcServer(endpoint, keys, handle)
    stopping = threading.Event()

    async def work() -> None:
        serve = asyncio.ensure_future(server.serve())
        while not stopping.is_set():
            await asyncio.sleep(0.02)
        serve.cancel()

    thread = threading.Thread(target=asyncio.run, args=(work(),), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stopping.set()
        thread.join(patience(20))
        server.close()
