"""A checkpoint continues on another parallel layout exactly as on its own.

Two steps on layout A, a checkpoint written while a third step trains, then step 3 on layout B from
it, against step 3 on A without any checkpoint.  Controls: fresh optimizer state must differ, and
so must the state that megatron-core itself saves of buckets with padding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moerl.trainer.checkpoints.convert import convert_to_hf
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import OVERLAPPED, ROOT, make_model

LIMIT = 1e-6  # relative
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "pp2-uneven": {"pp": 2, "first_stage_layers": 1},
    "ep2": {"dp": 2, "ep": 2},
    "ep2-tp2": {"tp": 2, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2-dp2": {"dp": 4, "ep": 2},
    "tp2-ep2": {"tp": 2, "dp": 2, "ep": 2},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
}


def _phase(layout: str, work: Path, **fields: Any) -> dict[str, Any]:
    plain = {"distributed": False, "load": "", "reset": False, "until": 3, "save": "", "out": ""}
    plain |= {"optimizer": {}, "gathered": False}
    phase = plain | {"parallel": LAYOUTS[layout]} | fields
    phase["ddp"] = OVERLAPPED if phase["distributed"] else {}
    for name in ("save", "out"):
        phase[name] = str(work / phase[name]) if phase[name] else ""
    if phase["load"]:
        phase["load"] = str(work / phase["load"] / "checkpoints" / "step-000002")
    return phase


def _run(model: Path, work: Path, ranks: int, phases: list[dict[str, Any]]) -> None:
    listing = work / "phases.json"
    listing.write_text(json.dumps(phases))
    script = str(ROOT / "tests" / "helpers" / "trainer_resume_ranks.py")
    run_ranks(
        ranks,
        [script, "--model", str(model), "--work", str(work), "--phases", str(listing)],
        timeout_s=240,
    )


# side and kind of optimizer that write; layouts of two ranks, then of four, that continue
Plan = tuple[str, str, tuple[str, ...], tuple[str, ...]]
SHORT: tuple[Plan, ...] = (
    ("dp2", "distributed", ("pp2", "pp2-uneven"), ()),
    ("ep2", "distributed", ("ep2-tp2",), ()),
)
CHANGES = {
    "constant": {"lr": 3e-4, "decay_style": "constant", "beta1": 0.5, "eps": 1e-3},
    "longer": {"decay_steps": 10},
    "below": {"lr": 1e-4},  # and min_lr is 1e-3
}
WIDE = ("ep4", "ep2-dp2", "tp2-ep2", "pp2-ep2")
LONG: tuple[Plan, ...] = (
    ("dp2", "plain", ("tp2", "pp2", "dp2"), ()),
    ("dp2", "distributed", ("tp2", "dp2"), ()),
    ("ep2", "plain", ("ep2",), WIDE),
    ("ep2", "distributed", (), WIDE),
)


OTHER_SAVES = ("tp2", "pp2", "pp2-uneven", "ep2-tp2")  # nothing continues from them
SAVED = [f"{side}-{kind}" for side, kind, *_ in LONG] + [f"{side}-plain" for side in OTHER_SAVES]


def _cases(plans: tuple[Plan, ...]) -> list[tuple[str, str]]:
    return [
        (f"{side}-{kind}", layout)
        for side, kind, others, wider in plans
        for layout in (*others, *wider)
    ]


def _work(
    work: Path,
    plans: tuple[Plan, ...],
    resets: dict[str, str],
    changes: dict[str, dict[str, Any]] | None = None,
    *,
    gathered: bool = False,
) -> Path:
    """Run all phases; resets: layouts that continue from dp2 with fresh optimizer state; changes:
    settings of the optimizer under which dp2 continues; gathered: dp2 continues from what
    megatron-core saves, too."""
    model = make_model(work / "model")
    two: list[dict[str, Any]] = []
    four: list[dict[str, Any]] = []
    for side, kind, others, wider in plans:
        save, distributed = f"{side}-{kind}", kind == "distributed"
        saving = _phase(side, work, distributed=distributed, until=2, save=save)
        two.append(saving | {"gathered": gathered and not two})
        two.append(_phase(side, work, distributed=distributed, out=f"{save}.whole.pt"))
        for group, phases in ((others, two), (wider, four)):
            phases += [
                _phase(layout, work, distributed=distributed, load=save, out=f"{save}.{layout}.pt")
                for layout in group
            ]
    source = f"{plans[0][0]}-{plans[0][1]}"
    for name, layout in resets.items():
        two.append(_phase(layout, work, load=source, reset=True, out=f"{name}.pt"))
    distributed = plans[0][1] == "distributed"
    for name, settings in (changes or {}).items():
        phase = _phase("dp2", work, load=source, distributed=distributed, out=f"{name}.pt")
        two.append(phase | {"optimizer": settings})
    for form in ("cut", "gathered") if gathered else ():
        load, out = f"{source}-{form}", f"{form}.pt"
        two.append(_phase("dp2", work, load=load, distributed=distributed, out=out))
    _run(model, work, 2, two)
    if four:
        _run(model, work, 4, four)
    return work


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("short")
    return _work(work, SHORT, {"across": "ep2"}, CHANGES, gathered=True)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saves: tuple[Plan, ...] = tuple((side, "plain", (), ()) for side in OTHER_SAVES)
    work = tmp_path_factory.mktemp("long")
    return _work(work, (*LONG, *saves), {"same": "dp2", "across": "ep2"})


def _gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor, relative to its largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max() / other[n].abs().max()) for n in other)


def _check_continued(work: Path, saved: str, layout: str) -> None:
    whole, found = torch.load(work / f"{saved}.whole.pt"), torch.load(work / f"{saved}.{layout}.pt")
    assert abs(found["loss"] - whole["loss"]) <= LIMIT * max(abs(whole["loss"]), 1e-3)
    assert abs(found["norm"] - whole["norm"]) <= 10 * LIMIT * whole["norm"]
    if saved.startswith(f"{layout}-"):
        assert _gap(found["weights"], whole["weights"]) == 0.0
    assert _gap(found["weights"], whole["weights"]) <= 10 * LIMIT


def _check_reset(work: Path, name: str, source: str) -> None:
    """The weights are those of the checkpoint, so is the loss; the step after it goes elsewhere."""
    whole, found = torch.load(work / f"{source}.whole.pt"), torch.load(work / f"{name}.pt")
    assert abs(found["loss"] - whole["loss"]) <= LIMIT * max(abs(whole["loss"]), 1e-3)
    assert _gap(found["weights"], whole["weights"]) > 100 * LIMIT


@pytest.mark.parametrize(("saved", "layout"), _cases(SHORT))
def test_another_layout_continues_exactly(short: Path, saved: str, layout: str) -> None:
    _check_continued(short, saved, layout)


def test_fresh_optimizer_state_crosses_the_boundary_and_moves_elsewhere(short: Path) -> None:
    _check_reset(short, "across", "dp2-distributed")


def test_the_form_of_megatron_core_is_read_and_its_own_is_wrong_behind_padding(short: Path) -> None:
    whole, gathered, cut = (
        torch.load(short / f"{name}.pt") for name in ("dp2-distributed.whole", "gathered", "cut")
    )
    assert _gap(gathered["weights"], whole["weights"]) == 0.0
    assert cut["loss"] != whole["loss"], "fp32 weights are part of that state"
    assert _gap(cut["weights"], whole["weights"]) > 100 * LIMIT


@pytest.mark.full
@pytest.mark.parametrize(("saved", "layout"), _cases(LONG))
def test_every_layout_continues_exactly(long: Path, saved: str, layout: str) -> None:
    _check_continued(long, saved, layout)


@pytest.mark.full
@pytest.mark.parametrize("name", ["same", "across"])
def test_a_reset_keeps_the_weights_and_moves_elsewhere(long: Path, name: str) -> None:
    _check_reset(long, name, "dp2-plain")


def _check_converted(work: Path, saved: str, to: Path) -> None:
    source = MegatronFolder(work / saved / "checkpoints" / "step-000002", work / "model")
    convert_to_hf(source, to, ConversionRanks(), lambda *_: None)
    found, want = load_file(to / "model.safetensors"), torch.load(work / saved / "weights.pt")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    # control: a step more
    other = torch.load(work / f"{saved}.whole.pt")["weights"]
    assert all(not torch.equal(found[name], other[name]) for name in want)


@pytest.mark.parametrize("saved", ["dp2-distributed", "ep2-distributed"])
def test_a_checkpoint_converts_to_the_weights_that_were_saved(
    short: Path, tmp_path: Path, saved: str
) -> None:
    _check_converted(short, saved, tmp_path / "hf")


@pytest.mark.full
@pytest.mark.parametrize("saved", SAVED)
def test_every_layout_converts_to_the_weights_that_were_saved(
    long: Path, tmp_path: Path, saved: str
) -> None:
    _check_converted(long, saved, tmp_path / "hf")


def test_a_resume_has_the_rate_and_constants_it_is_given(short: Path) -> None:
    """The third step of three configurations, from the checkpoint of another one."""
    whole = torch.load(short / "dp2-distributed.whole.pt")
    constant, longer = (torch.load(short / f"{name}.pt") for name in ("constant", "longer"))
    assert whole["rate"] == pytest.approx(1e-2 - 3 / 4 * 9e-3)
    assert constant["rate"] == pytest.approx(3e-4)
    assert longer["rate"] == pytest.approx(1e-2 - 3 / 10 * 9e-3)
    assert set(constant["adam"]) == {(0.5, 0.95, 1e-3)}
    assert set(whole["adam"]) == set(longer["adam"]) == {(0.9, 0.95, 1e-4)}
    assert longer["loss"] == whole["loss"], "its weights are those of the checkpoint"


def test_a_rate_below_the_least_rate_does_not_rise_to_it(short: Path) -> None:
    assert torch.load(short / "below.pt")["rate"] == pytest.approx(1e-4)
