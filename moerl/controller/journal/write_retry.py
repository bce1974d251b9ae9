"""Writes that must succeed before the run may continue are repeated while the disk is full.

A row of metrics.jsonl and most rows of the journal make an effect visible, so nothing may follow
until they are written.  The wait ends with the deadline of the message that needs them; the run
then ends as after any failure and can be resumed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from moerl.controller.step_metrics import StepMetrics
from moerl.core.errors import JournalError
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience, shortage

log = logging.getLogger(__name__)


class WriteRetry:
    """Repeats failed writes and counts them."""

    def __init__(self, step_metrics: StepMetrics) -> None:
        self._step_metrics = step_metrics

    async def until_done(self, what: str, write: Callable[[], None], limit_s: float) -> None:
        """Call `write`, at first without a pause; again after each failure.

        Other messages are handled during a pause, so `write` itself raises when it is no longer
        wanted.  Raises the last OSError or JournalError after limit_s.
        """
        wait = DiskPatience(limit_s, self._step_metrics.notices.append).begin(what)
        while True:
            try:
                write()
            except (OSError, JournalError) as error:
                self.failed(what, error)
                if not wait.again(self._why(error)):
                    raise
            else:
                return wait.done()
            await asyncio.sleep(disk_wait.PAUSE_S)

    def _why(self, error: Exception) -> str:
        """The error, with the room on its disk where it names a file."""
        name = getattr(error, "filename", None)
        return f"{error}; {shortage(Path(name), 1)}" if isinstance(name, str) else str(error)

    def failed(self, what: str, error: Exception) -> None:
        """Log and count a write that will be repeated."""
        self._step_metrics.add("journal/failed_writes")
        self._step_metrics.last_failed_write = f"{what} could not be written: {error}"
        log.error("%s could not be written, the run waits for the disk: %s", what, error)
