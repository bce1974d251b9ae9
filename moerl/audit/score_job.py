"""Job description of `moerl.audit.score_ranks`: plain data, written as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from moerl.config.schema import Dispatcher, Precision, TransformerImpl
from moerl.core.errors import ConfigError

# name: (routes of the forward pass, recorded sampling masks used)
VARIANTS: dict[str, tuple[str, bool]] = {
    "none": ("live", False),
    "mask": ("live", True),
    "routing": ("recorded", False),
    "both": ("recorded", True),
    # controls: records that a gate must reject
    "both_shifted": ("shifted", True),  # rows of the previous token
    "both_reversed": ("reversed", True),  # layers in reverse order
    "both_rotated": ("rotated", True),  # the next expert in place of each
    "both_corrupted": ("corrupted", True),  # 1% of rows with one wrong expert
    "both_prompt_live": ("prompt_live", True),  # recorded for sampled tokens, live for the prompt
    # of sparse attention: recorded routes with positions that the trainer's indexers choose, and
    # with those recorded for the token before
    "both_indexer_live": ("indexer_live", True),
    "both_indexer_moved": ("indexer_moved", True),
}


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """Score kept rollouts with one set of weights."""

    model: str  # Hugging Face folder
    rollouts: str  # file: msgpack of list[Rollout] (`serialization.encode_value`)
    blob_dir: str
    blob_node: str
    out: str  # .npz to write, see `moerl.audit.score_ranks`
    variants: list[str] = field(default_factory=lambda: ["none", "routing", "mask", "both"])
    dtypes: list[Precision] = field(default_factory=lambda: ["fp32"])
    ep: int = 1
    platform: str = "auto"
    transformer_impl: TransformerImpl = "auto"
    dispatcher: Dispatcher = "alltoall"
    max_tokens_per_microbatch: int = 8192
    version: str = ""  # score only segments of this version, each with its own audit rows
    megatron: dict[str, Any] = field(default_factory=dict)
    fp32_head: bool = False  # of bf16; model.fp32_lm_head

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def load_job(path: Path) -> ScoreJob:
    """Raises ConfigError for an unknown field, variant or precision."""
    data = json.loads(path.read_text(encoding="utf-8"))
    known = ScoreJob.__dataclass_fields__
    for name in data:
        if name not in known:
            raise ConfigError(f"job.{name}", data[name], f"known fields are {', '.join(known)}")
    job = ScoreJob(**data)
    for name in job.variants:
        if name not in VARIANTS:
            raise ConfigError("job.variants", name, f"use {', '.join(VARIANTS)}")
    for name in job.dtypes:
        if name not in get_args(Precision):
            raise ConfigError("job.dtypes", name, "use fp32 or bf16")
    return job
