"""LoRA in the trainer against transformers with W0 + s B A for weights, in fp32, on real ranks.

Loss, the gradient of every factor and the gradient norm, for grouped-query and for latent
attention, dense blocks, shared and routed experts.  Every layout is compared with transformers,
none with our own single rank; tests/references compares this oracle, and ranks of the layouts
themselves, with peft.  Controls, with one mistake each, must be off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from moerl.config.schema import ParallelConfig
from moerl.planning.memory import Training, trainer_memory
from tests.helpers.lora_oracle import (
    FAMILIES,
    LAYOUTS,
    LIMIT,
    LORA,
    SERVED,
    SHARED,
    WIDE,
    Trained,
    read_spec,
)

DEFAULT = ("tp2-ep2",)
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: Trained(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Of a family, with `shared` factors of experts, `wide`: routers and head as targets, or
    `served`: the factors' product is added to the output of frozen weights.
    """
    return cache(
        lambda family, name: Trained(
            tmp_path_factory.mktemp(f"{family}-{name}"),
            family,
            {"shared": SHARED, "wide": WIDE, "served": SERVED}[name],
        )
    )


def _check(gaps: dict[str, float]) -> None:
    worst = max(gaps, key=gaps.__getitem__)
    print(f"loss {gaps['loss']:.1e}, norm {gaps['norm']:.1e}, worst {worst}: {gaps[worst]:.1e}")
    assert gaps[worst] <= LIMIT, f"{worst}: {gaps[worst]:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", DEFAULT)
def test_loss_and_gradients_are_those_of_transformers(
    trained: dict[str, Trained], family: str, layout: str
) -> None:
    found = trained[family].run(layout)
    _check(trained[family].gaps(found))
    assert found["base_unchanged"]
    assert found["buffered"] == found["trained"], "frozen weights have no gradient buffer"
    assert found["adam"] == 2 * found["trained"], "and no state of the optimizer"
    counted = Training(dtype="fp32", distributed_optimizer=False, gpu=False, lora=LORA)
    spec = read_spec(trained[family].model)
    (rank,) = trainer_memory(spec, ParallelConfig(**LAYOUTS[layout]), counted)
    assert rank.gradients == 4 * found["buffered"], "the dry run counts them exactly"


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in DEFAULT])
def test_every_layout_has_them(trained: dict[str, Trained], family: str, layout: str) -> None:
    _check(trained[family].gaps(trained[family].run(layout)))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            marks=() if (family, layout) == ("qwen3_moe", "ep2") else pytest.mark.full,
        )
        for family in FAMILIES
        for layout in ("ep2", "tp2-etp2", "tp2-ep2", "pp2", "pp2-tp2-ep2", "dp2-ep4-tp2")
    ],
)
def test_factors_that_experts_share_have_them(
    other: Callable[[str, str], Trained], family: str, layout: str
) -> None:
    case = other(family, "shared")
    found = case.run(layout)
    _check(case.gaps(found))
    counted = Training(dtype="fp32", distributed_optimizer=False, gpu=False, lora=SHARED)
    spec = read_spec(case.model)
    stages = trainer_memory(spec, ParallelConfig(**LAYOUTS[layout]), counted)
    assert stages[0].gradients == 4 * found["buffered"], "the dry run counts them once"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            family,
            layout,
            marks=() if (family, layout) == ("deepseek_v3", "tp2") else pytest.mark.full,
        )
        for family in FAMILIES
        for layout in ("tp2", "pp2", "ep2", "cp2", "pp2-tp2-ep2", "tp2-etp2")
    ],
)
def test_routers_and_the_head_have_them(
    other: Callable[[str, str], Trained], family: str, layout: str
) -> None:
    case = other(family, "wide")
    _check(case.gaps(case.run(layout)))
    own = [
        grad
        for name, grad in case.grads.items()
        if ".mlp.gate." in name or name.startswith("lm_head")
    ]
    assert len(own) >= 6
    assert all(grad.any() for grad in own)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if layout == "one" else pytest.mark.full)
        for layout in ("one", "tp2", "pp2", "cp2", "pp2-tp2-ep2")
    ],
)
def test_adapters_beside_frozen_weights_have_them(
    other: Callable[[str, str], Trained], layout: str
) -> None:
    """What engines with adapter slots compute."""
    case = other("qwen3_moe", "served")
    found = case.run(layout)
    _check(case.gaps(found))
    assert found["base_unchanged"]


