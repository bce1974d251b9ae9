"""Transfer plans, executed as bytes on a wire, against a loader that knows no tiles.

Each sender packs its regions from what `reference_loader` says it holds, each receiver unpacks its
staging segment by its own plan, and the result must be what the reference says that it holds: each
byte written once, none more than needed.  Values are numbers, so no cast can hide a wrong box.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, LayoutError
from moerl.layout import (
    ModelSpec,
    Named,
    at,
    families,
    hf_shapes,
    megatron_tiles,
    model_spec,
    num_elements,
    sglang_tiles,
    shards,
)
from moerl.weight_sync import deliveries
from moerl.weight_sync.buckets import ALIGN, Bucket, Piece, Region, WirePolicy
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.transfer_plan import (
    TRAINER,
    ReceiverPlan,
    SenderPlan,
    TransferPlan,
    num_rounds,
    relay_schedule,
)
from moerl.weight_sync.wire_formats import ITEMSIZE
from tests.helpers import reference_loader as reference
from tests.helpers.random_layouts import LATENT, draw, spec_of

ROOT = Path(__file__).resolve().parents[2]
NUM_LAYOUTS = 500
Arrays = dict[str, np.ndarray]
WIRE = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2")}  # numbers as wide as the dtype


@lru_cache(maxsize=64)
def hf_arrays(spec: ModelSpec) -> Arrays:
    """Elements count up from 1, so 0 is left for padding and none repeats in 65,520."""
    arrays, first = {}, 0
    for name, shape in hf_shapes(spec).items():
        size = math.prod(shape)
        arrays[name] = (np.arange(first, first + size) % 65520 + 1).reshape(shape)
        first += size
    return arrays


def plans(case: TransferPlan) -> tuple[list[SenderPlan], list[ReceiverPlan]]:
    senders = [case.sender(rank) for rank in range(case.trainer.world_size)]
    return senders, [case.receiver(rank) for rank in range(case.engine.tp)]


def check(
    case: TransferPlan,
    senders: Iterable[SenderPlan],
    receivers: Iterable[ReceiverPlan],
    shuffle: Callable[[list[Piece]], None] = list.reverse,
) -> None:
    """Execute and compare.  Raises AssertionError naming what is wrong."""
    hf = hf_arrays(case.spec)
    wire: dict[tuple[int, int], bytes] = {}
    for plan in senders:
        held = reference.trainer_rank(hf, case.spec, case.trainer, plan.rank)
        for region in plan.regions:
            check_region(region, case.policy)
            wire[region.src, region.dst] = b"".join(pack(held, p) for p in region.pieces)
    for plan in receivers:
        want = reference.engine_rank(hf, case.spec, case.engine, plan.rank)
        staging = bytearray(plan.staging_bytes)
        pieces = []
        for region, start in zip(plan.regions, plan.starts, strict=True):
            data = wire.pop((region.src, plan.rank), b"")
            assert len(data) == region.num_bytes, f"{len(data)} of {region.num_bytes} bytes came"
            staging[start : start + len(data)] = data
            pieces += [p._replace(offset=start + p.offset) for p in region.pieces]
        shuffle(pieces)
        got = {name: np.zeros_like(array) for name, array in want.items()}
        writes = {name: np.zeros(array.shape, np.int8) for name, array in want.items()}
        for p in pieces:
            unpack(got, writes, staging, p)
        assert got.keys() == want.keys()
        for name, array in want.items():
            needed = array != 0
            assert np.array_equal(got[name], array), f"rank {plan.rank}: {name} differs"
            assert np.array_equal(writes[name], needed), f"rank {plan.rank}: {name} not once"
        needs = sum(
            np.count_nonzero(a) * (4 if n.endswith("correction_bias") else item(case))
            for n, a in want.items()
        )
        assert plan.num_bytes == needs, f"rank {plan.rank}: {plan.num_bytes} bytes for {needs}"
        padded = {n: len(a) - np.count_nonzero(a[:, 0]) for n, a in want.items() if a.ndim == 2}
        rows = {name: len(want[name]) - first for name, first in plan.padding}
        assert rows == {name: num for name, num in padded.items() if num}
    assert not wire, f"sent to nobody: {list(wire)}"


def item(case: TransferPlan) -> int:
    return ITEMSIZE[case.policy.dtype]


def check_region(region: Region, policy: WirePolicy) -> None:
    """Offsets follow each other, items are aligned, buckets are of whole pieces and small."""
    end = 0
    for p in region.pieces:
        assert p.offset == end
        assert end % ITEMSIZE[p.dtype] == 0
        end += p.num_bytes
    assert end == region.num_bytes
    assert [b.first for b in region.buckets[1:]] == [b.stop for b in region.buckets[:-1]]
    assert (region.buckets[0].first, region.buckets[-1].stop) == (0, len(region.pieces))
    for bucket in region.buckets:
        inside = region.pieces[bucket.first : bucket.stop]
        assert bucket.offset == inside[0].offset
        assert bucket.num_bytes == sum(p.num_bytes for p in inside)
        one_row = len(inside) == 1 and len(inside[0].hf_box[0]) == 1
        assert bucket.num_bytes <= policy.bucket_bytes or one_row


def pack(held: Arrays, piece: Piece) -> bytes:
    part = held[piece.src_name][at(piece.src_box)]
    assert part.size == num_elements(piece.src_box), f"{piece} is not inside the sender's tensor"
    return part.astype(WIRE[piece.dtype]).tobytes()


def unpack(got: Arrays, writes: Arrays, staging: bytearray, piece: Piece) -> None:
    into, box = got[piece.dst_name], at(piece.dst_box)
    assert into[box].size == num_elements(piece.dst_box), f"{piece} is not inside the tensor"
    data = staging[piece.offset : piece.offset + piece.num_bytes]
    into[box] = np.frombuffer(data, WIRE[piece.dtype]).reshape(into[box].shape)
    writes[piece.dst_name][box] += 1


# --- exactness ------------------------------------------------------------------------------------
def arrives(seed: int) -> None:
    """One layout: each engine byte once, both ends agree, counts agree with the plans."""
    case = draw(seed)
    senders, receivers = plans(case)
    check(case, senders, receivers, random.Random(seed).shuffle)
    sent = {(r.src, r.dst): r for plan in senders for r in plan.regions}
    received = {(r.src, r.dst): r for plan in receivers for r in plan.regions}
    assert sent == received, "sender and receiver derived different regions"
    assert len({plan.plan_id for plan in (*senders, *receivers)}) == 1
    counted = case.totals()
    assert counted.sent_bytes == tuple(plan.num_bytes for plan in senders)
    assert counted.received_bytes == tuple(plan.num_bytes for plan in receivers)
    for plan in receivers:
        assert all(start % ALIGN == 0 for start in plan.starts)
        assert plan.staging_bytes < plan.num_bytes + ALIGN * len(plan.regions)


@pytest.mark.parametrize("part", range(10))
def test_random_layouts_equal_the_tile_free_loader(part: int) -> None:
    for seed in range(part, NUM_LAYOUTS, 10):
        arrives(seed)


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_many_more_layouts(part: int) -> None:
    for seed in range(NUM_LAYOUTS + part, 10 * NUM_LAYOUTS, 10):
        arrives(seed)


CONFIGS = json.loads((ROOT / "tests/data/layout_families.json").read_text())


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_family_arrives_whole(family: str) -> None:
    """Against loads by tiles, which other oracles check: what the plan adds is right everywhere."""
    spec, policy = model_spec(CONFIGS[family]), WirePolicy("float32", bucket_bytes=1000)
    trainer = ParallelConfig(tp=2, pp=2, ep=2 if spec.experts else 1, dp=2, vocab_divisible_by=8)
    engine = EngineLayout(4, 2 if spec.experts else 1, 2)
    hf, held = hf_arrays(spec), {}
    for rank in range(trainer.world_size):
        held[rank] = filled(megatron_tiles(spec, trainer, rank), hf)
    for rank in range(engine.tp):
        named = sglang_tiles(spec, engine.tp, rank, engine.ep, engine.dp)
        got = {name: np.zeros(local.shape, int) for name, local in named.items()}
        for region in TransferPlan(spec, trainer, engine, 2, policy).receiver(rank).regions:
            for p in region.pieces:
                into = got[p.dst_name][at(p.dst_box)]
                assert not into.any(), f"{p.dst_name} is written twice"
                into += held[region.src][p.src_name][at(p.src_box)].reshape(into.shape)
        for name, array in filled(named, hf).items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)


def filled(named: Named, hf: Arrays) -> Arrays:
    """Content of a rank by its tiles; what no tile writes is 0."""
    out = {name: np.zeros(local.shape, int) for name, local in named.items()}
    for name, local in named.items():
        for tile in local.tiles:
            out[name][at(tile.box)] = hf[tile.hf][at(tile.hf_box)]
    return out


# --- negative controls: the comparison above sees each of these -----------------------------------
CONTROL = TransferPlan(
    spec_of(False, 1, False),
    ParallelConfig(tp=2, pp=1, ep=2, dp=2, vocab_divisible_by=8),
    EngineLayout(tp=4, ep=2),
    3,
    WirePolicy("bfloat16", bucket_bytes=2**16),
)


@pytest.fixture
def fresh_tables() -> Iterator[None]:
    """Tables made inside the test are made from what it broke, and are gone after it."""
    deliveries.tables_of.cache_clear()
    yield
    deliveries.tables_of.cache_clear()


def test_replicas_that_are_not_merged_send_twice(
    monkeypatch: pytest.MonkeyPatch, fresh_tables: None
) -> None:
    right = deliveries.Tables._of_rule

    def apart(self: object, *args: object) -> Iterator[object]:
        for holding in right(self, *args):
            yield from (replace(holding, same=(i,)) for i in holding.same)

    check(CONTROL, *plans(CONTROL))
    deliveries.tables_of.cache_clear()
    monkeypatch.setattr(deliveries.Tables, "_of_rule", apart)
    with pytest.raises(AssertionError, match="not once"):
        check(CONTROL, *plans(CONTROL))


def test_swapped_keys_and_values_differ(
    monkeypatch: pytest.MonkeyPatch, fresh_tables: None
) -> None:
    family = families.FAMILY_TABLES["qwen3_moe"]
    q, k, v = families.GQA.sglang[0].hf
    swapped = replace(families.GQA.sglang[0], hf=(q, v, k))
    broken = replace(families.GQA, sglang=(swapped, *families.GQA.sglang[1:]))
    every = tuple(broken if part is families.GQA else part for part in family.every)
    monkeypatch.setitem(shards.FAMILY_TABLES, "qwen3_moe", replace(family, every=every))
    with pytest.raises(AssertionError, match=r"qkv_proj\.weight differs"):
        check(CONTROL, *plans(CONTROL))


@pytest.mark.parametrize("both", [False, True], ids=["sender forgets", "both forget"])
def test_a_dropped_piece_is_missed(both: bool) -> None:
    def forget(plan: SenderPlan | ReceiverPlan) -> SenderPlan | ReceiverPlan:
        return replace(plan, regions=tuple(map(shorter, plan.regions)))

    def shorter(region: Region) -> Region:
        if (region.src, region.dst) != victim:
            return region
        *pieces, last = region.pieces
        buckets = (Bucket(0, last.offset, 0, len(pieces)),)
        return replace(region, pieces=tuple(pieces), buckets=buckets, num_bytes=last.offset)

    senders, receivers = plans(CONTROL)
    every = (region for plan in senders for region in plan.regions)
    largest = max(every, key=lambda region: len(region.pieces))
    victim = (largest.src, largest.dst)
    senders = [forget(plan) for plan in senders]
    receivers = [forget(plan) for plan in receivers] if both else receivers
    with pytest.raises(AssertionError, match="differs" if both else "bytes came"):
        check(CONTROL, senders, receivers)


def test_a_sender_with_another_engine_id_is_noticed() -> None:
    senders, _ = plans(replace(CONTROL, engine_id=0))
    _, receivers = plans(CONTROL)
    assert senders[0].plan_id != receivers[0].plan_id
    with pytest.raises(AssertionError):
        check(CONTROL, senders, receivers)


def test_a_neighbours_expert_slot_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = deliveries._at_slot

    def wrong(box: tuple[range, ...], stacked: bool, slot: int) -> tuple[range, ...]:
        return right(box, stacked, slot ^ 1)

    monkeypatch.setattr(deliveries, "_at_slot", wrong)
    with pytest.raises(AssertionError, match=r"w13_weight differs|w2_weight differs"):
        check(CONTROL, *plans(CONTROL))


# --- identity and independence --------------------------------------------------------------------
def test_the_plan_id_changes_with_every_input() -> None:
    others = [
        replace(CONTROL, spec=spec_of(False, 2, False)),
        replace(CONTROL, trainer=replace(CONTROL.trainer, pp=2)),
        replace(CONTROL, engine=EngineLayout(tp=4, ep=4)),
        replace(CONTROL, engine_id=4),
        replace(CONTROL, policy=replace(CONTROL.policy, bucket_bytes=160)),
        replace(CONTROL, policy=replace(CONTROL.policy, dtype="float32")),
        replace(CONTROL, layer_spec="te"),
    ]
    ids = {case.id for case in (CONTROL, *others)}
    assert len(ids) == len(others) + 1
    assert all(len(found) == 16 for found in ids)


def test_an_engine_does_not_depend_on_the_others() -> None:
    alone, of_many = (
        replace(CONTROL, engine=replace(CONTROL.engine, num=num)) for num in (1, 1000)
    )
    assert plans(alone) == plans(of_many)


def test_wrong_policies_are_refused() -> None:
    for policy, message in (
        ({"dtype": "fp8"}, r"engine\.dtype = 'fp8'"),
        ({"dtype": "bfloat16", "quantization": "int4"}, "fp8_block"),
        ({"dtype": "bfloat16", "bucket_bytes": 0}, "bucket_bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            WirePolicy(**policy)


# --- balance --------------------------------------------------------------------------------------
def shapes(name: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / f"configs/models/{name}/config.json").read_text()))


@pytest.mark.parametrize("num_engines", [1, 3, 16])
@pytest.mark.parametrize(
    ("model", "trainer", "engine"),
    [
        ("qwen3-30b-a3b", ParallelConfig(tp=2, ep=8, dp=32), EngineLayout(8, 8)),
        ("qwen3-30b-a3b", ParallelConfig(tp=4, ep=4, dp=4), EngineLayout(8, 8, 8)),
        ("qwen3-235b-a22b", ParallelConfig(tp=4, ep=16, dp=16), EngineLayout(16, 16, 2)),
        ("deepseek-v3", ParallelConfig(tp=8, ep=64, dp=64), EngineLayout(32, 32, 4)),
    ],
)
def test_no_sender_is_far_above_the_mean(
    model: str, trainer: ParallelConfig, engine: EngineLayout, num_engines: int
) -> None:
    """Without pipeline stages all ranks can share the work: at most 1.2 x the mean."""
    policy = WirePolicy("bfloat16")
    counts = [
        TransferPlan(shapes(model), trainer, engine, e, policy).totals() for e in range(num_engines)
    ]
    sent = [sum(t.sent_bytes[rank] for t in counts) for rank in range(trainer.world_size)]
    assert max(sent) <= 1.2 * sum(sent) / len(sent)


def test_replicas_differ_by_a_piece_at_most() -> None:
    """Ranks that hold the same send the same, but for a largest piece of dense and of expert."""
    spec, trainer = shapes("qwen3-30b-a3b"), ParallelConfig(tp=1, ep=1, dp=7)
    policy = WirePolicy("bfloat16", bucket_bytes=2**20)
    sent = TransferPlan(spec, trainer, EngineLayout(4), 5, policy).totals().sent_bytes
    assert max(sent) - min(sent) <= 2 * policy.bucket_bytes


# --- block-quantised wire -------------------------------------------------------------------------
BLOCKS = LATENT | {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,  # kv_a has 192 rows: its last blocks have 64
    "v_head_dim": 128,
}
FP8 = WirePolicy("bfloat16", "fp8_block", bucket_bytes=40_000)


@pytest.mark.parametrize("engine", [EngineLayout(1), EngineLayout(2), EngineLayout(4, 4, 2)])
@pytest.mark.parametrize("tp", [1, 2])
def test_fp8_pieces_are_whole_blocks_and_each_is_scaled_once(tp: int, engine: EngineLayout) -> None:
    spec, trainer = model_spec(BLOCKS), ParallelConfig(tp=tp, pp=2, ep=2, dp=2)
    senders = [
        TransferPlan(spec, trainer, engine, 1, FP8).sender(r) for r in range(trainer.world_size)
    ]
    sent = {(r.src, r.dst): r for plan in senders for r in plan.regions}
    hf = {name: np.ones(shape, np.int8) for name, shape in hf_shapes(spec).items()}
    for rank in range(engine.tp):
        plan = TransferPlan(spec, trainer, engine, 1, FP8).receiver(rank)
        assert plan.hooks == (
            "restore_weights_before_loading",
            "post_load_weights",
            "postprocess_weights",
        )
        assert all(region == sent.pop((region.src, rank)) for region in plan.regions)
        want = reference.engine_rank(hf, spec, engine, rank)
        writes = {name: np.zeros(a.shape, int) for name, a in want.items()}
        for name in [n for n in want if quantised(n)]:
            *lead, num_rows, num_cols = want[name].shape
            blocks = (*lead, -(-num_rows // 128), -(-num_cols // 128))
            writes[name + "_scale_inv"] = np.zeros(blocks, int)
        for piece in (p for region in plan.regions for p in region.pieces):
            writes[piece.dst_name][at(piece.dst_box)] += 1
            expected = "float32" if piece.is_scale else "bfloat16"
            if quantised(piece.dst_name):
                expected = "float8_e4m3fn"
                assert all(r.start % 128 == 0 for r in piece.hf_box)
            expected = "float32" if piece.dst_name.endswith("correction_bias") else expected
            assert piece.dtype == expected, piece
        for name, times in writes.items():
            assert (times == 1).all(), f"{name} is not written once"
    assert not sent


def quantised(engine_name: str) -> bool:
    return engine_name.endswith(("_proj.weight", "_mqa.weight", "w13_weight", "w2_weight"))


def test_a_cut_inside_a_block_is_refused_by_name() -> None:
    spec = shapes("qwen3-30b-a3b")  # experts of 768: 96 columns on each of 8 ranks
    with pytest.raises(LayoutError, match=r"experts\.0\..*_proj\.weight: .* whole 128 x 128"):
        TransferPlan(spec, ParallelConfig(), EngineLayout(8), 0, FP8).receiver(0)
    TransferPlan(spec, ParallelConfig(), EngineLayout(8, 8), 0, FP8).receiver(0)


# --- hooks and relays -----------------------------------------------------------------------------
def test_latent_attention_needs_its_hook() -> None:
    receiver = CONTROL.receiver(0)
    latent = replace(CONTROL, spec=spec_of(True, 1, False))
    assert receiver.hooks == ()
    assert latent.receiver(0).hooks == ("post_load_weights",)


@pytest.mark.parametrize("direct", [1, 2, 5])
@pytest.mark.parametrize("num", [1, 2, 5, 16, 33])
def test_a_relay_serves_every_engine_once_and_bounds_the_trainer(num: int, direct: int) -> None:
    engine_ids = list(range(100, 100 + num))
    hops = relay_schedule(engine_ids, direct)
    assert sorted(hop.dst for hop in hops) == engine_ids
    has = {TRAINER: -1} | {hop.dst: hop.round for hop in hops}
    assert all(has[hop.src] < hop.round for hop in hops), "a relay sends what it does not have"
    sends = Counter((hop.round, hop.src) for hop in hops)
    assert all(times == 1 for (_, src), times in sends.items() if src != TRAINER)
    assert sends[0, TRAINER] == sum(hop.src == TRAINER for hop in hops) == min(direct, num)
    assert num_rounds(hops) == math.ceil(math.log2(max(1, num / direct)))
