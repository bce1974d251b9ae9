"""SGLang's defaults on CUDA against the trainer's scores of what they recorded.

An engine in bf16 and a trainer in fp32 with the very same weights: with both replays they differ by
rounding, with rows of other tokens by much more.  The bound is that of the same comparison on a CPU
(tests/e2e/test_replay_engine.py).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from moerl.config.schema import EngineConfig
from moerl.engine.feature_table import FEATURES
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.device_figures import Figure
from tests.helpers.megatron_checks import gaps_of
from tests.helpers.replay_scenario import CHUNK, A, World
from tests.helpers.routes_by_rank import compared, noted

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is None, reason="SGLang's CUDA kernels are not installed"
)
BF16_MAX = 0.15
_HALF_ONLY = ("fa3", "flashinfer")


def recorded(root: Path, dtype: str = "bfloat16", tp: int = 1, **args: object) -> World:
    """A server that was started, recorded two dozen long prompts and stopped."""
    own = {"chunked_prefill_size": CHUNK} | args
    config = EngineConfig(
        platform="cuda", dtype=dtype, tp=tp, args=own, max_total_tokens=16384,
        mem_fraction_static=0.3,
    )  # type: ignore[arg-type]  # fmt: skip
    root.mkdir()
    world = World(root, config)
    try:
        world.run(world.host.start(A), 600.0)
        world.run(world.long_prompts(), 240.0)
    finally:
        world.run(world.host.stop())
    world.loop.close()
    return world


def judged(world: World, figure: Figure, name: str) -> None:
    """Both replays are rounding; rows shifted by one token are not."""
    rollouts = list(world.rollouts.values())
    found = gaps_of(
        world.root, rollouts, world.folders[A], world.store.root, ("both", "both_shifted")
    )
    for variant, gap in found.items():
        figure(f"{name}, {variant}, largest abs(d)", float(np.abs(gap).max()), "nats")
    assert np.abs(found["both"]).max() <= BF16_MAX
    assert np.abs(found["both_shifted"]).max() > BF16_MAX


def test_graphs_record_what_eager_passes_record(tmp_path: Path, figure: Figure) -> None:
    """Decoding and prefill in graphs, as by default, and none."""
    for name, off in (("graphs", False), ("eager", True)):
        world = recorded(tmp_path / name, disable_cuda_graph=off)
        captured = "Capture" in world.log.read_text()
        assert captured is not off, f"{name}: graphs were {'' if captured else 'not '}captured"
        judged(world, figure, name)


@pytest.mark.parametrize("ep", [1, 2])
def test_all_ranks_choose_the_recorded_experts(ep: int, tmp_path: Path, figure: Figure) -> None:
    """The record is that of rank 0; each rank routes after its own all-reduce."""
    if torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    with noted(tmp_path / "routes"):
        world = recorded(tmp_path / "world", tp=2, ep_size=ep)
    judged(world, figure, f"ep {ep}")
    requests, differ = compared(tmp_path / "routes", ranks=2)
    figure(f"requests with other experts on rank 1, ep {ep}", differ, f"of {requests}")
    assert requests >= 24
    assert differ == 0


@pytest.mark.parametrize(
    "backend",
    next(row for row in FEATURES if row.name == "attention backends").args["attention_backend"],
)
def test_attention_backends_agree(backend: str | None, tmp_path: Path, figure: Figure) -> None:
    """Each value that the support table lets through; none = SGLang's choice."""
    if backend == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 is for GPUs of capability 9")
    args = {} if backend is None else {"attention_backend": backend}
    judged(recorded(tmp_path / "one", **args), figure, backend or "SGLang's choice")


def test_routes_are_those_of_transformers(tmp_path: Path, figure: Figure) -> None:
    """In fp32, where rounding moves next to no choice: the fused kernels' ids are transformers'.

    Triton's products round to TF32, so near ties may differ; rows of other tokens agree in less
    than a half.
    """
    world = recorded(tmp_path / "one", "float32", attention_backend="triton")
    model, equal, shifted, rows = tiny.load(world.folders[A]), 0, 0, 0
    for rollout in world.rollouts.values():
        want = tiny.forward(model, rollout.token_ids.tolist())[1][:, :-1]
        got = np.concatenate([world.store.load(part.ids) for part in rollout.routing], axis=1)
        same = np.sort(got, -1) == np.sort(want, -1)
        other = np.sort(np.roll(got, 1, axis=1), -1) == np.sort(want, -1)
        equal, shifted = equal + same.all(-1).sum(), shifted + other.all(-1).sum()
        rows += same.shape[0] * same.shape[1]
    figure("rows with transformers' experts", 100 * float(equal) / rows, "%")
    assert equal >= 0.99 * rows
    assert shifted < 0.5 * rows
