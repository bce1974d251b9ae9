"""Adapter slots: which versions an engine holds, and what its ranks put into them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import EngineError, LayoutError
from moerl.core.types import PolicyVersion
from moerl.engine.host.adapter_slots import AdapterSlots, slot_arguments
from moerl.engine.plugin import adapter_hooks, in_flight
from moerl.layout import ModelSpec, at, hf_shapes, model_spec, sglang_tiles
from moerl.layout.adapters import adapter_shapes
from moerl.trainer.model.adapted_layers import Factors
from moerl.trainer.model.served_adapters import ServedAdapters
from moerl.weight_sync.adapters.engine_adapters import SlotAdapters
from moerl.weight_sync.adapters.factor_plan import FactorPlan
from moerl.weight_sync.buckets import WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan
from tests.helpers.trainer_support import ROOT

V1, V2, V3 = (PolicyVersion(1, step) for step in range(3))
LORA = LoraConfig(
    rank=3,
    alpha=4.5,
    rslora=True,
    targets=["*.q_proj", "*.v_proj", "*.o_proj"],
    ranks={"*.layers.1.*": 2},
    delivery="adapter",
)


class Client:
    """A server that unloads what it is asked to."""

    def __init__(self) -> None:
        self.unloaded: list[str] = []

    async def unload_adapter(self, name: str) -> None:
        self.unloaded.append(name)


# --- the host -------------------------------------------------------------------------------------
async def test_a_slot_is_free_when_its_last_request_ended_and_a_newer_version_is_served() -> None:
    slots, client = AdapterSlots(2), Client()
    await slots.make_room(client, 0.0)
    slots.add(V1)
    assert slots.enter(V1, 2) == "moerl-v1.0"
    await slots.make_room(client, 0.0)
    slots.add(V2)
    slots.leave(V1, 1)
    with pytest.raises(EngineError, match=r"all 2 adapters \(1.0, 1.1\); raise lora.slots"):
        await slots.make_room(client, 0.01)
    assert client.unloaded == [], "V1 has a request, V2 is the newest"
    waits = asyncio.create_task(slots.make_room(client, 60.0))
    await asyncio.sleep(0)
    assert not waits.done()
    slots.leave(V1, 1)
    await waits
    assert client.unloaded == ["moerl-v1.0"]
    slots.add(V3)
    assert slots.loaded == (V2, V3)


def test_a_version_that_the_server_has_not_is_refused() -> None:
    slots = AdapterSlots(2)
    with pytest.raises(EngineError, match=r"no adapter of 1\.0 yet"):
        slots.enter(V1, 1)
    slots.add(V1)
    slots.enter(V1, 1)
    slots.clear()  # its server was replaced
    slots.leave(V1, 1)
    assert slots.loaded == ()


def test_the_server_has_a_slot_more_than_versions_for_batches_without_an_adapter() -> None:
    args = slot_arguments(LORA, {"device": "cpu"})
    assert args["max_loras_per_batch"] == LORA.slots + 1
    assert args["max_lora_rank"] == 3
    assert args["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert args["lora_backend"] == "torch_native"
    assert "lora_backend" not in slot_arguments(LORA, {})
    assert slot_arguments(replace(LORA, delivery="merged"), {"device": "cpu"}) == {}
    head = slot_arguments(replace(LORA, targets=["*.o_proj"], ranks={"*": 8}), {})
    assert (head["lora_target_modules"], head["max_lora_rank"]) == (["o_proj"], 8)


# --- a rank of the engine -------------------------------------------------------------------------
class Slots:
    """A live model whose slots are filled as SGLang fills them, from whole factors."""

    def __init__(self, spec: ModelSpec, tp: int, rank: int, largest: int = 3) -> None:
        self._named = sglang_tiles(spec, tp, rank)
        self._weights = {name: torch.zeros(local.shape) for name, local in self._named.items()}
        self._largest = largest
        self._slots: dict[str, tuple[Tensor, Tensor]] = {}
        self.spoil = ""

    def tensors(self) -> Mapping[str, Tensor]:
        return self._weights

    def run_hook(self, name: str) -> None:
        raise AssertionError(name)

    def slots(self, module: str) -> tuple[Tensor, Tensor]:
        rows, cols = self._weights[f"{module}.weight"].shape
        parts = 3 if module.endswith("qkv_proj") else 1
        made = torch.zeros(2, parts * self._largest, cols), torch.zeros(2, rows, self._largest)
        return self._slots.setdefault(module, made)

    def serve_adapter(
        self, version: str, tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> int:
        rank = config["r"]
        for local_name, local in self._named.items():
            module = local_name.removesuffix(".weight")
            parts = list(dict.fromkeys(tile.hf for tile in local.tiles))
            for tile in local.tiles:
                hf = f"base_model.model.{tile.hf.removesuffix('.weight')}"
                if f"{hf}.lora_A.weight" not in tensors:
                    continue
                a, b = self.slots(module)
                first = parts.index(tile.hf) * rank
                whole_a, whole_b = (tensors[f"{hf}.lora_{x}.weight"] for x in "AB")
                cols, own = at((tile.hf_box[1],))[0], at((tile.box[1],))[0]
                a[1, first : first + rank, own] = whole_a[:, cols]
                b[1, at((tile.box[0],))[0], :rank] = whole_b[at((tile.hf_box[0],))[0]]
        if self.spoil:
            self.slots(self.spoil)[1][1, -1, 0] += 1e-6
        return 1


def _spec() -> ModelSpec:
    return model_spec(
        json.loads((ROOT / "tests/data/layout_families.json").read_text())["qwen3_moe"]
    )


def _filled(adapters: SlotAdapters) -> None:
    chance = torch.Generator().manual_seed(3)
    for factor in adapters.factors.values():
        factor.copy_(torch.randn(factor.shape, generator=chance))


@pytest.mark.parametrize("tp", [1, 2])
def test_a_slot_holds_what_the_layout_tables_say(tp: int) -> None:
    for rank in range(tp):
        model = Slots(_spec(), tp, rank)
        adapters = SlotAdapters(_spec(), EngineLayout(tp=tp), rank, LORA, model)
        _filled(adapters)
        adapters.commit(model, "1.1")


@pytest.mark.parametrize("module", ["qkv_proj", "o_proj"])
def test_a_slot_with_something_else_is_refused(module: str) -> None:
    model = Slots(_spec(), 2, 1)
    model.spoil = f"model.layers.1.self_attn.{module}"
    adapters = SlotAdapters(_spec(), EngineLayout(tp=2), 1, LORA, model)
    _filled(adapters)
    with pytest.raises(EngineError, match=f"{module}: its slot does not hold the factors of 1.1"):
        adapters.commit(model, "1.1")


def test_a_shape_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(LayoutError, match=r"q_?k?v?_proj: its slots hold .* factors need"):
        SlotAdapters(_spec(), EngineLayout(), 0, LORA, Slots(_spec(), 1, 0, largest=2))


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        (ParallelConfig(tp=2, ep=2), EngineLayout(tp=2)),
        (ParallelConfig(pp=2, dp=2, ep=2), EngineLayout(tp=2, ep=2)),
    ],
)
def test_every_engine_rank_gets_whole_factors(
    trainer: ParallelConfig, engine: EngineLayout
) -> None:
    """Each element once, from one trainer rank."""
    weights = TransferPlan(_spec(), trainer, engine, PLAN_ID, WirePolicy("float32"))
    plan = FactorPlan(weights, LORA)
    shapes = adapter_shapes(hf_shapes(_spec()), LORA.rank_of)
    sent = [plan.sender(rank) for rank in range(trainer.world_size)]
    for rank in range(engine.tp):
        assert {n: local.shape for n, local in plan.factors(rank).items()} == shapes
        seen = {name: torch.zeros(shape, dtype=torch.int) for name, shape in shapes.items()}
        for region in plan.receiver(rank).regions:
            for piece in region.pieces:
                seen[piece.dst_name][at(piece.dst_box)] += 1
        assert all((count == 1).all() for count in seen.values())
        received = sum(b.num_bytes for r in plan.receiver(rank).regions for b in r.buckets)
        given = sum(
            b.num_bytes for s in sent for r in s.regions if r.dst == rank for b in r.buckets
        )
        assert received == given


# --- inside SGLang --------------------------------------------------------------------------------
@pytest.mark.parametrize("asked", [None, "other", ["moerl-v1.0", None]])
def test_a_request_without_a_loaded_adapter_is_refused(asked: object) -> None:
    passed: list[object] = []

    async def original(_manager: object, given: object) -> None:
        passed.append(given)

    registry = SimpleNamespace(get_all_adapters=lambda: {"moerl-v1.0": 1})
    manager = SimpleNamespace(enable_lora=True, lora_registry=registry)
    request = SimpleNamespace(lora_path=asked)
    with pytest.raises(ValueError, match="the base alone is not served"):
        asyncio.run(adapter_hooks.check_named(original, manager, request))
    assert not passed
    request.lora_path = "moerl-v1.0"
    asyncio.run(adapter_hooks.check_named(original, manager, request))
    manager.enable_lora, request.lora_path = False, None
    asyncio.run(adapter_hooks.check_named(original, manager, request))
    assert len(passed) == 2


@pytest.mark.full
def test_tokens_belong_to_the_adapter_whatever_is_committed_later() -> None:
    from sglang.srt.utils import weight_versions

    req = SimpleNamespace(
        lora_id="1.1", weight_version_events=[], output_ids=[1, 2], extra_key=None
    )
    in_flight.name_versions(None, req)
    weight_versions.record_weight_version_events([req], "0.0")
    spans = weight_versions.compute_weight_version_spans(req.weight_version_events, "1.2", 5)
    assert [(span.version, span.start, span.end) for span in spans] == [("1.1", 0, 5)]


# --- the trainer ----------------------------------------------------------------------------------
def test_a_model_folder_has_the_products_and_the_trainer_its_base_again() -> None:
    chance = torch.Generator().manual_seed(1)
    weight, a, b = (
        torch.nn.Parameter(torch.randn(shape, generator=chance))
        for shape in ((6, 4), (2, 4), (6, 2))
    )
    adapters, base = ServedAdapters(LORA), weight.detach().clone()
    adapters.register_parameter("a", a)
    adapters.register_parameter("b", b)
    adapters._merged.append((weight, (Factors(None, a, b, None),)))  # type: ignore[arg-type]
    adapters.keep_base()
    assert torch.equal(weight, base), "the weights stay W0"
    with adapters.merged():
        torch.testing.assert_close(weight.detach(), base + LORA.scale * (b @ a).detach())
        assert not torch.equal(weight, base)
    assert torch.equal(weight, base), "bit for bit"
    assert adapters.is_on
    with torch.no_grad():
        a[0] += 1
    changes = adapters.merge()
    assert (changes.weights, changes.changed) == (8 + 12, 4), "elements of the factors"
    adapters.unmerge()
    assert not adapters.is_on, "the reference pass"
