"""Checks that the sizes of a trainer mesh fit each other and the sizes of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from moerl.config.schema import ParallelConfig
from moerl.config.validate import read_section
from moerl.core.errors import ConfigError

TRAINER = "trainer.parallel"

# (axis, what it cuts, by its name in config.json)
_CUTS = (
    ("tp", "num_attention_heads"),
    ("tp", "num_key_value_heads"),
    ("tp", "intermediate_size"),
    ("tp", "shared experts' width"),
    ("tp", "linear_num_key_heads"),
    ("ep", "num_experts"),
    ("etp", "moe_intermediate_size"),
)


def check_mesh(parallel: ParallelConfig, field: str = TRAINER) -> None:
    """Raises ConfigError when the expert axes do not divide a stage's ranks."""
    read_section(ParallelConfig, asdict(parallel), f"{field}.")
    p = parallel
    if p.vpp > 1 and p.pp == 1:
        raise ConfigError(
            f"{field}.vpp", p.vpp, "model chunks are interleaved over stages; use pp > 1"
        )
    if p.stage_size % (p.ep * p.etp):
        raise ConfigError(
            f"{field}.ep",
            p.ep,
            f"ep x etp = {p.ep * p.etp} must divide tp x cp x dp = {p.stage_size}",
        )


def check_divides(parallel: ParallelConfig, sizes: Mapping[str, int], field: str = TRAINER) -> None:
    """Every size of a model divides by the ranks that cut it.  Raises ConfigError.

    sizes: by their names in config.json; 0 or none: the model has no such part.
    """
    for axis, what in _CUTS:
        ranks, size = getattr(parallel, axis), sizes.get(what, 0)
        if size % ranks:
            raise ConfigError(
                f"{field}.{axis}", ranks, f"it must divide the model's {what} = {size}"
            )
    if parallel.ep > 1 and not sizes.get("num_experts"):
        raise ConfigError(f"{field}.ep", parallel.ep, "the model is dense: use 1")
    if layers := sizes.get("num_hidden_layers"):
        stage_layers(layers, parallel, field)


def stage_layers(num_layers: int, parallel: ParallelConfig, field: str = TRAINER) -> list[int]:
    """Layers of each pipeline stage.  Raises ConfigError when they do not divide."""
    ends = {0: parallel.first_stage_layers, parallel.pp - 1: parallel.last_stage_layers}
    ends = {stage: num for stage, num in ends.items() if num}
    middle = parallel.pp - len(ends)
    left = num_layers - sum(ends.values())
    if left < 0 or (left % middle if middle else left):
        raise ConfigError(
            f"{field}.pp",
            parallel.pp,
            f"{middle} stages cannot share {left} layers, num_hidden_layers = {num_layers} less "
            "those of the end stages"
            if ends
            else f"it must divide the model's num_hidden_layers = {left}",
        )
    sizes = [ends.get(stage, left // middle if middle else 0) for stage in range(parallel.pp)]
    if any(num % parallel.vpp for num in sizes):
        raise ConfigError(
            f"{field}.vpp",
            parallel.vpp,
            f"it must divide the layers of every pipeline stage, {sizes}",
        )
    return sizes
