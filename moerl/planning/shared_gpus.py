"""GPUs that engine and trainer share (`cluster.colocated: shared`): bytes by purpose, shares."""

from __future__ import annotations

from collections.abc import Sequence

from moerl.config import Config
from moerl.config.clusters import trainer_share
from moerl.core.errors import ConfigError
from moerl.planning.memory import RUNTIME, EngineMemory, TrainerMemory

_GB = 1e9
Row = tuple[str, float, float]  # purpose, bytes of the engine rank, bytes of the trainer rank


def shared_rows(ranks: Sequence[TrainerMemory], engines: Sequence[EngineMemory]) -> list[Row]:
    """Purposes of the largest rank of either side; the last row is the sum."""
    trainer = max(ranks, key=lambda rank: rank.total)
    engine = max(engines, key=lambda one: one.total + one.update)
    rows: list[Row] = [
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
    rows = [row for row in rows if row[1] or row[2]]
    return [*rows, ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))]


def check_shares(
    config: Config,
    device_gb: float,
    ranks: Sequence[TrainerMemory],
    engines: Sequence[EngineMemory],
) -> None:
    """Raises ConfigError where a share, or the GPU, is smaller than what the plan puts there.

    device_gb: memory of a GPU; 0 = unknown, then nothing is compared.
    """
    rows = {name: sides for name, *sides in shared_rows(ranks, engines)}
    engine, trainer = rows["all"]
    static, most = config.engine.mem_fraction_static * device_gb, trainer_share(config) * device_gb
    held = sum(rows[name][0] for name in ("weights", "KV cache"))
    fits = held <= static * _GB and trainer <= most * _GB and engine + trainer <= device_gb * _GB
    if not device_gb or fits:
        return
    needs = (
        f"engine {engine / _GB:.3g} GB (weights and KV cache {held / _GB:.3g} of {static:.3g}, "
        f"engine.mem_fraction_static), trainer {trainer / _GB:.3g} of {most:.3g}"
    )
    raise ConfigError(
        "cluster.colocated",
        "shared",
        f"a GPU of {device_gb:g} GB would hold {(engine + trainer) / _GB:.3g} GB: {needs}; lower "
        "engine.max_total_tokens or trainer.max_tokens_per_microbatch, train by lora.rank, or use "
        "none with more GPUs",
    )
