"""What a run with LoRA leaves: a checkpoint of factors alone, and a folder of peft.

A checkpoint of one layout continues on another one as on its own.  The folder, opened outside,
gives the loss that the trainer has next; tests/references opens such folders with peft itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moerl.config.lora_checks import check_lora
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import CheckpointConfig, Config, ModelConfig
from moerl.core.errors import ConfigError, ModelError
from moerl.launch.model_folders import with_start
from moerl.runtime.run_dir import RunDir
from moerl.trainer.checkpoints.start_adapter import write_start_adapter
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles
from moerl.trainer.hf_io.adapter_files import check_base, load_adapter
from moerl.trainer.hf_io.merge_adapter import merge_adapter
from tests.helpers.lora_oracle import LIMIT, LORA, SHARED, WIDE, Trained, read_spec, write_model

pytestmark = pytest.mark.full

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


@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_continues(case: Trained, saved: dict[str, Any], layout: str) -> None:
    assert _continued(case, saved, layout) <= LIMIT


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


# --- the start of another run ---------------------------------------------------------------------
CHECKPOINT = "run/checkpoints/step-000001"


def _near(found: dict[str, Any], wanted: float) -> bool:
    gap: float = abs(found["loss"] - wanted) / wanted
    print(f"loss {found['loss']:.6f}, wanted {wanted:.6f}, off by {gap:.1e}")
    return gap <= LIMIT


def test_adapters_of_a_checkpoint_are_a_folder(case: Trained, saved: dict[str, Any]) -> None:
    """Control: the folder is refused on other weights, and so is the checkpoint."""
    out = case.folder / "start"
    write_start_adapter(case.folder / CHECKPOINT, out, case.model)
    assert load_adapter(out, read_spec(case.model), LORA).keys() == saved["values"].keys()
    check_base(out, case.model)
    other = write_model(case.folder / "other", "deepseek_v3", seed=1)
    for refused in (
        lambda: check_base(out, other),
        lambda: write_start_adapter(case.folder / CHECKPOINT, out, other),
    ):
        with pytest.raises(ModelError, match="fingerprint"):
            refused()


def test_checkpoint_start_makes_them_the_start_of_a_run(
    case: Trained, saved: dict[str, Any], tmp_path: Path
) -> None:
    """Control: other adapters are refused, and a run without any is told what would do."""
    run = RunDir(tmp_path / "next")
    run.root.mkdir()
    start = CheckpointConfig(start=str(case.folder / CHECKPOINT))
    config = Config(model=ModelConfig(path=str(case.model)), checkpoint=start, lora=LORA)
    for lora, says in ((replace(LORA, rank=5), "holds adapters of"), (LoraConfig(), "merged")):
        with pytest.raises(ConfigError, match=says):
            with_start(replace(config, lora=lora), run)
    found = with_start(config, run)
    assert found.lora == replace(LORA, start=str(run.root / "start"))
    assert found.model == config.model
    check_lora(replace(found, run=replace(found.run, root=str(tmp_path), name="next")))


@pytest.mark.parametrize("layout", ["pp2", "tp2-ep2"])
def test_another_run_starts_from_a_checkpoint(
    case: Trained, saved: dict[str, Any], layout: str
) -> None:
    """Adapters stay adapters, on other ranks.  Control: the batch's loss before that checkpoint."""
    out = case.folder / f"start-{layout}"
    write_start_adapter(case.folder / CHECKPOINT, out, case.model)
    found = case.run(layout, start=str(out), first=1, until=2)
    assert _near(found, saved["loss"])
    assert not _near(case.run(layout, first=1, until=2), saved["loss"])


def test_a_run_starts_from_the_adapter_as_from_the_merged_folder(
    case: Trained, saved: dict[str, Any]
) -> None:
    """The last adapter of a run on its model, and fresh adapters on its merged weights."""
    adapter, merged = case.folder / "adapter", case.folder / "merged"
    merge_adapter(case.model, adapter, LORA, merged, torch.float32)
    wanted = case.run("pp2", start=str(adapter), first=2, until=3)["loss"]
    zero = {name: torch.zeros_like(value) for name, value in case.factors.items()}
    save_file(zero, case.folder / "zero.safetensors")
    fresh = case.run("cp2", model=merged, factors="zero.safetensors", first=2, until=3)
    assert _near(fresh, wanted)
    assert not _near(case.run("cp2", factors="zero.safetensors", first=2, until=3), wanted)
