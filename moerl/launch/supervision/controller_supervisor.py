"""Supervises the controller: opens it, polls it, limits its calls, restarts it from its journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVarTuple

from ray.exceptions import RayActorError

from moerl.controller.controller import Controller
from moerl.core.errors import EngineError, MoerlError
from moerl.launch.supervision.ray_proxy import CallTimeout
from moerl.launch.supervision.supervisor_context import (
    POLL_S,
    START_S,
    SupervisorContext,
)

Args = TypeVarTuple("Args")
# (status, new rows, trainer failure, notices)
Polled = tuple[dict[str, float], list[dict[str, Any]], str, list[str]]


class ControllerSupervisor:
    """One controller at a time."""

    def __init__(
        self,
        context: SupervisorContext,
        place: Callable[[], Any],
        lost_engines: Callable[[], list[int]],
    ) -> None:
        """Start nothing.  place: starts its process with the present engines, returns the actor."""
        self.endpoint = ""  # known when it has opened
        self.is_up = False
        self._context, self._place, self._lost_engines = context, place, lost_engines
        self._actor: Any = None
        self._untold: list[tuple[Any, ...]] | None = None  # for an opening controller
        self._next_poll = 0.0  # clock seconds; inf while a question is open

    def start(self) -> None:
        """Start the controller; a restart keeps its endpoint and journal."""
        if self.endpoint:
            self._context.console.wait("controller")
        self._actor = self._place()
        self._untold = []
        asked = (self.endpoint, self._lost_engines()) if self.endpoint else ()
        self._context.calls.send(
            self._actor.open.remote(*asked), "controller", self._opened, self._open_failed, START_S
        )

    def _opened(self, endpoint: str) -> None:
        was_restarted, self.endpoint = bool(self.endpoint), endpoint
        self.is_up, self._next_poll = True, 0.0
        untold, self._untold = self._untold or [], None
        self._context.calls.send(
            self._actor.ask.remote("run"),
            "controller",
            lambda _: self._died(EngineError("controller ended without a cause")),
            self._died,
        )
        self._context.ask_pid("controller", self._actor)
        for call in untold:
            self.tell(*call)
        if was_restarted:
            self.tell(Controller.engines_started)
            self._context.restarts.is_back("controller")

    def _open_failed(self, error: MoerlError) -> None:
        self._context.actors.kill(self._actor)
        self._untold = None
        if not isinstance(error, EngineError):
            raise error
        self._context.restarts.restart("controller", error, self.start)

    def _died(self, error: MoerlError) -> None:
        if not isinstance(error.__cause__, RayActorError):
            raise error  # the first failure of the run
        self.is_up = False
        self._context.pids.pop("controller", None)
        self._context.restarts.restart("controller", error, self.start)

    # --- calls ----------------------------------------------------------------------------------
    def ask(
        self,
        then: Callable[[Any], None],
        failed: Callable[[MoerlError], None],
        method: Callable[[Controller, *Args], object],
        *args: *Args,
    ) -> bool:
        """Handle an answer, however long it takes; False, and no call, while it is down."""
        if self.is_up:
            call = self._actor.ask.remote(method.__name__, *args)
            self._context.calls.send(call, "controller", then, failed)
        return self.is_up

    def tell(self, method: Callable[[Controller, *Args], object], *args: *Args) -> None:
        """Call a method.  A controller that is down learns the state of engines at its start."""
        if self._untold is not None:
            self._untold.append((method, *args))
        elif self.is_up:
            call = self._actor.ask.remote(method.__name__, *args)
            self._ask_in_time(call, lambda _: None)

    def poll(self, then: Callable[[Polled], None]) -> None:
        """Ask for status and new rows, if it is time."""

        def polled(answer: Polled) -> None:
            self._next_poll = self._context.clock() + POLL_S
            then(answer)

        if self.is_up and self._context.clock() >= self._next_poll:
            self._next_poll = float("inf")
            self._ask_in_time(self._actor.poll.remote(), polled)

    def finish(
        self, then: Callable[[list[str]], None], failed: Callable[[MoerlError], None]
    ) -> None:
        """Close metrics and mirrors; `then` gets the last notices."""
        self._context.calls.send(
            self._actor.finish.remote(), "controller", then, failed, self._context.answer_s
        )

    def measure_engines(
        self, seconds: float, then: Callable[[float], None], failed: Callable[[MoerlError], None]
    ) -> None:
        asked = self._actor.ask.remote("measure_engines", seconds)
        limit_s = seconds + self._context.answer_s
        self._context.calls.send(asked, "controller", then, failed, limit_s)

    def _ask_in_time(self, ref: Any, then: Callable[[Any], None]) -> None:
        limit_s = self._context.answer_s
        self._context.calls.send(ref, "controller", then, self._call_failed, limit_s)

    def _call_failed(self, error: MoerlError) -> None:
        if isinstance(error, CallTimeout):
            pid, actor = self._context.pids.get("controller"), self._actor
            self._context.hangs.write(
                "controller",
                str(error),
                [(pid, self._context.run.logs / "controller.log")] if pid else [],
                lambda: self._context.actors.kill(actor),  # its watch restarts it
            )
        elif not isinstance(error.__cause__, RayActorError):
            raise error  # else its watch reports it
