"""A publish of factors into engine ranks on the double, which merge them there: bits, bytes, waits.

The ends are a trainer's senders on the CPU and an engine's receivers; what is to be served was
summed by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from moerl.config.lora_settings import BasePlace
from moerl.core.messages import Destination, PrepareUpdate, VerifyUpdate
from moerl.core.types import PolicyVersion
from moerl.layout import sglang_tiles
from moerl.planning.memory import engine_memory
from moerl.planning.publish_forecast import factor_forecast, merging_memory
from moerl.weight_sync.receiver import Receiver, ReceiverContext
from moerl.weight_sync.sender import WeightSender
from moerl.weight_sync.transfer_plan import PLAN_ID
from tests.double.mutations import ENGINE_BASE_BLUNDERS, Blunder
from tests.double.on_publish import LATE, ON_ENGINE, Memories, Memory
from tests.double.watch import PAGEABLE, WAITS, Watch, memory, purpose, watch
from tests.helpers.factor_case import LORA, V1, Case, part_of
from tests.helpers.sync_peers import PlainModel

PLACES: tuple[BasePlace, ...] = ("host", "device")
WAITS_OF_A_COMMIT = {"moerl/weight_sync/receiver.py": 2}  # the forward pass before it; its own work


@cache
def case(place: BasePlace) -> Case:
    lora = replace(LORA, base=place)
    return Case.make("qwen3_moe", "tp2-dp2-ep4-to-one", torch.bfloat16, wanted=lora)


class EngineRank:
    def __init__(self, place: BasePlace) -> None:
        self.case = case(place)
        self.named = sglang_tiles(self.case.spec, 1, 0)
        self.live = {n: t.to(ON_ENGINE) for n, t in self.part(self.case.base).items()}
        context = ReceiverContext(self.case.spec, self.case.plan.weights.engine, 0, "")
        self.receiver = Receiver(
            context,
            PlainModel(self.live),
            lambda _name, _folder: Memories("put"),
            PolicyVersion(0, 0),
        )

    def part(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        return part_of(self.named, whole, self.case.dtype)

    def receive(self) -> tuple[int, str]:
        """PREPARE, TRANSFER, VERIFY; (sum of the senders, of this rank)."""
        plan = self.case.plan
        weights = plan.weights
        with torch.cuda.device(ON_ENGINE), purpose("adapters"):
            ready = self.receiver.prepare(
                PrepareUpdate(
                    engine=0, version=V1, plan_engine=PLAN_ID, plan=plan.id, layout="",
                    transport="memory", trainer=asdict(weights.trainer),
                    policy=asdict(weights.policy), layer_spec="local", timeout_s=60.0,
                    lora=asdict(plan.lora),
                )
            )  # fmt: skip
        total, digests = 0, b""
        for rank, packer in self.case.packers():
            if rank in ready.starts[0]:
                to = {0: Destination(ready.endpoints[0], ready.starts[0][rank])}
                moved = WeightSender(packer, Memories("put")).send(to, LATE)[0]
                digests += moved.digests
                total += moved.total
            else:
                assert packer.merged is not None
                total += packer.merged(0, V1)
        with torch.cuda.device(ON_ENGINE):
            found = self.receiver.verify(VerifyUpdate(0, V1, (digests,), 60.0, ()))
        assert found.failed == ((),), found
        return total % 2**64, found.digest

    def commit(self) -> Watch:
        with torch.cuda.device(ON_ENGINE):
            assert not self.receiver.claim(str(V1))
            with watch() as seen:
                self.receiver.commit()
        return seen

    def serves(self, whole: dict[str, Tensor]) -> list[str]:
        """Names of tensors that are something else."""
        want = self.part(whole)
        return [n for n, weight in self.live.items() if not torch.equal(weight.cpu(), want[n])]

    def boxes(self) -> list[int]:
        """Bytes of the parts of weights that have factors."""
        lora, sizes = self.case.plan.lora, []
        for local in self.named.values():
            for tile in local.tiles:
                if lora.rank_of(tile.hf.removesuffix(".weight")) and len(tile.hf_box) == 2:
                    rows, cols = map(len, tile.hf_box)
                    sizes.append(2 * rows * cols)
        return sizes


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    yield
    Memory.stagings.clear()
    torch.cuda.set_stream(torch.cuda.default_stream(ON_ENGINE))
    torch.cuda.synchronize(ON_ENGINE)


@pytest.mark.parametrize("place", PLACES)
def test_an_engine_on_a_gpu_merges_what_the_trainer_has(place: BasePlace) -> None:
    """Control: until the commit it serves W0."""
    engine = EngineRank(place)
    sent, found = engine.receive()
    assert found == f"{sent:016x}", "digests of the merged weights"
    assert engine.serves(engine.case.base) == [], "VERIFY writes nothing"
    assert len(engine.serves(engine.case.merged)) > 10
    seen = engine.commit()
    assert engine.serves(engine.case.merged) == []
    assert seen.own_files(*WAITS) == WAITS_OF_A_COMMIT, seen.own_lines(*WAITS)
    assert not seen.own_lines(PAGEABLE)
    copied = sum(event.bytes for event in seen.seen if event.kind == "h2d_async")
    assert copied == (sum(engine.boxes()) if place == "host" else 0)


def test_a_version_holds_w0_or_two_buckets_of_it() -> None:
    """Beyond factors and the buckets of their transfer, which both have; as the dry run says."""
    held = {}
    for place in PLACES:
        before = memory("adapters", 1).live
        engine = EngineRank(place)
        engine.receive()
        held[place] = memory("adapters", 1).live - before
        assert held[place] == pytest.approx(told(place), rel=0.05), place
        del engine
    boxes = EngineRank("host").boxes()
    print("host:", held["host"], "device:", held["device"], "W0:", sum(boxes))
    assert held["device"] - held["host"] == sum(boxes) - 2 * max(boxes)


def told(place: BasePlace) -> int:
    """Bytes of a publish on an engine rank's device, by the dry run."""
    weights, lora = case(place).plan.weights, case(place).plan.lora
    bucket = weights.policy.bucket_bytes
    whole = engine_memory(weights.spec, weights.engine, 1, 0, "bfloat16", bucket=bucket)
    found = factor_forecast(weights.spec, weights.engine, lora, "bfloat16")
    return merging_memory(whole, found, lora, "bfloat16", bucket).update


@pytest.mark.parametrize(
    "blunder", ENGINE_BASE_BLUNDERS, ids=[b.name for b in ENGINE_BASE_BLUNDERS]
)
def test_blunders_of_a_merge_are_caught(blunder: Blunder, monkeypatch: pytest.MonkeyPatch) -> None:
    blunder.apply(monkeypatch)
    caught = ""
    try:
        before = memory("adapters", 1).live
        engine = EngineRank("host")
        sent, found = engine.receive()
        if found != f"{sent:016x}":
            caught = "another digest than the trainer's"
        held = memory("adapters", 1).live - before
        if held > sum(engine.boxes()):
            caught = f"{held} bytes on the device"
        seen = engine.commit()
        if seen.own_files(*WAITS) != WAITS_OF_A_COMMIT:
            caught = f"waits {seen.own_lines(*WAITS)}"
        if wrong := engine.serves(engine.case.merged):
            caught = f"{len(wrong)} tensors are not those of the version"
    except RuntimeError as error:
        caught = str(error).splitlines()[0]
    print(f"{blunder.name}: {caught or 'NOT CAUGHT'}")
    assert caught
