"""Engine and trainer together on one GPU, a step after the other: `tools/gpu-check --loop`.

On the double the trainer's own forward pass and the end of a publish are on it; engines, and both
sides of whole runs, are on the CPU, with the settings of the same tests.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from moerl.config.load import load_saved
from moerl.config.schema import ParallelConfig
from moerl.core.types import PolicyVersion
from moerl.layout import megatron_tiles
from tests.helpers import device_engine as engines
from tests.helpers.device_figures import Figure, on_double, on_gpu
from tests.helpers.device_loop import (
    FOLDER,
    begun,
    ends,
    k3,
    rise,
    said,
    steps_of,
    trained,
    trained_rows,
)
from tests.helpers.device_publish import OneRank
from tests.helpers.device_trainer import TINY
from tests.helpers.large_random_model import SHAPE, SMALL, large_model

SEEN = ("both", "routing", "mask", "none", "both_shifted")
# name: graphs, dtype, SGLang's backend of attention.  In fp32 routes must be transformers'.
FORMS: dict[str, tuple[bool, str, str | None]] = {
    "eager": (False, "bfloat16", None),
    "eager-triton": (False, "float32", "triton"),
    "graphs": (True, "bfloat16", None),
    "graphs-triton": (True, "float32", "triton"),
}
# Rows whose experts are those of transformers: a bf16 engine rounds on the way to each router.
LEAST_EQUAL = {"float32": 0.99, "bfloat16": 0.9}


# --- 1: libraries ---------------------------------------------------------------------------------
def test_a_product_and_an_attention_call(figure: Figure) -> None:
    """In bf16 against fp64; control: the product with the rows of another matrix."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=draw).bfloat16() for _ in range(2))
    exact, found = a.double() @ b.double(), a.cuda() @ b.cuda()
    error = _error(found, exact)
    figure("a bf16 product, from fp64", error, "of the largest")
    assert error <= 2**-7 < _error(found.roll(1, 0), exact)
    rows = [torch.randn(1, 4, 64, 64, generator=draw).bfloat16() for _ in range(3)]
    exact = attention(*(x.double() for x in rows), is_causal=True)
    found = attention(*(x.cuda() for x in rows), is_causal=True)
    error = _error(found, exact)
    figure("attention in bf16, from fp64", error, "of the largest")
    assert error <= 2**-6 < _error(found.roll(1, 2), exact)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.cpu().double() - exact).abs().max() / exact.abs().max())


def test_kernels_of_sglang(figure: Figure) -> None:
    """They load, and the attention that SGLang takes on Hopper is torch's."""
    importlib.import_module("sgl_kernel")
    figure("operators of sgl_kernel", float(len(dir(torch.ops.sgl_kernel))), "names")
    if torch.cuda.get_device_capability()[0] != 9:
        return
    fa3 = importlib.import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    q, k, v = (torch.randn(64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, 64], device="cuda", dtype=torch.int32)
    found = fa3(
        q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=64, max_seqlen_k=64, causal=True
    )
    found = found[0] if isinstance(found, tuple) else found
    rows = (x.double().cpu().transpose(0, 1)[None] for x in (q, k, v))
    exact = attention(*rows, is_causal=True)[0].transpose(0, 1)
    figure("fa3, from fp64", _error(found, exact), "of the largest")
    assert _error(found, exact) <= 2**-6


def test_transformer_engine_is_whole_or_absent(figure: Figure) -> None:
    """Half of it would stop the import of megatron-core in a rank."""
    names = [
        str(found.metadata["Name"])
        for found in importlib.metadata.distributions()
        if str(found.metadata["Name"]).replace("_", "-").startswith("transformer-engine")
    ]
    figure("parts of Transformer Engine", float(len(names)), "distributions")
    if names:
        importlib.import_module("transformer_engine.pytorch")


# --- 2 to 4: records ------------------------------------------------------------------------------
@engines.needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_first_recorded_token(form: str, figure: Figure) -> None:
    """Of an engine of a tiny model; its records stay for the tests below."""
    graphs, dtype, backend = FORMS[form]
    root = engines.fresh(FOLDER / f"{form}-{dtype}")
    args = {} if on_double() else {"disable_cuda_graph": not graphs, "attention_backend": backend}
    world = engines.recorded(root, dtype, said=figure, **args)
    if not on_double():
        captured = "Capture" in world.log.read_text()
        assert captured is graphs, f"graphs were {'' if captured else 'not '}captured"
    for rollout in world.rollouts.values():
        assert sum(len(world.store.load(part.ids)[0]) for part in rollout.routing) > 0
    engines.keep(world)


def _kept() -> list[Path]:
    found = engines.kept(FOLDER)
    assert found, f"no engine has left records in {FOLDER}: the checks before this one make them"
    return found


