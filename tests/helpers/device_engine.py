"""Records of an engine on the GPU, or on the CPU where the device is the double, and their judges.

A judge is a forward pass of transformers, or of the trainer, on the device of this process.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moerl.config.schema import EngineConfig
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import Array, Rollout
from moerl.records.blob_store import BlobStore
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.device_figures import Figure, on_double, on_gpu
from tests.helpers.megatron_checks import gaps_of
from tests.helpers.replay_scenario import CHUNK, TRUNCATED, A, World, start, tokens

BF16_MAX = 0.15  # of both replays; the bound of the same comparison on a CPU
# Without Transformer Engine a trainer takes local layers by its setting alone, never by itself.
LAYERS = "auto" if importlib.util.find_spec("transformer_engine") is not None else "local"
_RECORDS = "records.msgpack"
needs_kernels = pytest.mark.skipif(
    on_gpu() and importlib.util.find_spec("sgl_kernel") is None,
    reason="SGLang's CUDA kernels are missing: requirements/gpu.lock has them",
)


def recorded(
    root: Path, dtype: str = "bfloat16", tp: int = 1, said: Figure | None = None, **args: object
) -> World:
    """A server that was started, recorded two dozen long prompts and stopped.

    said: takes the seconds to its start and to its first recorded token.
    """
    own = {"chunked_prefill_size": CHUNK} | args
    place = {"platform": "cpu"} if on_double() else {"platform": "cuda", "mem_fraction_static": 0.3}
    fields: dict[str, Any] = {"dtype": dtype, "tp": tp, "args": own, "max_total_tokens": 16384}
    root.mkdir(parents=True)
    world, begin = World(root, EngineConfig(**fields | place)), time.monotonic()
    try:
        world.run(world.host.start(A), 600.0)
        started = time.monotonic() - begin
        world.run(world.complete([start("first", tokens(40, seed=40), TRUNCATED)]), 240.0)
        if said is not None:
            said("start of the engine", started, "s")
            said("first record", time.monotonic() - begin - started, "s")
        world.run(world.long_prompts(), 240.0)
    finally:
        world.run(world.host.stop())
    world.loop.close()
    return world


def keep(world: World) -> None:
    """For judges in other processes."""
    (world.root / _RECORDS).write_bytes(encode_value(list(world.rollouts.values())))


def kept(folder: Path) -> list[Path]:
    """Roots of the worlds that are kept in a folder."""
    return sorted(path.parent for path in folder.glob(f"*/{_RECORDS}"))


def fresh(root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    return root


def rollouts_of(root: Path) -> list[Rollout]:
    found: list[Rollout] = decode_value((root / _RECORDS).read_bytes(), list[Rollout])
    return found


def judged(world: World, figure: Figure, name: str) -> None:
    """Both replays are rounding; rows shifted by one token are not."""
    found = trainer_gaps(world.root, list(world.rollouts.values()), ("both", "both_shifted"))
    for variant, gap in found.items():
        figure(f"{name}, {variant}, largest abs(d)", float(np.abs(gap).max()), "nats")
    assert_replay_is_rounding(found)


def assert_replay_is_rounding(found: dict[str, Array]) -> None:
    assert np.abs(found["both"]).max() <= BF16_MAX
    assert np.abs(found["both_shifted"]).max() > BF16_MAX, "the control went unnoticed"


def trainer_gaps(
    root: Path, rollouts: Sequence[Rollout], variants: Sequence[str]
) -> dict[str, Array]:
    """Trainer's log-probability minus the engine's, by variant."""
    program = "tests.double.run_module" if on_double() else ""
    return gaps_of(
        root, rollouts, root / "A", root / "blobs", variants, through=program,
        transformer_impl=LAYERS,
    )  # fmt: skip


def shifted(ids: Array) -> Array:
    """Rows [L, T, K] of the token before."""
    return np.roll(ids, 1, axis=1)


def experts_that_agree(
    root: Path, dtype: torch.dtype, change: Callable[[Array], Array] = lambda ids: ids
) -> float:
    """Share of rows [layer, token] whose recorded experts are those of transformers on the GPU.

    change: of the recorded ids [L, T, K], for a control.
    """
    model = tiny.load(root / "A").to("cuda", dtype)
    model.set_experts_implementation("eager")  # plain products, one expert after the other
    store, equal, rows = BlobStore(root / "blobs", "node0"), 0, 0
    for rollout in rollouts_of(root):
        want = tiny.forward(model, rollout.token_ids.tolist())[1][:, :-1]
        parts = [store.load(part.ids) for part in rollout.routing]
        got = change(np.concatenate(parts, axis=1))
        equal += int((np.sort(got, -1) == np.sort(want, -1)).all(-1).sum())
        rows += want.shape[0] * want.shape[1]
    return equal / rows
