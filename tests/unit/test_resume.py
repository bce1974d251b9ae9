"""Which checkpoints a configuration may continue from; no torch is needed to say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.resume import check_resume, resume_facts
from moerl.config.schema import Config
from moerl.core.errors import ConfigError

EP1, EP2, EP4 = (["trainer.parallel.dp=4", f"trainer.parallel.ep={ep}"] for ep in (1, 2, 4))
DISTRIBUTED, BF16 = ["trainer.optimizer.distributed=true"], ["trainer.dtype=bf16"]
TP = ["trainer.parallel.tp=2", "trainer.parallel.dp=2", "trainer.parallel.ep=2"]
GAE = ["algorithm.advantage=gae"]


def _config(overrides: list[str]) -> Config:
    return load_config("quickstart-smoke", overrides)


def _saved(overrides: list[str]) -> dict[str, Any]:
    return json.loads(json.dumps(resume_facts(_config(overrides))))


@pytest.mark.parametrize(
    ("saved", "wanted"), [(EP2, EP4), (EP4, TP), (TP, EP2), (EP1, EP1 + ["trainer.parallel.pp=2"])]
)
def test_layouts_of_one_side_continue(saved: list[str], wanted: list[str]) -> None:
    check_resume(_config(wanted), _saved(saved), reset_optimizer=False)


@pytest.mark.parametrize(
    ("saved", "wanted", "field"),
    [
        (EP1, EP2, "trainer.parallel.ep"),
        (EP4, EP1, "trainer.parallel.ep"),
        (EP2, EP2 + DISTRIBUTED, "trainer.optimizer.distributed"),
        (EP2 + DISTRIBUTED, EP2, "trainer.optimizer.distributed"),
    ],
)
def test_another_form_of_optimizer_state_is_refused_unless_it_is_reset(
    saved: list[str], wanted: list[str], field: str
) -> None:
    with pytest.raises(ConfigError, match="--reset-optimizer") as refusal:
        check_resume(_config(wanted), _saved(saved), reset_optimizer=False)
    assert str(refusal.value).startswith(f"{field} = ")
    assert "\n" not in str(refusal.value)
    check_resume(_config(wanted), _saved(saved), reset_optimizer=True)


@pytest.mark.parametrize(("saved", "wanted"), [(EP2, EP2 + BF16), (EP2, EP2 + GAE)])
def test_missing_weights_are_refused_always(saved: list[str], wanted: list[str]) -> None:
    for reset in (False, True):
        with pytest.raises(ConfigError):
            check_resume(_config(wanted), _saved(saved), reset_optimizer=reset)


def test_the_refusal_comes_before_the_start_is_counted(tmp_path: Path) -> None:
    from moerl.launch.train import prepare
    from moerl.runtime.run_dir import RunDir

    run = RunDir(tmp_path / "run")
    run.create()
    run.checkpoint(2).mkdir()
    (run.checkpoint(2) / "manifest.json").write_text(
        json.dumps(_saved(EP1) | {"files": {"metadata.json": [2, ""]}})
    )
    (run.checkpoint(2) / "metadata.json").write_text("{}")
    with pytest.raises(ConfigError, match="--reset-optimizer"):
        prepare(_config(EP2), run, resume=True)
    assert not (run.root / "state.json").exists()


def test_a_crash_while_a_start_is_counted_keeps_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moerl.runtime.run_dir import RunDir, next_incarnation

    run = RunDir(tmp_path / "run")
    run.create()
    assert [next_incarnation(run, resume=bool(start)) for start in range(2)] == [0, 1]
    before = (run.root / "state.json").read_bytes()

    def crash(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        patch.setattr("os.replace", crash)
        with pytest.raises(OSError, match="power cut"):
            next_incarnation(run, resume=True)
    assert (run.root / "state.json").read_bytes() == before
    assert next_incarnation(run, resume=True) == 2