def test_records_are_those_of_transformers(figure: Figure) -> None:
    """On the same GPU; control: rows of the token before."""
    for root in _kept():
        dtype = root.name.rpartition("-")[2]
        equal = engines.experts_that_agree(root, getattr(torch, dtype))
        wrong = engines.experts_that_agree(root, getattr(torch, dtype), engines.shifted)
        figure(f"{root.name}: rows with transformers' experts", 100 * equal, "%")
        figure(f"{root.name}: of the token before", 100 * wrong, "%")
        assert equal >= LEAST_EQUAL[dtype], root.name
        assert wrong < 0.5, "the control went unnoticed"


def test_trainer_agrees_under_the_records(figure: Figure) -> None:
    """Log-probabilities of the sampled tokens, the trainer's minus the engine's."""
    for root in _kept():
        found = engines.trainer_gaps(root, engines.rollouts_of(root), SEEN)
        for name, gap in found.items():
            figure(f"{root.name}, {name}: largest abs(d)", float(np.abs(gap).max()), "nats")
            figure(f"{root.name}, {name}: k3", k3(gap), "nats")
        engines.assert_replay_is_rounding(found)


# --- 5 to 10: runs --------------------------------------------------------------------------------
@engines.needs_kernels
def test_quickstart_learns(tmp_path: Path, figure: Figure) -> None:
    """Its weights are published after each step, by cuda_ipc on a GPU."""
    run = trained(tmp_path, "quickstart")
    transport = load_saved(run.dir.config).sync.transport
    assert transport == "cuda_ipc" or not on_gpu(), transport
    before, after = rise(run.rows())
    figure("reward of the first quarter", before, "of 1")
    figure("reward of the last quarter", after, "of 1")
    for name, value, unit in said(run):
        figure(name, value, unit)
    assert after > 2 * before


@engines.needs_kernels
@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_a_run_publishes_by(transport: str, tmp_path: Path, figure: Figure) -> None:
    """Receivers compare the digests of all buckets before they commit: no engine stays behind."""
    run = trained(tmp_path, transport)
    for name, value, unit in said(run):
        figure(f"{transport}: {name}", value, unit)


@pytest.mark.parametrize("transport", ["shm", "cuda_ipc"])
def test_digests_of_a_publish(transport: str, figure: Figure) -> None:
    """Both ends in one process; control: a byte that changed on the way is found by its digest.

    For the double: CUDA maps no memory of the own process.
    """
    spec = TINY.spec()
    live = {
        name: torch.randn(local.shape, device="cuda")
        for name, local in megatron_tiles(spec, ParallelConfig(), 0, "local").items()
    }
    ends = OneRank(spec, transport)
    ends.snapshot.store(live, PolicyVersion(0, 1))
    published = ends.publish()
    figure(f"{transport}: bytes with equal digests", float(published.num_bytes), "bytes")
    assert ends.differing(live) == []
    ends.snapshot.store(live, PolicyVersion(0, 2))
    with pytest.raises(AssertionError, match=r"buckets .* differ"):
        ends.publish(damage=True)
    ends.close()


@engines.needs_kernels
def test_turns_with_one_device(tmp_path: Path, figure: Figure) -> None:
    run = trained(tmp_path, "turns")
    for name, value, unit in said(run):
        figure(name, value, unit)


@engines.needs_kernels
def test_a_model_of_401_million(tmp_path: Path, figure: Figure) -> None:
    """Random, of the shape of smollm2-moe, on a task that needs no package."""
    small = on_double()
    model = large_model(FOLDER / ("small" if small else "401m"), SMALL if small else SHAPE)
    run = trained(tmp_path, "401m", f"model.path={model}")
    for name, value, unit in said(run):
        figure(name, value, unit)


@engines.needs_kernels
def test_adapters(tmp_path: Path, figure: Figure) -> None:
    run = trained(tmp_path, "lora")
    for name, value, unit in said(run):
        figure(name, value, unit)


@engines.needs_kernels
def test_a_run_outlives_its_engine_and_its_trainer(tmp_path: Path, figure: Figure) -> None:
    """SIGKILL of each, one after the other: the run makes all of its steps."""
    run = begun(tmp_path, "kills")
    try:
        for victim in ("engine-0", "trainer"):
            seen = len(run.rows())
            run.wait_for(lambda seen=seen: len(run.rows()) >= seen + 2)  # type: ignore[misc]
            run.wait_for(lambda: run.dir.latest_checkpoint() is not None)
            os.kill(run.pids()[victim], signal.SIGKILL)
    finally:
        status = run.finish(600.0)
    assert status == 0, ends(run)
    rows = trained_rows(run)
    assert [row["step"] for row in rows] == list(range(steps_of("kills")))
    figure("restarts of the engine", max(row["async/engine_restarts"] for row in rows), "times")
    assert max(row["async/engine_restarts"] for row in rows) >= 1
    assert rows[-1]["version"].partition(".")[0] != "0", "the trainer was not started again"
