"""GPUs of the engines of one machine: those of the printed table, and free ones for later engines.

On a cluster Ray deals the GPUs that each node offers.
"""

from __future__ import annotations

from moerl.config import Config
from moerl.config.clusters import placement
from moerl.core.errors import ConfigError


class EngineGpus:
    """Which engine has which GPUs of this machine."""

    def __init__(self, config: Config) -> None:
        placed = placement(config)
        self._planned = {slot.engine: slot.devices for slot in placed.engines}
        node = placed.engines[0].node
        others = {
            device
            for slot in (*placed.trainers, *placed.ref_models)
            if slot.node is node
            for device in slot.devices
        }
        self._ours = [device for device in range(node.group.devices) if device not in others]
        self._taken: dict[int, tuple[int, ...]] = {}

    def take(self, engine: int, tp: int) -> tuple[int, ...]:
        """GPUs of an engine, the same ones at each call; none on a machine without GPUs.

        Raises ConfigError when an engine outside the table finds too few.
        """
        if engine not in self._taken:
            self._taken[engine] = self._planned.pop(engine, ()) or self._free(tp)
        return self._taken[engine]

    def give_back(self, engine: int) -> None:
        """The engine has left."""
        self._taken.pop(engine, None)

    def _free(self, tp: int) -> tuple[int, ...]:
        if not self._ours:
            return ()
        used = {gpu for gpus in (*self._taken.values(), *self._planned.values()) for gpu in gpus}
        free = [gpu for gpu in self._ours if gpu not in used]
        if len(free) < tp:
            raise ConfigError(
                "tp", tp, f"{len(free)} GPUs of this machine are free: remove an engine first"
            )
        return tuple(free[:tp])
