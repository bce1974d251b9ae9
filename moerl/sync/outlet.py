"""Rank 0's way to the engines: frozen buffers, and the thread that publishes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moerl.protocols import Publisher
from moerl.sync.background import PublishThread, sync_metrics
from moerl.sync.frozen import FrozenWeights, freeze
from moerl.trace import Tracer
from moerl.types import PolicyVersion


class FreezingPublisher(Publisher, Protocol):
    """A publisher that is told which frozen weights a version means."""

    def freeze(self, frozen: FrozenWeights) -> None: ...


class Outlet:
    """Used by the training thread; at most one publish is in flight."""

    def __init__(
        self,
        publisher: FreezingPublisher,
        num_engines: int,
        *,
        bucket_bytes: int,
        tracer: Tracer | None,
        on_failure: Callable[[BaseException], None],
        engines_restart: bool = False,
    ) -> None:
        """on_failure: ends the process; called on the publishing thread."""
        self._publisher, self._bucket_bytes = publisher, bucket_bytes
        self._thread = PublishThread(
            publisher,
            num_engines,
            tracer=tracer,
            on_failure=on_failure,
            engines_restart=engines_restart,
        )
        self._frozen: FrozenWeights | None = None

    def publish(self, tensors: dict[str, Tensor], version: PolicyVersion) -> dict[str, float]:
        """Copy the weights, start sending them; metrics of the publish that was in flight."""
        metrics = self.wait()
        self._frozen = freeze(tensors, version, self._frozen, bucket_bytes=self._bucket_bytes)
        self._publisher.freeze(self._frozen)
        self._thread.start(version)
        return metrics

    def wait(self) -> dict[str, float]:
        """Wait for the publish in flight, if any, and return its metrics."""
        waited_s, results = self._thread.wait()
        return sync_metrics(results, waited_s)
