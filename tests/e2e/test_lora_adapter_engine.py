"""A live SGLang server whose versions are adapters in its slots, against transformers.

The oracle is transformers with W0 + s B A for weights; controls score the same tokens under another
version, under the base, and with rsLoRA's scale left out.  One server serves the
file, in order; the default selection has its first half.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import EngineError
from moerl.core.types import Finish, GenerateRequest, PolicyVersion, SamplingParams, Segment
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.engine.host.sglang_client import BadRequest
from moerl.layout import hf_shapes
from moerl.layout.adapters import adapter_shapes
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.lora_oracle import read_spec
from tests.helpers.patience import patience
from tests.helpers.session_publisher import Publisher

if TYPE_CHECKING:
    from tests.helpers.warm_engines import WarmEngines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

V0, V1, V2, V3 = (PolicyVersion(0, step) for step in range(4))
LORA = LoraConfig(
    rank=4,
    alpha=6,
    rslora=True,
    targets=["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"],
    ranks={"*.layers.1.*": 2},
    delivery="adapter",
    slots=2,
)
CLOSE = 5e-5  # nats, fp32 on both sides
SHORT, LONG = SamplingParams(12, ignore_eos=True), SamplingParams(250, ignore_eos=True)
T = TypeVar("T")


class World:
    """A host, its event loop, and every version as a model of transformers."""

    def __init__(self, root: Path, tp: int = 1) -> None:
        torch.set_num_threads(1)
        self.loop = asyncio.new_event_loop()
        self.base = tiny.save(root / "base", 0, moe_ffn=64)
        spec = read_spec(self.base)
        self.shapes = adapter_shapes(hf_shapes(spec), LORA.rank_of)
        self.factors = {version: self._factors(version) for version in (V1, V2, V3)}
        self.models = {
            version: self.model(factors, LORA.scale) for version, factors in self.factors.items()
        }
        self.store = BlobStore(root / "blobs", "node0")
        run = RunDir(root / "run")
        run.create()
        context = EngineContext(self.base, tiny.SHAPE, ReplayConfig(), run, "token", lora=LORA)
        config = EngineConfig(tp=tp, max_total_tokens=16384, start_timeout_s=600.0)
        self.host = EngineHost(0, config, context, self.store)
        self.publisher = Publisher(
            self.host, dict.fromkeys(self.factors, self.base), LORA, self.factors
        )

    def _factors(self, version: PolicyVersion) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(version.step)
        return {n: 0.2 * torch.randn(s, generator=chance) for n, s in self.shapes.items()}

    def model(self, factors: dict[str, Tensor], scale: float) -> torch.nn.Module:
        model = tiny.load(self.base)
        named = dict(model.named_parameters())
        for module in {name.rpartition(".")[0] for name in factors}:
            product = factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
            named[f"{module}.weight"].data += scale * product
        return model

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, patience(timeout_s)))

    def publish(self, version: PolicyVersion, timeout_s: float = 60.0) -> None:
        async def both() -> None:
            await self.publisher.stage(version)
            await self.publisher.commit(version, timeout_s)

        self.run(both())

    def generate(self, *asked: GenerateRequest) -> list[Segment]:
        found = self.run(self.host.generate(asked))
        assert all(isinstance(one, Segment) for one in found), found
        return [one for one in found if isinstance(one, Segment)]

    def gap(self, model: torch.nn.Module, ask: GenerateRequest, got: Segment) -> float:
        """Largest difference of the sampled tokens' log-probabilities."""
        ids = [*ask.token_ids.tolist(), *got.output_ids.tolist()]
        logp = tiny.forward(model, ids)[0].log_softmax(-1)[len(ask.token_ids) - 1 : -1]
        want = logp.gather(-1, torch.from_numpy(got.output_ids).long()[:, None])[:, 0]
        assert got.sealed_logprobs is not None
        return float(np.abs(self.store.load(got.sealed_logprobs.values) - want.numpy()).max())

    def check(self, version: PolicyVersion, ask: GenerateRequest, got: Segment) -> None:
        """It ran under this version alone: log-probabilities, routes, and what is recorded."""
        assert got.version == version
        found = self.gap(self.models[version], ask, got)
        others = [m for v, m in self.models.items() if v != version] + [tiny.load(self.base)]
        others.append(self.model(self.factors[version], LORA.alpha / LORA.rank))  # plain scaling
        controls = [self.gap(model, ask, got) for model in others]
        print(f"{version}: {found:.1e}, controls {min(controls):.1e} and more")
        assert found <= CLOSE
        assert min(controls) > 100 * CLOSE
        ids = [*ask.token_ids.tolist(), *got.output_ids.tolist()]
        assert got.routing is not None
        routes = tiny.forward(self.models[version], ids)[1][:, : len(ids) - 1]
        np.testing.assert_array_equal(self.store.load(got.routing.ids), routes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm_engines: WarmEngines) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("slots"))
    try:
        with warm_engines.serving():
            world.run(world.host.start(V0), 600.0)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()


def request(
    name: str, length: int, sampling: SamplingParams = SHORT, seed: int = 0
) -> GenerateRequest:
    ids = np.random.RandomState(seed).randint(4, tiny.VOCAB, size=length).astype(np.int32)
    return GenerateRequest(name, 0, ids, 0, sampling)


