"""Publishing while the next step trains: one thread, at most one publish in flight.

The weights are copied (frozen) right after the optimizer step; the copy is what the thread sends,
so training goes on.  The next freeze waits for the thread, because it overwrites the copy.
A publish that fails ends the run at once (engines would stay on old weights and the trainer would
wait for a batch that the version lag forbids), unless engines are started again when they die: then
the others are published to, and the failed one gets the next version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from moerl.errors import EngineError, TrainerError
from moerl.protocols import Publisher, PublishResult
from moerl.trace import Tracer
from moerl.types import PolicyVersion

log = logging.getLogger(__name__)


class PublishThread:
    """Runs `publisher.publish` for every engine off the training thread."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        tracer: Tracer | None,
        on_failure: Callable[[BaseException], None],
        engines_restart: bool = False,
    ) -> None:
        """on_failure: called on the publishing thread; it is expected to end the process."""
        self._engines_restart = engines_restart
        self._publisher = publisher
        self.engines: list[int] = []
        self._tracer, self._on_failure = tracer, on_failure
        self._thread: threading.Thread | None = None
        self._results: list[PublishResult] = []

    def start(self, version: PolicyVersion, only: Sequence[int] = ()) -> None:
        """Publish `version` to every engine in the background, or to some; `wait` first."""
        assert self._thread is None, "a publish is in flight already"
        self._thread = threading.Thread(
            target=self._run, args=(version, only or self.engines), name="publish", daemon=True
        )
        self._thread.start()

    def wait(self) -> tuple[float, Sequence[PublishResult]]:
        """(seconds waited, results of the publish that was in flight); nothing twice."""
        if self._thread is None:
            return 0.0, ()
        begin = time.perf_counter()
        self._thread.join()
        self._thread = None
        results, self._results = self._results, []
        return time.perf_counter() - begin, results

    def _run(self, version: PolicyVersion, engines: Sequence[int]) -> None:
        try:
            for engine in engines:
                begin = time.time()
                try:
                    result = self._publisher.publish(engine, version)
                except (EngineError, TrainerError) as error:
                    if not self._engines_restart:
                        raise
                    log.warning("engine %d was not brought to %s: %s", engine, version, error)
                    continue
                self._results.append(result)
                if self._tracer is not None:
                    self._tracer.add(
                        "publish",
                        begin,
                        time.time(),
                        engine=engine,
                        version=str(version),
                        transfer_s=result.transfer_s,
                        pause_s=result.pause_s,
                    )
        except BaseException as error:
            self._on_failure(error)


def sync_metrics(results: Sequence[PublishResult], wait_s: float) -> dict[str, float]:
    """`async/sync_*` of one publish to all engines; empty when nothing was published."""
    if not results:
        return {}
    transfer_s = sum(result.transfer_s for result in results)
    total = sum(result.num_bytes for result in results)
    metrics = {
        "async/sync_wait_s": wait_s,
        "async/sync_bytes": float(total),
        "async/sync_transfer_s": transfer_s,
        "async/sync_pause_s": max(result.pause_s for result in results),
        "async/interrupts": float(sum(result.aborted for result in results)),
    }
    if transfer_s > 0:
        metrics["async/sync_gib_per_s"] = total / transfer_s / 2**30
    return metrics
