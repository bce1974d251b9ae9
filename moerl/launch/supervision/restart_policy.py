"""Whether and when a process that died is started again.  Decisions only; the clock is passed in.

- Before the first step nothing is restarted: a failure is then likely a configuration error.
- `supervision.max_restarts`: restarts of one process without a new step in between.
- `supervision.max_deaths`: deaths of one engine within `window_s`.  A new step does not forgive
  them, because other engines may have made it possible.  The window counts the time in which the
  engine ran: an engine with a slow start would otherwise never be over the limit.
- The pause before a restart doubles with each death in the window, and shrinks as deaths leave it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from moerl.config.schema import SupervisionConfig

_LONGEST_PAUSE_S = 60.0


class RestartPolicy:
    """Deaths and restarts of the processes of one start of a run, by name."""

    def __init__(self, config: SupervisionConfig, clock: Callable[[], float]) -> None:
        self.restarts: Counter[str] = Counter()  # since the last new step
        self._config, self._clock = config, clock
        self._deaths: dict[str, list[float]] = defaultdict(list)  # clock seconds, ascending
        self._has_stepped = False

    @property
    def restarts_at_all(self) -> bool:
        """False while any failure ends the run."""
        return self._has_stepped and self._config.max_restarts > 0

    def stepped(self) -> None:
        """A new step was made, so the trainer and the controller work."""
        self._has_stepped = True
        self.restarts.clear()

    def died(self, name: str) -> str:
        """Count a death.  Returns why the process must not be restarted, or ""."""
        self._deaths[name].append(self._clock())
        if not self.restarts_at_all:
            return "nothing is restarted"
        self.restarts[name] += 1
        if self.restarts[name] > self._config.max_restarts:
            return (
                f"it died {self.restarts[name]} times without a new step "
                f"(supervision.max_restarts = {self._config.max_restarts})"
            )
        num_deaths = len(self._recent(name))
        if name.startswith("engine ") and num_deaths >= self._config.max_deaths:
            return (
                f"it died {num_deaths} times (supervision.max_deaths) within "
                f"{self._config.window_s:g} s of running (supervision.window_s)"
            )
        return ""

    def pause_s(self, name: str) -> float:
        """Time between the last death and the restart."""
        num_deaths = max(1, len(self._recent(name)))
        doublings = min(num_deaths - 1, 30)  # a larger power of two is no float of use
        return min(_LONGEST_PAUSE_S, self._config.backoff_s * 2.0**doublings)

    def is_back(self, name: str) -> None:
        """The restarted process works: the time since its death does not count as running."""
        if deaths := self._deaths[name]:
            down_s = self._clock() - deaths[-1]
            self._deaths[name] = [when + down_s for when in deaths]

    def forget(self, name: str) -> None:
        """It left the run."""
        self.restarts.pop(name, None)
        self._deaths.pop(name, None)

    def _recent(self, name: str) -> list[float]:
        begin = self._clock() - self._config.window_s
        self._deaths[name] = [when for when in self._deaths[name] if when > begin]
        return self._deaths[name]