async def until(world: World, running: int) -> None:
    while world.host._health.running < running:
        await asyncio.sleep(0.02)


def test_the_base_alone_is_not_served(world: World) -> None:
    with pytest.raises(EngineError, match=r"no adapter of 0\.0 yet"):
        world.generate(request("early", 8))


def test_an_adapter_is_served_as_the_merged_model(world: World) -> None:
    world.publish(V1)
    asked = [request(f"a{length}", length, seed=length) for length in (8, 33, 60)]
    for ask, got in zip(asked, world.generate(*asked), strict=True):
        world.check(V1, ask, got)


def test_two_versions_at_once_and_requests_end_under_theirs(world: World) -> None:
    """Neither an abort nor a wait: the long request runs through the update."""
    long, prompt = request("long", 20, LONG, seed=7), request("again", 40, seed=60)

    async def both() -> tuple[list[Any], list[Any]]:
        older = asyncio.create_task(world.host.generate([long]))
        await until(world, 1)
        await world.publisher.stage(V2)
        closed = await world.publisher.commit(V2)
        assert closed.aborted == 0
        newer = await world.host.generate([prompt])
        assert not older.done(), "the older request is to run beside the newer one"
        return await older, newer

    (old,), (new,) = world.run(both(), 400.0)
    assert old.finish == Finish.LENGTH
    assert len(old.output_ids) == LONG.max_new_tokens
    world.check(V1, long, old)
    world.check(V2, prompt, new)


def test_versions_share_no_prefix(world: World) -> None:
    prompt = request("p", 64, seed=3)
    first, second = (world.generate(replace(prompt, rollout_id=f"p{i}"))[0] for i in range(2))
    assert first.cached_tokens == 0
    assert second.cached_tokens > 0, "the same version reads its own prefix"
    world.publish(V3)
    other, own = (world.generate(replace(prompt, rollout_id=f"q{i}"))[0] for i in range(2))
    assert other.cached_tokens == 0
    assert own.cached_tokens > 0
    world.check(V2, prompt, second)
    world.check(V3, prompt, own)


@pytest.mark.full
def test_an_update_waits_for_a_slot_and_is_refused_while_all_are_busy(world: World) -> None:
    slots = world.host._updates.slots
    assert slots is not None
    assert slots.loaded == (V2, V3), "V1 has no request: its slot was used again"
    newest = PolicyVersion(0, 4)
    world.factors[newest] = world._factors(newest)
    world.models[newest] = world.model(world.factors[newest], LORA.scale)
    world.publisher = Publisher(
        world.host, dict.fromkeys(world.factors, world.base), LORA, world.factors
    )
    held = slots.enter(V2, 1)
    assert held == "moerl-v0.2"
    with pytest.raises(EngineError, match=r"requests still run under all 2 adapters \(0.2, 0.3\)"):
        world.publish(newest, 1.0)
    (still,) = world.generate(ask := request("still", 9, seed=5))
    world.check(V3, ask, still)

    async def waits() -> None:
        asyncio.get_running_loop().call_later(1.0, slots.leave, V2, 1)
        await world.publisher.stage(newest)
        await world.publisher.commit(newest)

    world.run(waits())
    assert slots.loaded == (V3, newest)
    (got,) = world.generate(ask := request("new", 9, seed=6))
    world.check(newest, ask, got)


@pytest.mark.full
@pytest.mark.parametrize("name", [None, "moerl-v0.2", "other"])
def test_a_request_without_a_loaded_adapter_is_refused(world: World, name: str | None) -> None:
    one = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "lora_path": name}
    batch = {key: [value, value] for key, value in one.items()}
    client = world.host._alive()
    for body in (one, batch, batch | {"lora_path": ["moerl-v0.4", name]}):
        with pytest.raises(BadRequest, match="the base alone is not served"):
            world.run(client._post("/generate", body))


@pytest.mark.full
def test_factors_that_do_not_fit_are_refused_before_the_scheduler_sees_them(world: World) -> None:
    """SGLang would answer success and die in the first forward pass."""
    wide = replace(LORA, rank=8)
    shapes = adapter_shapes(hf_shapes(read_spec(world.base)), wide.rank_of)
    later = PolicyVersion(0, 9)
    factors = {later: {name: torch.ones(shape) for name, shape in shapes.items()}}
    bad = Publisher(world.host, {later: world.base}, wide, factors)
    with pytest.raises(EngineError, match="need a new start"):
        world.run(bad.stage(later))
    world.run(world.host.start(V0), 600.0)
    with pytest.raises(
        EngineError, match=r"its slots hold A \[12, 64\] .* factors need \[24, 64\]"
    ):
        world.run(bad.stage(later))
    world.publish(V2)
    (got,) = world.generate(ask := request("alive", 16, seed=8))
    world.check(V2, ask, got)
    assert world.host._updates.slots is not None
    assert world.host._updates.slots.loaded == (V2,), "a server that starts has no adapter"


@pytest.mark.full
def test_ranks_take_their_parts_of_an_adapter(tmp_path: Path) -> None:
    world = World(tmp_path, tp=2)
    try:
        world.run(world.host.start(V0), 600.0)
        for version in (V1, V2):
            world.publish(version)
            (got,) = world.generate(ask := request(f"r{version.step}", 30, seed=version.step))
            world.check(version, ask, got)
    finally:
        world.run(world.host.stop())
        world.loop.close()
