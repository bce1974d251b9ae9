"""Method calls to plain objects on Ray actors, with our own errors."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from moerl.core.errors import EngineError, MoerlError
from moerl.runtime.stack_dump import write_on_request


def log_to(path: Path) -> None:
    """Log this process to a file; standard output belongs to the console."""
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    write_on_request(path)


class CallTimeout(EngineError):
    """An actor did not answer in time."""


class ActorServer:
    """A plain object in its own process."""

    def __init__(self, plain: object) -> None:
        self._plain = plain

    async def pid(self) -> int:
        return os.getpid()

    async def ask(self, method: str, *args: object) -> object:
        """Result of a method of the object, which may be a coroutine."""
        try:
            result = getattr(self._plain, method)(*args)
            return await result if inspect.isawaitable(result) else result
        except MoerlError as error:
            await self._failed(method, error)
            raise

    async def _failed(self, method: str, error: MoerlError) -> None:
        """A call ended with this error, which is raised after it."""


class ActorProxy:
    """Has the methods of the object that an actor hosts."""

    def __init__(self, actor: ActorHandle[Any], name: str) -> None:
        """Stand for an actor.  name: of the actor, for error messages."""
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
    """A failed call raises our own error unchanged, or EngineError when `name` died.

    Other exceptions stay a RayTaskError, a timeout a GetTimeoutError.
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
    except RayError as error:  # for example its node died before the answer arrived
        raise EngineError(f"{name}: an answer was lost: {type(error).__name__}: {error}") from error
