"""Supervises the controller: opens it, polls it, limits its calls, restarts it from its journal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from moerl.core.errors import EngineError, MoerlError
from moerl.launch.supervision.supervisor_context import (
    POLL_S,
    START_S,
    CallTimeout,
    SupervisorContext,
)

Polled = tuple[dict[str, float], list[dict[str, Any]], str]  # (status, new rows, trainer failure)


class ControllerSupervisor:
    """One controller at a time."""

    def __init__(
        self,
        context: SupervisorContext,
        place: Callable[[], Any],
        lost_engines: Callable[[], list[int]],
    ) -> None:
        """place: starts its process with the present engines and returns the actor."""
        self.endpoint = ""  # known when it has opened
        self.is_up = False
        self._context, self._place, self._lost_engines = context, place, lost_engines
        self._actor: Any = None
        self._untold: list[Callable[[Any], Any]] | None = None  # for one that is opening
        self._next_poll = 0.0  # clock seconds; inf while it is asked

    def start(self) -> None:
        """Start the controller; a second one has the endpoint and the journal of the first."""
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
            self._actor.watch.remote(),
            "controller",
            lambda _: self._died(EngineError("controller ended without a cause")),
            self._died,
        )
        self._context.ask_pid("controller", self._actor)
        for call in untold:
            self.tell(call)
        if was_restarted:
            self.tell(lambda controller: controller.engines_started.remote())
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
        call: Callable[[Any], Any],
        then: Callable[[Any], None],
        failed: Callable[[MoerlError], None],
    ) -> bool:
        """Handle an answer, however long it takes; False, and no call, while it is down."""
        if self.is_up:
            self._context.calls.send(call(self._actor), "controller", then, failed)
        return self.is_up

    def tell(self, call: Callable[[Any], Any]) -> None:
        """A call, given its handle.  One that is down learns the state of engines at its start."""
        if self._untold is not None:
            self._untold.append(call)
        elif self.is_up:
            self._ask_in_time(call, lambda _: None)

    def poll(self, then: Callable[[Polled], None]) -> None:
        """Ask for status and new rows, if it is time."""

        def polled(answer: Polled) -> None:
            self._next_poll = self._context.clock() + POLL_S
            then(answer)

        if self.is_up and self._context.clock() >= self._next_poll:
            self._next_poll = float("inf")
            self._ask_in_time(lambda controller: controller.poll.remote(), polled)

    def measure_engines(
        self, seconds: float, then: Callable[[float], None], failed: Callable[[MoerlError], None]
    ) -> None:
        asked = self._actor.measure_engines.remote(seconds)
        limit_s = seconds + self._context.answer_s
        self._context.calls.send(asked, "controller", then, failed, limit_s)

    def _ask_in_time(self, call: Callable[[Any], Any], then: Callable[[Any], None]) -> None:
        ref, limit_s = call(self._actor), self._context.answer_s
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
