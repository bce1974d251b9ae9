"""Data-parallel attention on real SGLang: two ranks with requests of their own, experts together.

Every record is scored by Megatron-core with the weights that sampled it; rows moved on by one
position are the control.  SGLang's own checksums are the oracle of a publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from moerl.config.schema import EngineConfig, TinyModel
from moerl.core.json_files import read_model_config
from moerl.core.types import ModelShape, PolicyVersion
from moerl.layout import model_spec
from moerl.records.segment_split import split_segments
from tests.helpers import sync_world
from tests.helpers.replay_scenario import CHUNK, TRUNCATED, A, B, C, Scoring, World, start, tokens
from tests.helpers.tiny_families import make_family_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_GAP, MEAN_GAP = 5e-5, 5e-6  # nats, fp32
DP_ARGS = {"attn_dp_size": 2}
ENGINE = EngineConfig(tp=2, args=DP_ARGS | {"chunked_prefill_size": CHUNK}, max_total_tokens=16384)
EXPERT_PARALLEL = replace(ENGINE, args=ENGINE.args | {"ep_size": 2})


@dataclass
class Served:
    """What an engine of two attention ranks did."""

    scores: Scoring
    log: str
    listeners: dict[str, int]  # by process: TCP sockets that wait for callers


async def uneven(world: World) -> None:
    """One request, so that a rank has none; then many of all lengths, the longest in chunks."""
    await world.complete([start("alone", tokens(9, seed=1), TRUNCATED)])
    lengths = (1, 5, 33, 70, 90, 150)
    await world.complete([start(f"many.{n}", tokens(n, seed=n), TRUNCATED) for n in lengths])


def serve(world: World, play: Callable[[World], object] = uneven) -> Served:
    try:
        world.run(world.host.start(A), 240.0)
        server = world.host._server
        assert server is not None
        assert server.layout is not None
        assert (server.layout.tp, server.layout.dp) == (2, 2)
        world.run(play(world), 240.0)  # type: ignore[arg-type]
        listeners = {" ".join(p.cmdline()).strip(): listening(p) for p in server._tree()}
    finally:
        world.run(world.host.stop())
        world.loop.close()
    return Served(Scoring(world, world.root), world.log.read_text(), listeners)


def listening(process: psutil.Process) -> int:
    return sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp"))


def scored(served: Served) -> Served:
    rollouts = list(served.scores.world.rollouts.values())
    served.scores.add("all", rollouts, A, ["both", "both_shifted"])
    served.scores.run()
    return served


def all_gaps(served: Served, name: str = "all", variant: str = "both") -> np.ndarray:
    return np.abs(np.concatenate(list(served.scores.gaps(name, variant).values())))


def check(served: Served, name: str = "all") -> None:
    gap = all_gaps(served, name)
    print(f"{name}: max {gap.max():.1e}, mean {gap.mean():.1e} over {len(gap)} tokens")
    assert gap.max() <= MAX_GAP
    assert gap.mean() <= MEAN_GAP
    assert all_gaps(served, name, "both_shifted").max() > 1e-2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return scored(serve(World(tmp_path_factory.mktemp("dp"), ENGINE)))


def test_records_of_all_ranks_match_the_weights(served: Served) -> None:
    check(served)
    for rank in ("DP0", "DP1"):
        assert any(rank in line for line in served.log.splitlines() if "Prefill batch" in line)


def test_its_processes_speak_through_files(served: Served) -> None:
    """SGLang would listen on loopback without asking who connects; gloo's sockets remain."""
    ports = {name: n for name, n in served.listeners.items() if "scheduler" not in name}
    assert {"sglang::data_parallel_controller", "sglang::detokenizer"} <= ports.keys()
    assert sum(ports.values()) == 1, ports


@pytest.mark.full
def test_with_expert_parallelism(tmp_path: Path) -> None:
    check(scored(serve(World(tmp_path, EXPERT_PARALLEL))))


@pytest.mark.full
@pytest.mark.parametrize("ep", [1, 2])
def test_latent_attention(ep: int, tmp_path: Path) -> None:
    """DeepSeek-V3: a rank attends to its own latents; its heads are whole."""
    folder = tmp_path / "model"
    make_family_model(folder, "deepseek_v3", TinyModel(experts_per_token=4, initializer_range=0.15))
    shape = shape_of(folder)

    async def play(world: World) -> None:
        prompts = {n: [t % shape.vocab_size for t in tokens(n, seed=n)] for n in (3, 40, 90, 150)}
        await world.complete([start("alone", (5, 6, 7), TRUNCATED)])
        await world.complete([start(f"many.{n}", tuple(p), TRUNCATED) for n, p in prompts.items()])

    engine = replace(ENGINE, args=ENGINE.args | {"ep_size": ep})
    served = scored(serve(World(tmp_path, engine, shape=shape, model=folder), play))
    check(served)


def shape_of(folder: Path) -> ModelShape:
    spec = model_spec(read_model_config(folder))
    return ModelShape(
        vocab_size=spec.vocab_size,
        num_layers=spec.layers,
        moe_layers=spec.moe_layers,
        num_experts=spec.experts,
        top_k=spec.experts_per_token,
    )


@pytest.mark.full
def test_interruptions_and_updates(tmp_path: Path) -> None:
    """The whole scenario of an engine with plain attention: three versions, several turns."""
    served = serve(World(tmp_path, EXPERT_PARALLEL), World.play)
    rollouts = [r for r in served.scores.world.rollouts.values() if r.sampling.truncates]
    parts = [part for rollout in rollouts for part in split_segments(rollout)]
    for version in (A, B, C):
        own = [part for part in parts if part.versions[0].version == version]
        assert own, version
        served.scores.add(f"own{version.step}", own, version, ["both", "both_shifted"])
    served.scores.run()
    for version in (A, B, C):
        check(served, f"own{version.step}")


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[sync_world.World]:
    world = sync_world.World(tmp_path, engines=1, tp=2, args=DP_ARGS | {"ep_size": 2})
    yield world
    world.end()


@pytest.mark.full
def test_a_publish_is_what_sglang_would_have_loaded(publishing: sync_world.World) -> None:
    """Attention is whole on each rank, experts are cut: other bytes than for plain attention."""
    start_sums = publishing.checksums(0)
    publishing.done(publishing.publish())
    last = publishing.publish()
    assert publishing.done(last)["async/sync_engines_behind"] == 0
    publishing.check_serves(0, last.version)
    served = publishing.checksums(0)
    assert len(served) == 2 * 2, "each attention rank answers for both ranks"
    assert all(a[name] != b[name] for a, b in zip(start_sums, served, strict=True) for name in a)
    assert publishing.load_folder(0, PolicyVersion(0, 1)) != served, "control: another version"
    assert publishing.load_folder(0, last.version) == served
