"""A checkpoint continues on another parallel layout exactly as on its own.

Two steps on layout A, a checkpoint written while a third step trains, then step 3 on layout B from
it, against step 3 on A without any checkpoint.  Control: fresh optimizer state must differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_support import ROOT, make_model, torchrun

LIMIT = 1e-6  # relative
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2, "etp": 2},
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2-dp2": {"dp": 4, "ep": 2},
    "tp2-ep2": {"tp": 2, "dp": 2, "ep": 2},
    "pp2-ep2": {"pp": 2, "dp": 2, "ep": 2},
}


def _phase(layout: str, work: Path, **fields: Any) -> dict[str, Any]:
    plain = {"distributed": False, "load": "", "reset": False, "until": 3, "save": "", "out": ""}
    phase = plain | {"parallel": LAYOUTS[layout]} | fields
    for name in ("save", "out"):
        phase[name] = str(work / phase[name]) if phase[name] else ""
    if phase["load"]:
        phase["load"] = str(work / phase["load"] / "checkpoints" / "step-000002")
    return phase


def _run(model: Path, work: Path, ranks: int, phases: list[dict[str, Any]]) -> None:
    listing = work / "phases.json"
    listing.write_text(json.dumps(phases))
    script = str(ROOT / "tests" / "multi" / "trainer_resume.py")
    torchrun(
        ranks,
        [script, "--model", str(model), "--work", str(work), "--phases", str(listing)],
        timeout_s=240,
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All phases: two ranks write, two and four ranks continue."""
    work = tmp_path_factory.mktemp("resume")
    model = make_model(work / "model")
    two, four = [], []
    for side, kind, others, wider in (
        ("dp2", "plain", ("tp2", "pp2", "dp2"), ()),
        ("dp2", "distributed", ("tp2", "pp2", "dp2"), ()),
        ("ep2", "plain", ("ep2",), ("ep4", "ep2-dp2", "tp2-ep2", "pp2-ep2")),
        ("ep2", "distributed", (), ("ep4", "ep2-dp2", "tp2-ep2", "pp2-ep2")),
    ):
        save, distributed = f"{side}-{kind}", kind == "distributed"
        two.append(_phase(side, work, distributed=distributed, until=2, save=save))
        two.append(_phase(side, work, distributed=distributed, out=f"{save}.whole.pt"))
        for group, phases in ((others, two), (wider, four)):
            phases += [
                _phase(layout, work, distributed=distributed, load=save, out=f"{save}.{layout}.pt")
                for layout in group
            ]
    two.append(_phase("dp2", work, load="dp2-plain", reset=True, out="same-reset.pt"))
    two.append(_phase("ep2", work, load="dp2-plain", reset=True, out="across-reset.pt"))
    _run(model, work, 2, two)
    _run(model, work, 4, four)
    return work


CASES = [
    *(("dp2-plain", layout) for layout in ("tp2", "pp2", "dp2")),
    *(("dp2-distributed", layout) for layout in ("tp2", "pp2", "dp2")),
    *(("ep2-plain", layout) for layout in ("ep2", "ep4", "ep2-dp2", "tp2-ep2", "pp2-ep2")),
    *(("ep2-distributed", layout) for layout in ("ep4", "ep2-dp2", "tp2-ep2", "pp2-ep2")),
]


def _gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor, relative to its largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[n] - other[n]).abs().max() / other[n].abs().max()) for n in other)


@pytest.mark.parametrize(("saved", "layout"), CASES)
def test_another_layout_continues_exactly(work: Path, saved: str, layout: str) -> None:
    whole, found = torch.load(work / f"{saved}.whole.pt"), torch.load(work / f"{saved}.{layout}.pt")
    assert abs(found["loss"] - whole["loss"]) <= LIMIT * max(abs(whole["loss"]), 1e-3)
    assert abs(found["norm"] - whole["norm"]) <= 10 * LIMIT * whole["norm"]
    if saved.startswith(layout):
        assert _gap(found["weights"], whole["weights"]) == 0.0
    assert _gap(found["weights"], whole["weights"]) <= 10 * LIMIT


@pytest.mark.parametrize("name", ["same-reset", "across-reset"])
def test_fresh_optimizer_state_keeps_the_weights_and_moves_elsewhere(work: Path, name: str) -> None:
    whole, found = torch.load(work / "dp2-plain.whole.pt"), torch.load(work / f"{name}.pt")
    assert abs(found["loss"] - whole["loss"]) <= LIMIT * max(abs(whole["loss"]), 1e-3)
    assert _gap(found["weights"], whole["weights"]) > 100 * LIMIT
