"""Restarts of processes that died: whether they are allowed, and after which pause.

- Before the first step nothing is restarted: a failure is then likely a configuration error.
- `supervision.max_restarts`: restarts of one process without a new step in between.
- `supervision.max_deaths`: deaths of one engine within `window_s`.  A new step does not forgive
  them, because other engines may have made it possible.  The window counts the time in which the
  engine ran: an engine with a slow start would otherwise never be over the limit.
- The pause before a restart doubles with each death in the window, and shrinks as deaths leave it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from moerl.config.schema import SupervisionConfig
from moerl.core.errors import MoerlError
from moerl.observe.console import Console
from moerl.runtime.trace import Tracer

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 60.0


class Restarts:
    """Deaths and pending restarts of the processes of one start of a run, by name."""

    def __init__(
        self,
        config: SupervisionConfig,
        console: Console,
        tracer: Tracer,
        clock: Callable[[], float],
        steps_made: Callable[[], int],
    ) -> None:
        """Count no failure yet.  clock: monotonic seconds.

        steps_made: reads the number of steps that this start of the run has stored.
        """
        self._steps_made, self._steps = steps_made, 0
        self._config, self._console, self._tracer, self._clock = config, console, tracer, clock
        self._restarts: Counter[str] = Counter()  # since the last new step
        self._deaths: dict[str, list[float]] = defaultdict(list)  # clock seconds, ascending
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}  # (clock seconds, restart)
        self._down: dict[str, float] = {}  # unix time when a death was seen, per process
        self._restarted: dict[str, float] = {}  # unix time when its restart began

    @property
    def has_steps(self) -> bool:
        """Whether this start has finished a step, as far as is known."""
        return self._steps > 0

    @property
    def restarts_at_all(self) -> bool:
        """False while any failure ends the run."""
        return self._steps > 0 and self._config.max_restarts > 0

    def restart(
        self, name: str, error: MoerlError, restart: Callable[[], None], died_at: float = 0.0
    ) -> None:
        """Restart `name` after a pause, or raise `error`.  died_at: unix time; 0 = now."""
        if self.died(name, error, died_at):
            raise error
        self.schedule(name, error, restart)

    def steps_made(self) -> int:
        """Steps of the run that this start has finished."""
        self.made(self._steps_made())
        return self._steps

    def made(self, steps: int) -> None:
        """So many steps of the run are finished; a new one forgives the deaths that led to it."""
        if steps > self._steps:
            self._steps = steps
            self._restarts.clear()

    def died(self, name: str, error: MoerlError, died_at: float = 0.0) -> str:
        """Count a death.  Returns why no restart is allowed, or "".

        The controller may have died after it stored a step and before a poll.
        """
        self.steps_made()
        self._deaths[name].append(self._clock())
        self._restarts[name] += self.restarts_at_all
        self._down.setdefault(name, died_at or time.time())
        log.error("%s died, restart %d: %s", name, self._restarts[name], error)
        return self._refusal(name)

    def _refusal(self, name: str) -> str:
        if not self.restarts_at_all:
            return "nothing is restarted"
        if self._restarts[name] > self._config.max_restarts:
            return (
                f"it died {self._restarts[name]} times without a new step "
                f"(supervision.max_restarts = {self._config.max_restarts})"
            )
        num_deaths = len(self._recent(name))
        if name.startswith("engine ") and num_deaths >= self._config.max_deaths:
            return (
                f"it died {num_deaths} times (supervision.max_deaths) within "
                f"{self._config.window_s:g} s of running (supervision.window_s)"
            )
        return ""

    def _recent(self, name: str) -> list[float]:
        begin = self._clock() - self._config.window_s
        self._deaths[name] = [when for when in self._deaths[name] if when > begin]
        return self._deaths[name]

    def schedule(self, name: str, error: MoerlError, restart: Callable[[], None]) -> None:
        pause_s = self.pause_s(name)
        self.postpone(name, pause_s, restart)
        self._console.event(
            f"{name} died, restart {self._restarts[name]} of {self._config.max_restarts} "
            f"in {pause_s:g} s: {str(error).splitlines()[0]}"
        )

    def pause_s(self, name: str) -> float:
        """Time between the last death and the restart."""
        num_deaths = max(1, len(self._recent(name)))
        doublings = min(num_deaths - 1, 30)  # a larger power of two is no float of use
        return min(_LONGEST_PAUSE_S, self._config.backoff_s * 2.0**doublings)

    def postpone(self, name: str, pause_s: float, restart: Callable[[], None]) -> None:
        self._due[name] = (self._clock() + pause_s, restart)

    def is_due(self, name: str) -> bool:
        """True from the death of a process to the begin of its restart."""
        return name in self._due

    def run_due(self) -> None:
        for name, (when, restart) in list(self._due.items()):
            if self._clock() >= when:
                del self._due[name]
                self.began(name)
                restart()

    def began(self, name: str) -> None:
        """A restart begins now."""
        self._restarted[name] = time.time()

    def is_back(self, name: str) -> None:
        """Log how long a process was down, and how long its start took.

        The time since its death does not count as running.
        """
        self._console.ready(name)
        if name not in self._down:
            return
        if deaths := self._deaths[name]:
            down_s = self._clock() - deaths[-1]
            self._deaths[name] = [when + down_s for when in deaths]
        died, now = self._down.pop(name), time.time()
        start_s = now - self._restarted[name]
        self._tracer.add(f"{name} down", died, now, starting_s=start_s)
        text = f"{name} is back after {now - died:.1f} s, its start took {start_s:.1f} s"
        log.info("%s", text)
        self._console.event(text)

    def forget(self, name: str) -> None:
        """It left the run."""
        for state in (self._due, self._down, self._restarts, self._deaths):
            state.pop(name, None)
