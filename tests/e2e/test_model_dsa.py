"""Keep Indexer end to end: a real SGLang records positions, Megatron-core attends to them.

A tiny DeepSeek-V3.2 with few index heads: many of its scores are exactly 0, so what the trainer's
own indexer chooses differs from the engine's choice although weights and precision are equal.  Long
requests are aborted, resumed after an update, and each segment is scored under its own weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.engine.host import EngineContext, EngineHost
from moerl.layout import hf_shapes, model_spec
from moerl.records.blob_store import BlobStore
from moerl.run_dir import RunDir
from moerl.types import ModelShape, PolicyVersion, SamplingParams, check
from tests.helpers import replay_scenario as scenario
from tests.helpers.replay_scenario import A, B, Scoring, World, start

pytestmark = pytest.mark.timeout(400)
LIMIT = 5e-5
SAMPLING = SamplingParams(40, top_p=0.9, top_k=60, ignore_eos=True)
CONFIG = json.loads(
    (Path(__file__).resolve().parents[1] / "data/layout_families.json").read_text()
)["deepseek_v32"] | {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "index_topk": 24,
    "index_n_heads": 4,  # few: their scores tie at 0
    "index_head_dim": 32,
    "max_position_embeddings": 2048,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def save_models(root: Path) -> dict[PolicyVersion, Path]:
    """A random model, and one that differs from it by a little noise.

    SGLang keeps weights_proj in bf16, so its values are those of bf16.
    """
    generator, folders = torch.Generator().manual_seed(0), {}
    weights = {
        name: 0.1 * torch.randn(shape, generator=generator) + ("norm.weight" in name)
        for name, shape in hf_shapes(model_spec(CONFIG)).items()
    }
    for version in (A, B):
        folders[version] = root / str(version)
        folders[version].mkdir(parents=True)
        (folders[version] / "config.json").write_text(json.dumps(CONFIG))
        for name, tensor in weights.items():
            if version == B and tensor.dim() == 2:
                tensor += 0.002 * torch.randn(tensor.shape, generator=generator)
            if "weights_proj" in name:
                tensor.copy_(tensor.bfloat16())
        save_file(weights, folders[version] / "model.safetensors", metadata={"format": "pt"})
    return folders


class SparseWorld(World):
    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.folders = save_models(self.root)
        self.store = BlobStore(self.root / "blobs", "node0")
        run = RunDir(self.root / "run")
        run.create()
        self.log = run.logs / "engine0.log"
        spec = model_spec(CONFIG)
        self.shape = ModelShape(
            vocab_size=spec.vocab_size,
            num_layers=spec.layers,
            moe_layers=spec.moe_layers,
            num_experts=spec.experts,
            top_k=spec.experts_per_token,
            index_layers=spec.index_layers,
            index_topk=spec.index_topk,
        )
        context = EngineContext(self.folders[A], self.shape, ReplayConfig(), run, scenario.TOKEN)
        self.host = EngineHost(0, self.config, context, self.store)

    async def play(self) -> None:
        await self.complete(
            [start(f"plain.{n}", scenario.tokens(n, seed=n), SAMPLING) for n in (3, 30, 150)]
        )
        await self.complete([self.turn("turn", "plain.30")])
        # computed at the same time, so that all of them publish one prefix, with other endings
        shared = scenario.tokens(50, seed=9)
        await self.complete(
            [
                start(f"same.{i}", shared[: 26 + 4 * i] + scenario.tokens(3 + i, seed=i), SAMPLING)
                for i in range(6)
            ]
        )
        seams = [
            start(f"seam.{i}", scenario.tokens(20 + 30 * i, seed=i), scenario.LONG)
            for i in range(2)
        ]
        await self.interrupt(seams)
        await self.load(B)
        for seam in seams:
            seam.sampling = replace(seam.sampling, max_new_tokens=seam.num_sampled + 24)
        await self.complete(seams)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparseWorld]:
    config = EngineConfig(
        count=1,
        max_running_requests=8,
        max_total_tokens=8192,
        args={"chunked_prefill_size": scenario.CHUNK, "disable_radix_cache": False},
    )
    world = SparseWorld(tmp_path_factory.mktemp("dsa"), config)
    try:
        world.run(world.host.start(A), timeout_s=120)
        world.run(world.play(), timeout_s=120)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()


@pytest.fixture(scope="module")
def scores(world: SparseWorld, tmp_path_factory: pytest.TempPathFactory) -> Scoring:
    scoring = Scoring(world, tmp_path_factory.mktemp("scores"))
    variants = ("both", "both_indexer_live", "both_indexer_moved", "both_shifted", "mask")
    under_a = [r for r in world.rollouts.values() if len(r.versions) == 1]
    scoring.add("a", under_a, A, variants)
    for name, version in (("seam_a", A), ("seam_b", B)):
        seams = [r for r in world.rollouts.values() if len(r.versions) > 1]
        scoring.add(name, seams, version, variants)
        scoring.jobs[name] = replace(scoring.jobs[name], version=str(version))
        scoring.jobs[name].save(scoring.folder / f"{name}.json")
    scoring.run()
    return scoring


def largest(scores: Scoring, name: str, variant: str) -> float:
    return max(float(np.abs(gap).max()) for gap in scores.gaps(name, variant).values())


def test_records_are_whole_and_pass_the_door(world: SparseWorld) -> None:
    assert {"plain.150", "turn.30", "seam.0", "seam.1"} <= set(world.rollouts)
    for rollout in world.rollouts.values():
        check(rollout, world.shape)
        assert rollout.indexer[-1].row_end == rollout.num_tokens - 1
    assert world.cached[f"turn.30@{A}"] > 30, "the turn found its prefix in the cache"


@pytest.mark.parametrize("name", ["a", "seam_a", "seam_b"])
def test_recorded_positions_make_both_sides_equal(name: str, scores: Scoring) -> None:
    assert largest(scores, name, "both") <= LIMIT
    for control in ("both_indexer_live", "both_indexer_moved", "both_shifted"):
        assert largest(scores, name, control) > 1000 * LIMIT, control
