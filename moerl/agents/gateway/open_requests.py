"""Requests that clients may send again: a retry joins its original, and no turn is sampled twice.

A client whose timeout is over gives up and asks again.  A second turn would take the engine's time,
and answers that take long would be sampled until a short one comes.  A request equals another by
episode, route and body.  It joins one whose client has left without an answer; one that is served
or answered only if the client calls it a retry, since agents ask the same thing twice on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moerl.agents.gateway.api_errors import ApiError
from moerl.agents.gateway.event_streams import NewestPartials

_KEPT_S = 30.0  # for a retry; OpenAI's client asks again within 8 s


@dataclass(slots=True, eq=False)
class OpenRequest:
    """work: makes the reply.  readers: clients that wait for it."""

    work: asyncio.Task[Any]
    partials: NewestPartials
    readers: int = 0
    is_answered: bool = False
    end: asyncio.TimerHandle | None = None

    def takes(self, *, retry: bool) -> bool:
        if self.work.cancelled():
            return False
        failed = self.work.done() and self.work.exception() is not None
        return not (self.readers or self.is_answered) or (retry and not failed)


class OpenRequests:
    """Used from one event loop."""

    def __init__(self, *, awaits_retries: bool) -> None:
        """awaits_retries: a request whose client has left goes on for a while."""
        self._alone_s = _KEPT_S if awaits_retries else 0.0
        self._requests: dict[bytes, list[OpenRequest]] = {}

    @contextmanager
    def entered(
        self, key: bytes, start: Callable[[NewestPartials], asyncio.Task[Any]], *, retry: bool
    ) -> Iterator[OpenRequest]:
        """The request while a client waits for its reply.

        key: digest of path and body; the episode is in the path.  retry: the client says so.
        """
        same = self._requests.setdefault(key, [])
        alone = [one for one in same if one.takes(retry=False)]
        found = next(iter(alone or (one for one in same if one.takes(retry=retry))), None)
        if found is None:
            partials = NewestPartials()
            found = OpenRequest(start(partials), partials)
            same.append(found)
        if found.end is not None:
            found.end.cancel()
        found.readers += 1
        try:
            yield found
            found.is_answered = True
        except ApiError:
            found.is_answered = True
            raise
        finally:
            found.readers -= 1
            if not found.readers:
                wait_s = _KEPT_S if found.work.done() else self._alone_s
                loop = asyncio.get_running_loop()
                found.end = loop.call_later(wait_s, self._drop, key, found)

    def _drop(self, key: bytes, found: OpenRequest) -> None:
        found.work.cancel()
        self._requests[key].remove(found)
        if not self._requests[key]:
            del self._requests[key]
