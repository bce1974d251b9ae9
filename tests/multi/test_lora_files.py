"""What a run with LoRA leaves: a checkpoint of factors alone, and a folder of peft.

A checkpoint of one layout continues on another one as on its own.  The folder, opened outside,
gives the loss that the trainer has next; tests/references opens such folders with peft itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora_parity import LIMIT, SHARED, WIDE, Trained

from moerl.config.lora_settings import LoraConfig
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles
from moerl.trainer.hf_io.adapter_files import load_adapter
from tests.helpers.lora_oracle import LORA, read_spec

OTHERS = ("tp2-etp2", "pp2", "pp2-vpp2", "cp2")  # with ep 1, as the side that saves


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("deepseek"), "deepseek_v3")


@pytest.fixture(scope="module")
def saved(case: Trained) -> dict[str, Any]:
    """Two steps of two data-parallel ranks, a checkpoint after the first."""
    folder = str(case.folder / "run")
    adapter = str(case.folder / "adapter")
    return case.run("dp2", distributed=True, until=2, save=folder, adapter=adapter)


def _continued(case: Trained, saved: dict[str, Any], layout: str) -> float:
    load = str(case.folder / "run")
    found = case.run(layout, distributed=True, until=2, load=load)
    assert abs(found["loss"] - saved["loss"]) <= LIMIT * saved["loss"]
    values = saved["values"]
    return max(
        float((found["values"][name] - values[name]).abs().max() / values[name].abs().max())
        for name in values
    )


def test_another_layout_continues_as_its_own(case: Trained, saved: dict[str, Any]) -> None:
    assert _continued(case, saved, "pp2") <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_continues(case: Trained, saved: dict[str, Any], layout: str) -> None:
    assert _continued(case, saved, layout) <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("form", [SHARED, WIDE], ids=["shared", "routers and head"])
@pytest.mark.parametrize(("layout", "other"), [("dp2", "tp2-etp2"), ("ep2", "tp2-ep2")])
def test_other_forms_continue(tmp_path: Path, form: LoraConfig, layout: str, other: str) -> None:
    case, folder = Trained(tmp_path, "qwen3_moe", form), str(tmp_path / "run")
    saved = case.run(layout, distributed=True, until=2, save=folder)
    assert _continued(case, saved, other) <= LIMIT


def test_a_checkpoint_holds_factors_alone(case: Trained, saved: dict[str, Any]) -> None:
    assert saved["base_unchanged"]
    names = TorchDistFiles(case.folder / "run" / "checkpoints" / "step-000001").names
    weights = {name for name in names if not name.startswith(("optimizer", "random"))}
    assert weights == {f"lora.{name}" for name in case.factors}


def test_the_folder_has_the_factors_of_all_ranks(case: Trained, saved: dict[str, Any]) -> None:
    spec = read_spec(case.model)
    factors = load_adapter(case.folder / "adapter", spec, LORA)
    assert factors.keys() == saved["values"].keys()
    assert all(torch.equal(factors[name], value) for name, value in saved["values"].items())
