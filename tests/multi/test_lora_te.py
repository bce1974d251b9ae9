"""LoRA on layers of Transformer Engine: loss and gradients are those of transformers.

megatron-core's own classes of these layers and its grouped experts run, over a stand-in for the
package (tests/helpers/te_modules.py), which is itself compared without adapters first.  What the
package's kernels compute is not shown here; tests/gpu/test_te_gpu.py has it on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.lora_oracle import FAMILIES, LIMIT, LORA, SERVED, SHARED, WIDE, Found, Trained
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

pytestmark = pytest.mark.full

FORMS = {"each": LORA, "shared": SHARED, "wide": WIDE, "served": SERVED}
RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Trained]:
    """Of a family, with factors of one form."""
    return cache(
        lambda family, form="each": Trained(
            tmp_path_factory.mktemp(f"{family}-{form}"), family, FORMS[form]
        )
    )


def _run(case: Trained, layout: str, **settings: Any) -> Found:
    found = case.run(layout, on="te", **settings)
    assert found["te_layers"] >= 10, "layers are megatron-core's own"  # five in each of two
    assert found["te_products"] == 0, "no gradient of a frozen weight is computed"
    return found


def _check(gaps: dict[str, float]) -> None:
    worst = max(gaps, key=gaps.__getitem__)
    print(f"loss {gaps['loss']:.1e}, norm {gaps['norm']:.1e}, worst {worst}: {gaps[worst]:.1e}")
    assert gaps[worst] <= LIMIT, f"{worst}: {gaps[worst]:.1e}"


# --- the stand-in ---------------------------------------------------------------------------------
def _plain(folder: Path, model: Path, on: str, ranks: int, *layout: str) -> Found:
    """A step of all weights, with recorded routes and masks."""
    folder.mkdir()
    out = folder / "found.pt"
    script = str(ROOT / "tests/helpers/trainer_parity_ranks.py")
    places = ["--model", str(model), "--work", str(folder), "--out", str(out)]
    run_ranks(ranks, [script, *places, *layout], on=on)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize(
    "layout",
    [(), ("--tp", "2", "--ep", "2"), ("--tp", "2", "--etp", "2")],
    ids=["one", "tp2-ep2", "tp2-etp2"],
)
def test_without_adapters_the_stand_in_trains_like_local_layers(
    layout: tuple[str, ...], tmp_path: Path
) -> None:
    """Logits, log-probabilities, gradients of all weights.

    Controls: routes of other tokens; products for gradients of weights are counted.
    """
    model = make_model(tmp_path / "model")
    want = _plain(tmp_path / "cpu", model, "cpu", 1)
    found = _plain(tmp_path / "te", model, "te", 2 if layout else 1, *layout)
    assert float((found["logits"] - want["logits"]).abs().max()) <= LIMIT
    for name in ("replay", "live"):
        for row, value in want[name].items():
            torch.testing.assert_close(found[name][row], value, rtol=0, atol=LIMIT)
    assert abs(found["grad_norm"] / want["grad_norm"] - 1) <= LIMIT
    assert found["gradients"].keys() == want["gradients"].keys()
    for name, value in want["gradients"].items():
        largest = float(value.abs().max())
        torch.testing.assert_close(
            found["gradients"][name], value, rtol=LIMIT, atol=LIMIT * largest, msg=name
        )
    wrong = [(found["shifted"][row] - value).abs().max() for row, value in want["replay"].items()]
    assert max(wrong) > 100 * LIMIT
    assert found["te_products"] > 0


# --- adapters -------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout",
    [
        "tp2-ep2",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("one", "tp2", "tp2-etp2", "ep2", "pp2-vpp2", "pp2-tp2-ep2")
        ),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(
    trained: Callable[..., Trained], family: str, layout: str
) -> None:
    case = trained(family)
    found = _run(case, layout)
    _check(case.gaps(found))
    assert found["base_unchanged"]
    assert found["buffered"] == found["trained"], "frozen weights have no gradient buffer"


@pytest.mark.parametrize("form", ["shared", "wide", "served"])
@pytest.mark.parametrize("layout", ["one", "tp2-ep2"])
def test_other_forms_of_adapters_have_them(
    trained: Callable[..., Trained], form: str, layout: str
) -> None:
    """Factors that experts share; of routers and the head; beside frozen weights."""
    case = trained("qwen3_moe", form)
    _check(case.gaps(_run(case, layout)))


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_have_them(trained: Callable[..., Trained], family: str) -> None:
    case = trained(family)
    _check(case.gaps(_run(case, "tp2-ep2", megatron=RECOMPUTED)))


def test_packed_rows_have_them(trained: Callable[..., Trained]) -> None:
    for family in FAMILIES:
        case = trained(family)
        _check(case.gaps(_run(case, "tp2-ep2", packing=True)))


@pytest.mark.parametrize(
    "broken", ["next_rows", pytest.param("next_expert", marks=pytest.mark.full)]
)
def test_a_mistake_with_experts_is_noticed(trained: Callable[..., Trained], broken: str) -> None:
    """Factors of the next expert; its rows, which the loss does not see."""
    case = trained("qwen3_moe")
    gaps = case.gaps(_run(case, "one", broken=broken))
    assert max(gaps.values()) > 1000 * LIMIT
    assert (gaps["loss"] <= LIMIT) == (broken == "next_rows")


@pytest.mark.parametrize("broken", ["before_norm", "no_tp_sum"])
def test_a_mistake_with_layers_that_are_cut_is_noticed(
    trained: Callable[..., Trained], broken: str
) -> None:
    """The input of a norm in place of its output; a gradient that is not summed."""
    for family in FAMILIES:
        case = trained(family)
        gaps = case.gaps(_run(case, "tp2", broken=broken))
        assert gaps["loss"] <= LIMIT, "the loss does not see it"
        assert max(gaps.values()) > 1e-2
