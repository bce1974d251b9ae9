"""Memory of a device by phase where engine and trainer take turns, and what has to give way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from moerl.config.schema import MovedPart
from moerl.planning.memory import RUNTIME, EngineMemory, TrainerMemory

NCCL = 10_000_000_000
"""Of NCCL, which a parked trainer rank keeps; reported for 3D groups: 7 to 10 GB.  Its own suspend
needs NCCL_CUMEM_ENABLE=1, which SGLang turns off, and no GPU has shown that it comes back.
"""
ROOM = 0.97
"""Share of a device that is planned with; the rest is for fragments."""
ORDER: tuple[MovedPart, ...] = get_args(MovedPart)
"""Cheapest first: what is thrown away, what a publish brings back, what is copied both ways."""


@dataclass(frozen=True, slots=True)
class PhaseBytes:
    """Bytes of the engine rank and of the trainer rank in each phase."""

    train: tuple[int, int]
    hand_over: tuple[int, int]
    generate: tuple[int, int]

    @property
    def most(self) -> int:
        return max(map(sum, (self.train, self.hand_over, self.generate)))


def phase_bytes(
    trainer: TrainerMemory, engine: EngineMemory, moves: Collection[MovedPart], *, gpu: bool
) -> PhaseBytes:
    """gpu: with the memory of CUDA and NCCL, and of an engine's graphs, which do not sleep."""
    # the two buckets of a commit stay on an engine's device
    nccl, runtime = (NCCL, RUNTIME + engine.update) if gpu else (0, 0)
    kv, weights = engine.kv, engine.weights
    sleeping = runtime + sum(
        size for part, size in (("kv_cache", kv), ("engine_weights", weights)) if part not in moves
    )
    kept = {"gradients": trainer.gradients, "optimizer": trainer.optimizer}
    parked = sum(size for part, size in kept.items() if part not in moves)
    parked += trainer.others + trainer.device_base + trainer.runtime + nccl
    asleep_kv = 0 if "kv_cache" in moves else kv
    at_rest = 0 if "trainer_weights" in moves else trainer.weights
    return PhaseBytes(
        train=(sleeping, trainer.total + nccl),
        hand_over=(
            runtime + weights + asleep_kv,
            parked + trainer.weights + trainer.buckets,
        ),
        generate=(runtime + weights + kv, parked + at_rest),
    )


def copied_out(trainer: TrainerMemory, moves: Collection[MovedPart]) -> int:
    """Host memory that keeps the moved parts of a trainer rank; gradients are thrown away."""
    kept = {"optimizer": trainer.optimizer, "trainer_weights": trainer.weights}
    return sum(size for part, size in kept.items() if part in moves)


def smallest_set(
    trainer: TrainerMemory, engine: EngineMemory, room: float, *, adapters: bool
) -> tuple[MovedPart, ...] | None:
    """The first parts of ORDER with which every phase fits; None where none does.

    They end with the KV cache at least, since engines sleep by it.
    room: bytes of a device.  adapters: the engine's base stays.
    """
    order = [part for part in ORDER if not (adapters and part == "engine_weights")]
    for moves in (tuple(order[:end]) for end in range(2, len(order) + 1)):
        if phase_bytes(trainer, engine, moves, gpu=True).most <= room:
            return moves
    return None
