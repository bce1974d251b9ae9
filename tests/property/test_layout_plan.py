"""Plans of single ranks, put together: every engine element once, from a rank that holds it.

The plan is executed on numpy arrays and compared with what each engine rank holds when it is
filled from the Hugging Face tensors directly, so a wrong name, box, expert or slot shows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moerl.errors import MoerlError
from moerl.layout import (
    ModelSpec,
    Named,
    Op,
    ParallelLayout,
    at,
    hf_shapes,
    megatron_tiles,
    model_spec,
    num_elements,
    plan,
    sglang_tiles,
)
from moerl.layout.plan import EngineLayout, plan_rank

CONFIGS = json.loads(
    (Path(__file__).resolve().parents[1] / "data" / "layout_families.json").read_text()
)
Arrays = dict[str, np.ndarray]


def fill(named: Named, source: Arrays) -> Arrays:
    """Tensors of a rank from Hugging Face tensors; what no tile writes is 0."""
    out = {name: np.zeros(local.shape, np.int64) for name, local in named.items()}
    for name, local in named.items():
        for tile in local.tiles:
            out[name][at(tile.box)] = source[tile.hf][at(tile.hf_box)]
    return out


def hf_arrays(spec: ModelSpec) -> Arrays:
    """Every element has a value of its own, none is 0."""
    arrays, first = {}, 1
    for name, shape in hf_shapes(spec).items():
        size = math.prod(shape)
        arrays[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return arrays


def engine_tiles(spec: ModelSpec, engines: EngineLayout, receiver: int) -> Named:
    return sglang_tiles(spec, engines.tp, receiver % engines.tp, engines.ep, engines.dp)


def all_ops(spec: ModelSpec, layout: ParallelLayout, engines: EngineLayout) -> list[Op]:
    return [op for r in range(layout.world_size) for op in plan_rank(spec, layout, engines, r)]


def check(spec: ModelSpec, layout: ParallelLayout, engines: EngineLayout, ops: list[Op]) -> None:
    source = hf_arrays(spec)
    senders = [fill(megatron_tiles(spec, layout, r), source) for r in range(layout.world_size)]
    receivers = [
        fill(engine_tiles(spec, engines, receiver), source)
        for receiver in range(engines.world_size)
    ]
    got = [{n: np.zeros_like(a) for n, a in arrays.items()} for arrays in receivers]
    for op in ops:
        into = got[op.dst][op.dst_name][at(op.dst_box)]
        assert not into.any(), f"written twice: {op}"
        into += senders[op.src][op.src_name][at(op.src_box)].reshape(into.shape)
    for found, want in zip(got, receivers, strict=True):
        for name, array in want.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout, EngineLayout]:
    config = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]
    spec = model_spec(config | {"tie_word_embeddings": draw(st.booleans())})
    sizes = st.sampled_from((1, 2, 4))
    tp, pp, vpp = draw(sizes), draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    ep, etp = (draw(sizes), draw(st.sampled_from((1, 2)))) if spec.experts else (1, 1)
    try:
        layout = ParallelLayout(
            tp=tp,
            pp=pp,
            vpp=vpp if pp > 1 else 1,
            ep=ep,
            etp=etp,
            dp=math.lcm(tp, ep * etp) // tp * draw(st.sampled_from((1, 2))),
            cp=draw(st.sampled_from((1, 2))),
            vocab_divisible_by=8,
        )
        engine_tp = draw(st.sampled_from((1, 2, 4, 8)))
        divides = [n for n in (1, 2, 4, 8) if engine_tp % n == 0]
        engine_ep = draw(st.sampled_from(divides)) if spec.experts else 1
        dp = draw(st.sampled_from(divides))
        engines = EngineLayout(engine_tp, engine_ep, dp, draw(st.integers(1, 3)))
        megatron_tiles(spec, layout, 0)
        sglang_tiles(spec, engine_tp, 0, engine_ep, dp)
    except MoerlError:
        assume(False)
    return spec, layout, engines


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(cases())
def test_the_plans_of_all_ranks_write_every_engine_element_once(
    case: tuple[ModelSpec, ParallelLayout, EngineLayout],
) -> None:
    spec, layout, engines = case
    check(spec, layout, engines, all_ops(spec, layout, engines))


def qwen(**change: object) -> ModelSpec:
    return model_spec(CONFIGS["qwen3_moe"] | change)


@pytest.mark.parametrize("harm", ["turn", "expert", "missing"])
def test_a_wrong_plan_is_noticed(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """Negative controls: the comparison above sees each of these."""
    spec, layout, engines = qwen(), ParallelLayout(tp=2, ep=2, dp=2), EngineLayout(2, num=2)
    check(spec, layout, engines, all_ops(spec, layout, engines))
    right, right_op = plan._offsets, plan._op
    if harm == "expert":  # the neighbour's slot
        monkeypatch.setattr(plan, "_op", lambda *a: right_op(*a[:-1], a[-1] ^ 1))
    ops = all_ops(spec, layout, engines)
    if harm == "missing":
        ops.pop()
    elif harm == "turn":  # one replica counts differently from the others
        ops = [op for op in ops if op.src != 1]
        shifted = {k + 1: v for k, v in right(engines.num, 2).items()}
        monkeypatch.setattr(plan, "_offsets", lambda num, n: shifted)
        ops += plan_rank(spec, layout, engines, 1)
    with pytest.raises((AssertionError, KeyError)):
        check(spec, layout, engines, ops)


@pytest.mark.parametrize(
    "engines", [EngineLayout(8, 8, num=16), EngineLayout(8, num=6), EngineLayout(4, 2, num=1)]
)
@pytest.mark.parametrize("layout", [ParallelLayout(tp=4, ep=8, dp=16), ParallelLayout(ep=4, dp=8)])
def test_replicas_send_equal_shares(layout: ParallelLayout, engines: EngineLayout) -> None:
    """Largest sender within 1.2 of the mean, counting bytes, where every tensor has replicas."""
    spec = qwen(num_hidden_layers=24, num_experts=32, vocab_size=512)
    sent = Counter(dict.fromkeys(range(layout.world_size), 0))
    for op in all_ops(spec, layout, engines):
        sent[op.src] += num_elements(op.src_box)
    assert max(sent.values()) <= 1.2 * sum(sent.values()) / layout.world_size, sent


def test_an_engine_does_not_depend_on_the_others() -> None:
    spec, layout = qwen(), ParallelLayout(tp=2, ep=4, dp=4)
    two, three = EngineLayout(4, 2, num=2), EngineLayout(4, 2, num=3)
    few, more = (all_ops(spec, layout, engines) for engines in (two, three))
    assert set(few) == {op for op in more if op.dst < two.world_size}
    assert len(more) > len(few)


def test_axes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(MoerlError, match="num_experts"):
        plan_rank(qwen(), replace(ParallelLayout(), ep=3, dp=3), EngineLayout(), 0)
    with pytest.raises(MoerlError, match=r"engine\.tp = 4 is not usable"):
        EngineLayout(tp=4, ep=3)