@pytest.mark.full
def test_a_mistake_beside_frozen_weights_is_noticed(
    other: Callable[[str, str], Trained],
) -> None:
    case = other("qwen3_moe", "served")
    _check(case.gaps(case.run("tp2-ep2", megatron=FULL_RECOMPUTE)))
    for broken in ("scale", "other_a"):
        layout = "one" if broken == "scale" else "tp2"
        assert case.gaps(case.run(layout, broken=broken))["loss"] > 10 * LIMIT, broken
    gaps = case.gaps(case.run("tp2", broken="no_tp_sum"))
    assert gaps["loss"] <= LIMIT, "the loss does not see it"
    assert max(gaps.values()) > 1e-2


@pytest.mark.full
def test_a_gradient_of_a_router_or_the_head_that_is_not_summed_is_noticed(
    other: Callable[[str, str], Trained],
) -> None:
    """The loss does not see it."""
    case = other("qwen3_moe", "wide")
    gaps = case.gaps(case.run("tp2", broken="no_tp_sum"))
    assert gaps["loss"] <= LIMIT
    for where in ("mlp.gate.lora_A", "mlp.gate.lora_B", "lm_head.lora_A"):
        assert max(gap for name, gap in gaps.items() if where in name) > 1e-4, where


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ep2", "tp2-ep2"])
def test_a_shared_factor_without_the_experts_of_other_ranks_is_noticed(
    other: Callable[[str, str], Trained], layout: str
) -> None:
    """The loss does not see it."""
    case = other("qwen3_moe", "shared")
    gaps = case.gaps(case.run(layout, broken="no_ep_sum"))
    assert gaps["loss"] <= LIMIT
    assert max(gaps.values()) > 1e-2


@pytest.mark.full
def test_recompute_has_them(trained: dict[str, Trained]) -> None:
    case = trained["qwen3_moe"]
    _check(case.gaps(case.run("tp2-ep2", megatron=FULL_RECOMPUTE)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "form"), [("dp2", ""), ("ep2", ""), ("ep2", "shared"), ("dp2", "wide")]
)
def test_the_distributed_optimizer_takes_the_same_step(
    trained: dict[str, Trained], other: Callable[[str, str], Trained], layout: str, form: str
) -> None:
    case = other("qwen3_moe", form) if form else trained["qwen3_moe"]
    plain, cut = case.run(layout), case.run(layout, distributed=True)
    assert cut["adam"] < plain["adam"]
    for name, want in plain["values"].items():
        assert not torch.equal(want, case.factors[name]) or ".experts." in name
        torch.testing.assert_close(cut["values"][name], want, rtol=LIMIT, atol=1e-7)


@pytest.mark.parametrize("broken", ["scale", "next_expert"])
def test_a_wrong_adapter_is_noticed(trained: dict[str, Trained], broken: str) -> None:
    case = trained["qwen3_moe"]
    assert max(case.gaps(case.run("one", broken=broken)).values()) > 100 * LIMIT


@pytest.mark.full
@pytest.mark.parametrize("broken", ["other_a", "other_b"])
def test_factors_of_another_rank_are_noticed(trained: dict[str, Trained], broken: str) -> None:
    case = trained["qwen3_moe"]
    assert max(case.gaps(case.run("tp2", broken=broken)).values()) > 100 * LIMIT


@pytest.mark.full
def test_a_gradient_that_is_not_summed_is_noticed(trained: dict[str, Trained]) -> None:
    """The loss does not see it."""
    case = trained["deepseek_v3"]
    gaps = case.gaps(case.run("tp2", broken="no_tp_sum"))
    assert gaps["loss"] <= LIMIT
    assert max(gaps.values()) > 1e-2
