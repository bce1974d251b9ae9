"""Memory of GPUs that engine and trainer have in common: shared at the same time, or in turns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import get_args

from moerl.config import Config
from moerl.config.clusters import moved_parts, sleeping_engines, trainer_share
from moerl.config.schema import NodeGroup, ParkedPart
from moerl.core.errors import ConfigError
from moerl.planning.memory import RUNTIME, EngineMemory, TrainerMemory
from moerl.planning.printout import GB, TextTable, gb, of_room

NCCL = 10_000_000_000
"""Of NCCL, which a parked trainer rank keeps; reported for 3D groups: 7 to 10 GB.  Its own suspend
needs NCCL_CUMEM_ENABLE=1, which SGLang turns off, and no GPU has shown that it comes back.
"""
ROOM = 0.97
"""Share of a device that is planned with; the rest is for fragments."""
ORDER: tuple[ParkedPart, ...] = get_args(ParkedPart)
"""Cheapest first: what is thrown away, what a publish brings back, what is copied both ways."""


# --- shared --------------------------------------------------------------------------------------
def shared_table(
    config: Config, device_gb: float, trainer: TrainerMemory, engine: EngineMemory
) -> TextTable:
    """Memory by purpose.  Raises ConfigError where a share, or the GPU, is smaller than it.

    device_gb: memory of a GPU; 0 = unknown, then nothing is compared.
    """
    rows = [
        ("weights", engine.weights, trainer.weights),
        ("KV cache", engine.kv, 0),
        ("gradients", 0, trainer.gradients),
        ("optimizer", 0, trainer.optimizer),
        ("activations, head, replay", 0, trainer.activations + trainer.head + trainer.replay),
        ("other models", 0, trainer.others),
        ("W0 of adapters", 0, trainer.device_base),
        ("a publish", engine.update, trainer.buckets),
        ("CUDA, graphs, waste", RUNTIME, trainer.runtime),
    ]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    _check_shares(config, device_gb, engine, rows[-1][1:])
    return TextTable(
        f"memory of a shared GPU{of_room(device_gb)}",
        ("purpose", "engine", "trainer"),
        [
            (purpose, *(gb(size) if size else "" for size in sides))
            for purpose, *sides in rows
            if any(sides)
        ],
        left=1,
    )


def _check_shares(
    config: Config, device_gb: float, engine: EngineMemory, needs: tuple[int, int]
) -> None:
    """needs: bytes of the engine rank and of the trainer rank."""
    both, held = sum(needs), engine.total
    static, most = config.engine.mem_fraction_static * device_gb, trainer_share(config) * device_gb
    fits = held <= static * GB and needs[1] <= most * GB and both <= device_gb * GB
    if not device_gb or fits:
        return
    raise ConfigError(
        "cluster.colocated",
        "shared",
        f"a GPU of {device_gb:g} GB would hold {gb(both)} GB: engine {gb(needs[0])} GB (weights "
        f"and KV cache {gb(held)} of {static:.3g}, engine.mem_fraction_static), trainer "
        f"{gb(needs[1])} of {most:.3g}; lower engine.max_total_tokens or "
        "trainer.max_tokens_per_microbatch, train by lora.rank, or use none with more GPUs",
    )


# --- in turns ------------------------------------------------------------------------------------
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
    trainer: TrainerMemory, engine: EngineMemory, moves: Collection[ParkedPart], *, gpu: bool
) -> PhaseBytes:
    """gpu: with the memory of CUDA and NCCL, and of an engine's graphs, which do not sleep."""
    # the two buckets of a commit stay on an engine's device
    nccl, runtime = (NCCL, RUNTIME + engine.update) if gpu else (0, 0)
    kv, weights = engine.kv, engine.weights

    def stays(part: ParkedPart, size: int) -> int:
        return 0 if part in moves else size

    asleep = stays("kv_cache", kv) + stays("engine_weights", weights)
    parked = stays("gradients", trainer.gradients) + stays("optimizer", trainer.optimizer)
    parked += trainer.others + trainer.device_base + trainer.runtime + nccl
    brought = trainer.weights + trainer.buckets
    return PhaseBytes(
        train=(runtime + asleep, trainer.total + nccl),
        hand_over=(runtime + weights + stays("kv_cache", kv), parked + brought),
        generate=(runtime + weights + kv, parked + stays("trainer_weights", trainer.weights)),
    )


def copied_out(trainer: TrainerMemory, moves: Collection[ParkedPart]) -> int:
    """Host memory that keeps the moved parts of a trainer rank; gradients are thrown away."""
    kept = {"optimizer": trainer.optimizer, "trainer_weights": trainer.weights}
    return sum(size for part, size in kept.items() if part in moves)


def smallest_set(
    trainer: TrainerMemory, engine: EngineMemory, room: float, *, adapters: bool
) -> tuple[ParkedPart, ...] | None:
    """The first parts of ORDER with which every phase fits; None where none does.

    They end with the KV cache at least, since engines sleep by it.
    room: bytes of a device.  adapters: the engine's base stays.
    """
    order = [part for part in ORDER if not (adapters and part == "engine_weights")]
    for moves in (tuple(order[:end]) for end in range(2, len(order) + 1)):
        if phase_bytes(trainer, engine, moves, gpu=True).most <= room:
            return moves
    return None


def turns_table(
    config: Config, group: NodeGroup, trainer: TrainerMemory, engine: EngineMemory
) -> tuple[tuple[ParkedPart, ...], TextTable]:
    """The parts that give way in turns, and memory by phase.

    By the settings, else the smallest set that fits.  Raises ConfigError where none does.
    """
    room = ROOM * group.device_gb * GB
    moves: tuple[ParkedPart, ...] | None = moved_parts(config)
    why = "turn.moves" if config.turn.moves else "the sizes of the devices are not known"
    if room and not config.turn.moves:
        moves = smallest_set(trainer, engine, room, adapters=bool(config.lora.rank))
        why = "the smallest set with which every phase fits"
    found = phase_bytes(trainer, engine, ORDER if moves is None else moves, gpu=group.devices > 0)
    if room and (moves is None or found.most > room):
        raise ConfigError(
            "cluster.colocated",
            "turns",
            f"a device of {group.device_gb:g} GB would hold {gb(found.most)} GB in one phase: "
            "lower trainer.max_tokens_per_microbatch or engine.max_total_tokens, keep the "
            "optimizer on the host (trainer.optimizer_args.optimizer_cpu_offload), or train by "
            "lora.rank",
        )
    moves = moves or ORDER
    awake = sorted(config.engine.sizes.keys() - sleeping_engines(config))
    rest = f"; engines {awake} never sleep" if awake else ""
    return moves, TextTable(
        f"memory of a device in turns{of_room(group.device_gb)}",
        ("phase", "engine", "trainer", "both"),
        [
            (phase.replace("_", " "), *map(gb, (*held, sum(held))))
            for phase, held in asdict(found).items()
        ],
        left=1,
        note=f"gives way: {', '.join(moves)} ({why}){rest}",
    )
