"""With adapters, the reference of a KL is the trained model with adapters off.

The oracle is a second model that is loaded from the same folder and scores the same records.  A
teacher that follows the policy is the trained model with other adapters, or adapters on ranks of
their own; its oracle is the model when it had them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config.lora_settings import LoraConfig
from tests.helpers.lora_oracle import LORA
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

pytestmark = pytest.mark.full

LIMIT = 1e-6  # nats
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "dp2-ep2": {"dp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "tp2-pp2-etp2": {"tp": 2, "pp": 2, "etp": 2},
}
DEFAULT = ("tp2-ep2",)
ON = replace(LORA, alpha=2)
FORMS = {
    "shared, routers, head": (
        replace(ON, experts="shared", targets=[*ON.targets, "*.mlp.gate", "lm_head"]),
        "fp32",
    ),
    "bf16": (ON, "bf16"),
}


def _found(folder: Path, layout: str, lora: LoraConfig = ON, dtype: str = "fp32") -> dict[str, Any]:
    sizes = LAYOUTS[layout]
    script = str(ROOT / "tests/helpers/lora_reference_ranks.py")
    arguments = ["--model", str(make_model(folder / "model")), "--work", str(folder / "work")]
    arguments += ["--lora", json.dumps(asdict(lora)), "--dtype", dtype]
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
    output = run_ranks(world, [script, *arguments, "--sizes", json.dumps(sizes)])
    found: dict[str, Any] = json.loads(output.split("FOUND ")[1].splitlines()[0])
    return found


def _check(found: dict[str, Any]) -> None:
    print({name: value for name, value in found.items() if name != "steps"})
    assert found["loaded"] == [[], ["reference"]], "no second model, unless it is named"
    assert found["gap"] <= LIMIT
    assert found["adapters_on"] > 0.1, "control: adapters move the scores"
    assert found["restored"], "bitwise the weights that are trained"
    assert found["waited"] == 1, "a snapshot is copied before, once per batch"
    of_teacher = found["teacher"]
    assert max(of_teacher["borrowed"], of_teacher["apart"]) <= LIMIT
    assert of_teacher["control"] > 0.01, "control: the model has other adapters"
    assert not of_teacher["moved"], "bitwise the weights of before"
    for own, second in found["steps"]:
        assert own["lora/base_swap_s"] > 0
        assert "lora/base_swap_s" not in second
        assert own["loss/kl_ref_k3"] > 1e-3
        for name in ("loss/kl_ref", "loss/kl_ref_k3", "loss/grad_norm"):
            assert own[name] == pytest.approx(second[name], rel=1e-5), name


@pytest.mark.parametrize("layout", DEFAULT)
def test_adapters_off_are_the_reference(tmp_path: Path, layout: str) -> None:
    _check(_found(tmp_path, layout))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in DEFAULT])
def test_every_layout_has_it(tmp_path: Path, layout: str) -> None:
    _check(_found(tmp_path, layout))


@pytest.mark.parametrize("layout", ["dp2-ep2", "pp2-vpp2"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_adapters_have_it(tmp_path: Path, form: str, layout: str) -> None:
    _check(_found(tmp_path, layout, *FORMS[form]))
