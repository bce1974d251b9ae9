"""Which checkpoints a configuration may continue from; no torch is needed to say so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.config import load_config, resolve, save_config
from moerl.config.load import derived_settings, load_resumed, load_saved
from moerl.config.resume import check_identity, check_resume, identity, resume_facts
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


# --- settings that follow others, and those that a resume must share ------------------------------
def _resumed(folder: Path, asked: list[str], *overrides: str) -> Config:
    """The settings of a resume of a run with `asked`."""
    place = [f"run.root={folder.parent}", f"run.name={folder.name}"]
    config = _config([*asked, *place])
    save_config(resolve(config), folder / "config.yaml", derived_settings(config))
    assert load_saved(folder / "config.yaml") == resolve(config), "processes read the resolved ones"
    return resolve(load_resumed(folder / "config.yaml", overrides))


@pytest.mark.parametrize(
    ("asked", "source", "whole"),
    [
        (["run.steps=4"], "run.steps=6", ["run.steps=6"]),
        (["run.steps=4", "trainer.optimizer.decay_steps=9"], "run.steps=6",
         ["run.steps=6", "trainer.optimizer.decay_steps=9"]),
        (["rollout.fixed_lag=2"], "rollout.fixed_lag=-1", []),
        (["sampling.top_k=-1"], "sampling.mask_top_k=77",
         ["sampling.top_k=-1", "sampling.mask_top_k=77"]),
        (["model.fp32_lm_head=true"], "model.fp32_lm_head=false", ["model.fp32_lm_head=false"]),
    ],
)  # fmt: skip
def test_a_derived_setting_follows_its_source_on_resume(
    asked: list[str], source: str, whole: list[str], tmp_path: Path
) -> None:
    whole = [*whole, f"run.root={tmp_path.parent}", f"run.name={tmp_path.name}"]
    assert _resumed(tmp_path, asked, source) == resolve(_config(whole))
    (tmp_path / "derived.yaml").unlink()
    kept = resolve(load_resumed(tmp_path / "config.yaml", [source]))
    is_stale = kept != resolve(_config(whole))
    assert is_stale or "decay_steps" in str(asked), "control: the file makes the difference"


def test_the_learning_rate_of_a_resume_is_that_of_a_whole_run(tmp_path: Path) -> None:
    from moerl.trainer.learner.optimizer import make_schedule

    style = ["trainer.optimizer.decay_style=linear", "trainer.optimizer.min_lr=0"]
    style += ["trainer.optimizer.lr=0.6", "trainer.optimizer.warmup_steps=0"]

    def rates(config: Config, state: dict[str, Any] | None, steps: int) -> tuple[list[float], Any]:
        optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
        schedule = make_schedule(optimizer, config.trainer.optimizer, config.run.steps)
        if state is not None:
            schedule.load_state_dict(state)
        found = []
        for _ in range(steps):
            schedule.step(increment=1)  # before the update, as the learner does
            found.append(optimizer.param_groups[0]["lr"])
        return found, schedule.state_dict()

    whole, _ = rates(resolve(_config(["run.steps=6", *style])), None, 6)
    assert whole == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    for steps in (6, 4):  # a run that was stopped, and one that was meant to be shorter
        first, state = rates(resolve(_config([f"run.steps={steps}", *style])), None, 4)
        again = _resumed(tmp_path, [f"run.steps={steps}", *style], "run.steps=6")
        rest, _ = rates(again, state, 2)
        assert rest == pytest.approx(whole[4:])
        assert first == pytest.approx(whole[:4]) or steps == 4
    stale = resolve(_config(["run.steps=4", *style]))
    assert rates(stale, state, 2)[0] == pytest.approx([0.0, 0.0]), "control: the old decay"


TASK = ["task.name=jsonl", "task.reward=exact_match"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("run.seed=9", "run.seed"),
        ("task.shuffle=false", "task.shuffle"),
        ("task.reward=math_verify", "task.reward"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low"),
        ("tasks=[{label: a}, {label: b}]", "tasks"),
        ("task.path={other}", "task.path"),
    ],
)
def test_another_task_seed_or_algorithm_is_refused(change: str, field: str, tmp_path: Path) -> None:
    data, other, copy = (tmp_path / f"{name}.jsonl" for name in ("data", "other", "copy"))
    data.write_text('{"prompt": "1", "answer": "2"}\n')
    other.write_text('{"prompt": "1", "answer": "3"}\n')
    copy.write_text(data.read_text())
    asked = [*TASK, f"task.path={data}"]
    saved = identity(_config(asked))
    change = change.replace("{other}", str(other))
    with pytest.raises(ConfigError, match="--allow-changed") as refusal:
        check_identity(_config([*asked, change]), saved)
    assert refusal.value.field == field
    for same in ("task.scorer_workers=2", "trainer.optimizer.lr=1", f"task.path={copy}"):
        check_identity(_config([*asked, same]), saved)
    del saved["task.agent.grammars"]  # as of a version that does not know it
    check_identity(_config(asked), saved)
    data.write_text(other.read_text())  # the same name, other lines
    with pytest.raises(ConfigError, match=r"task\.path"):
        check_identity(_config(asked), saved)
    data.unlink()
    check_identity(_config(asked), saved)


def test_secrets_of_a_task_are_not_written() -> None:
    judge = "{judge: {base_url: 'http://127.0.0.1/v1', api_key: abc123}}"
    asked = ["task.agent.command=[true]", f"task.agent.models={judge}"]
    facts = identity(_config(asked))
    assert facts["task.agent.models"]["judge"]["api_key"] == "(hidden)"
    assert "abc123" not in json.dumps(facts)


def test_the_flag_allows_a_change_and_the_next_resume_knows_it(tmp_path: Path) -> None:
    from moerl.launch.train import prepare
    from moerl.runtime.run_dir import RunDir

    run, seed = RunDir(tmp_path / "run"), ["run.seed=9"]
    run.create()
    run.checkpoint(2).mkdir()
    facts = json.loads(json.dumps(resume_facts(_config([])))) | {
        "files": {"metadata.json": [2, ""]}
    }
    (run.checkpoint(2) / "manifest.json").write_text(json.dumps(facts))
    (run.checkpoint(2) / "metadata.json").write_text("{}")
    run.identity.write_text(json.dumps(identity(_config([]))))
    with pytest.raises(ConfigError, match="--allow-changed"):
        prepare(_config(seed), run, resume=True)
    prepare(_config(seed), run, resume=True, allow_changed=True)
    prepare(_config([]), run, resume=True)


def test_steps_that_no_checkpoint_holds_are_trained_again_on_request_only(tmp_path: Path) -> None:
    from moerl.launch.train import prepare
    from moerl.runtime.run_dir import RunDir

    run = RunDir(tmp_path / "run")
    run.create()
    prepare(_config([]), run, resume=True)  # nothing was trained: nothing is lost
    run.metrics.write_text('{"step": 2, "version": "0.3", "time_s": 0}\n')
    with pytest.raises(ConfigError, match=r"3 steps .* --from-start"):
        prepare(_config([]), run, resume=True)
    assert run.metrics.exists()
    assert prepare(_config([]), run, resume=True, from_start=True).checkpoint is None
