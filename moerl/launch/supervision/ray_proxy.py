"""Plain objects on Ray actors: called by the name of a method, failing with our own errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from moerl.errors import EngineError, MoerlError


class Hosted:
    """A plain object in a process of its own."""

    def __init__(self, plain: object) -> None:
        self._plain = plain

    async def pid(self) -> int:
        return os.getpid()

    async def ask(self, method: str, *args: object) -> object:
        """The result of one of its methods, a coroutine function."""
        return await getattr(self._plain, method)(*args)


class Remote:
    """Has the methods of the object that an actor hosts."""

    def __init__(self, actor: ActorHandle[Any], name: str) -> None:
        """name: what the actor is, for error messages."""
        self._actor, self._name = actor, name

    def __getattr__(self, method: str) -> Callable[..., Awaitable[object]]:
        if method.startswith("_"):  # of this object, not of the hosted one
            raise AttributeError(method)

        async def ask(*args: object) -> object:
            with own_errors(self._name):
                return await self._actor.ask.remote(method, *args)

        return ask


@contextlib.contextmanager
def own_errors(name: str) -> Iterator[None]:
    """A failed call to `name` raises our own error as it was, or EngineError when `name` is gone.

    Other errors of its code stay a RayTaskError, an answer that is late a GetTimeoutError.
    """
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, MoerlError):
            raise error.cause from None
        raise
    except GetTimeoutError:
        raise
    except RayActorError as error:
        raise EngineError(f"the process of {name} died") from error
    except RayError as error:  # its node is gone with the answer, for one
        raise EngineError(f"{name}: an answer was lost: {type(error).__name__}: {error}") from error
