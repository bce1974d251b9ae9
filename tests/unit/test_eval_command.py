"""`moerl eval`: the evaluation of runs without a trainer, of one model or of two."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moerl.audit import eval_command
from moerl.audit.eval_command import difference, paired, t_quantile
from moerl.audit.eval_page import TITLES, differences, rows, write_page
from moerl.cli import app
from moerl.config import load_config, save_config
from moerl.config.schema import EvaluationConfig
from moerl.core.errors import ConfigError, EngineError
from moerl.launch.eval_settings import evaluated
from moerl.runtime.run_dir import RunDir
from tests.helpers.controllers import CONFIG, Prompts, make, running, train
from tests.helpers.scripted_actors import Scene, death
from tests.helpers.stub_engine import StubEngine

ONCE = EvaluationConfig(every=1, prompts=5, samples=2, max_requests=3, hold_s=5.0)


# --- the evaluation of runs, without a trainer --------------------------------------------------
def test_engines_without_a_trainer_give_the_figures_of_version_0(tmp_path: Path) -> None:
    engines, config = [StubEngine(), StubEngine()], replace(CONFIG, evaluation=ONCE)

    async def alone() -> tuple[dict[str, float], list[dict[str, Any]]]:
        controller, _ = make(
            tmp_path / "alone", engines[0], config, held_out=Prompts(), more_engines=engines[1:]
        )
        return await running(controller, controller.evaluate())

    async def in_a_run(engine: StubEngine) -> dict[str, float]:
        controller, reports = make(tmp_path / "run", engine, config, held_out=Prompts())
        await running(controller, train(controller, 4))
        return next(r.metrics for r in reports if r.metrics.get("eval/step") == 0.0)

    metrics, prompts = asyncio.run(alone())
    one = StubEngine()
    row = asyncio.run(in_a_run(one))
    figures = {name: value for name, value in row.items() if name.startswith("eval/")}
    for each in (metrics, figures):
        each.pop("eval/seconds")
        each.pop("eval/given_up", None)
    assert metrics | {"eval/step": 0.0} == figures
    assert [row["index"] for row in prompts] == list(range(5))
    assert all(row["rewards"] == [0.0, 1.0] and len(row["answers"]) == 2 for row in prompts)

    asked = [{request.rollout_id for request in engine.requests} for engine in engines]
    assert all(name.startswith("eval-0.0-") for names in asked for name in names)
    assert [len(names) for names in asked] == [6, 4], "they take turns with prompts"
    places = [{name.partition(".")[2].partition(".")[0] for name in names} for names in asked]
    assert not places[0] & places[1], "answers to one prompt share an engine"
    assert not list(tmp_path.glob("alone/blobs/**/*eval*"))
    trained = [r for r in one.requests if not r.rollout_id.startswith("eval")]
    assert trained, "control: with a trainer the same settings generate more"


async def test_an_engine_that_dies_ends_it(tmp_path: Path) -> None:
    class Dying(StubEngine):
        async def submit(self, requests: Any) -> None:
            raise EngineError("its server is gone")

    config = replace(CONFIG, evaluation=ONCE)
    controller, _ = make(tmp_path, StubEngine(), config, held_out=Prompts(), more_engines=[Dying()])
    with pytest.raises(EngineError, match="its server is gone"):
        await running(controller, controller.evaluate())


def scene(root: Path, monkeypatch: pytest.MonkeyPatch, answers: Any) -> Scene:
    found = Scene(root)
    monkeypatch.setattr("moerl.launch.supervision.supervisor.start_ray", lambda *_: None)
    found.actors.controller_answers |= {"evaluate": answers}
    found.actors.controller_answers["poll"] = lambda: ({}, [], "", ["3 of 9 answers"])
    return found


def test_no_trainer_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = scene(tmp_path, monkeypatch, lambda: ({"eval/reward_mean": 1.0}, []))
    assert mine.supervisor.evaluate() == ({"eval/reward_mean": 1.0}, [])
    assert (mine.trainer.starts, mine.trainer.clocks) == (0, 1)
    assert len(mine.controller.asked("engines_started")) == 1
    other = Scene(tmp_path / "control")
    other.start()
    assert other.trainer.starts == 1, "control: a run starts one"


def test_its_progress_is_shown_and_the_first_failure_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = scene(tmp_path, monkeypatch, EngineError("each held-out episode has failed twice"))
    with pytest.raises(EngineError, match="failed twice"):
        mine.supervisor.evaluate()
    waits = scene(tmp_path / "waits", monkeypatch, None)
    del waits.actors.controller_answers["evaluate"]
    waits.signals.at = waits.clock() + 5.0
    with pytest.raises(Exception, match="interrupted"):
        waits.supervisor.evaluate()
    assert "3 of 9 answers" in waits.panel.events
    dies = scene(tmp_path / "dies", monkeypatch, lambda: death())
    with pytest.raises(EngineError, match="its process died"):
        dies.supervisor.evaluate()


# --- two models ---------------------------------------------------------------------------------
@pytest.mark.parametrize("freedom", [3, 5, 15, 63, 1000])
def test_the_quantile_has_the_integral_of_students_density(freedom: int) -> None:
    """2.5 % of the density lie beyond it, by Simpson's rule; control: 1.96 has too much beyond."""

    def beyond(bound: float) -> float:
        x = np.linspace(0.0, bound, 20001)
        scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
        density = math.exp(scale) / math.sqrt(freedom * math.pi)
        values = density * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
        weights = np.ones_like(x)
        weights[1:-1:2], weights[2:-1:2] = 4, 2
        return 0.5 - float((weights * values).sum() * (x[1] - x[0]) / 3)

    assert beyond(t_quantile(freedom)) == pytest.approx(0.025, rel=4e-3)
    if freedom < 100:
        assert beyond(1.96) > 0.0255


def test_the_interval_is_the_closed_form() -> None:
    values = [0.0, 0.5, 0.25, -0.25, 1.0, 0.5, 0.0, 0.0]
    found = difference(values)
    reach = 2.3646 * np.std(values, ddof=1) / 8**0.5  # 7 degrees of freedom, any table
    assert found["mean"] == 0.25
    assert (found["low"], found["high"]) == pytest.approx((0.25 - reach, 0.25 + reach), rel=1e-3)
    assert difference([0.5, 0.5, 1.0]).keys() == {"prompts", "mean"}


def test_it_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(0.3, 1.0, (2000, 8))
    found = [difference(list(row)) for row in draws]
    share = np.mean([one["low"] <= 0.3 <= one["high"] for one in found])
    assert 0.935 <= share <= 0.965


def rows_of(task: str, rewards: dict[int, list[float]]) -> list[dict[str, Any]]:
    said = {"prompt": "2+2=", "lengths": [1], "answers": ["4<b>"]}
    return [{"task": task, "index": i, "rewards": r, **said} for i, r in rewards.items()]


def test_pairs_are_the_same_prompts_of_the_same_task() -> None:
    model = rows_of("a", {0: [1.0, 0.0], 2: [1.0, 1.0], 4: [1.0]}) + rows_of("b", {1: [0.0]})
    base = rows_of("a", {0: [0.0, 0.0], 2: [0.5, 0.5]}) + rows_of("b", {1: [1.0], 3: [0.0]})
    found = paired(model, base)
    assert found["a"] == {"prompts": 2.0, "mean": 0.5}, "4 has no partner"
    assert found["b"] == {"prompts": 1.0, "mean": -1.0}
    assert found[""] == {"prompts": 3.0, "mean": 0.0}
    assert paired(base, model)[""]["mean"] == 0.0
    assert paired(base, model)["b"]["mean"] == 1.0, "control: the sign is the order"


def findings(rewards: dict[int, list[float]], label: str = "") -> dict[str, Any]:
    names = ("reward_mean", "reward_low", "reward_high", "reward_best", "pass_at_1")
    metrics = {f"eval/{name}": 0.25 for name in names}
    metrics |= {"eval/length_mean": 3.0, "eval/truncated_frac": 0.5, "eval/items": 4.0}
    metrics |= {f"{name}/{label}": value for name, value in metrics.items()} if label else {}
    return {
        "model": "/m",
        "metrics": metrics | {"eval/failed": 1.0},
        "prompts": rows_of(label, rewards),
    }


def test_rows_and_page_have_figures_differences_and_answers(tmp_path: Path) -> None:
    four = {i: [1.0] for i in range(4)}
    one, other = findings(four, "math"), findings({i: [0.5] for i in range(4)}, "math")
    found = {"recipe": "r", "models": {"against": other, "model": one}}
    found["difference"] = paired(one["prompts"], other["prompts"])
    table = list(rows(found))
    assert [row[:2] for row in table] == [
        [name, task] for name in ("against", "model") for task in ("all", "math")
    ]
    assert all(len(row) == len(TITLES) for row in table)
    assert (table[0][-1], table[1][-1]) == ("1", ""), "failures are counted over all tasks"
    assert [said.partition(" over")[0] for said in differences(found)] == [
        "difference: +0.500 [+0.500, +0.500]",
        "difference of math: +0.500 [+0.500, +0.500]",
    ]
    text = write_page(tmp_path / "page.html", found).read_text()
    assert "difference of math: +0.500" in text
    assert "4&lt;b&gt;" in text
    assert text.count("2+2=") == 4


# --- which model is meant -----------------------------------------------------------------------
def model_folder(folder: Path) -> Path:
    """A tiny model's config.json beside a file of weights that nothing here reads."""
    folder.mkdir(parents=True)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = {"model_type": "qwen3_moe", "num_experts": 8, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def run_folder(
    root: Path, *, steps: int, saved: int | None, lora: int = 0, hf: str = "end"
) -> Path:
    settings = [f"run.root={root}", "run.name=mine", f"run.steps={steps}", f"checkpoint.hf={hf}"]
    settings += [f"model.path={model_folder(root / 'base')}", f"lora.rank={lora}"]
    run = RunDir(root / "mine")
    run.create()
    save_config(load_config("quickstart", settings), run.config)
    model_folder(run.hf)
    if saved is not None:
        folder = run.checkpoint(saved)
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"")
        (folder / "metadata.json").write_text("{}")
        manifest: dict[str, Any] = {"files": {"metadata.json": [2, ""]}}
        manifest |= {"lora": {"rank": lora}} if lora else {}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return run.root


def chosen(recipe: str, model: str, folder: Path, *settings: str) -> tuple[str, str, int, str]:
    config = evaluated(recipe, settings, "--checkpoint", model, folder / "eval")
    lora = config.lora
    return config.model.path, config.checkpoint.start, lora.rank, lora.start


def test_a_run_is_its_newest_weights(tmp_path: Path) -> None:
    over = run_folder(tmp_path / "over", steps=8, saved=8)
    assert chosen("quickstart", str(over), tmp_path) == (str(over / "hf"), "", 0, "")
    assert chosen(str(over), "", tmp_path) == (str(over / "hf"), "", 0, ""), "its own settings"
    assert chosen(str(over), "base", tmp_path)[0] == str(tmp_path / "over" / "base")
    step = over / "checkpoints" / "step-000008"
    assert chosen(str(over), str(step), tmp_path)[1] == str(step), "a checkpoint that is named"
    every = run_folder(tmp_path / "every", steps=20, saved=8, hf="every")
    assert chosen("quickstart", str(every), tmp_path)[0] == str(every / "hf")
    warm = run_folder(tmp_path / "warm", steps=8, saved=None)
    assert chosen("quickstart", str(warm), tmp_path)[0] == str(warm / "hf"), "of moerl sft"
    early = run_folder(tmp_path / "early", steps=20, saved=8)
    newest = str(early / "checkpoints" / "step-000008")
    base = str(tmp_path / "early" / "base")
    assert chosen("quickstart", str(early), tmp_path) == (base, newest, 0, ""), "hf/ is older"
    adapted = run_folder(tmp_path / "adapted", steps=20, saved=8, lora=4)
    assert chosen("quickstart", str(adapted), tmp_path)[2] == 4, "as its manifest says"


def test_an_adapter_is_one_by_the_settings_of_the_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"it is an adapter: lora\.rank"):
        chosen("quickstart", str(folder), tmp_path)
    found = chosen("quickstart-lora", str(folder), tmp_path)
    assert found == ("", "", 16, str(folder))


@pytest.mark.parametrize(
    ("recipe", "model", "settings", "says"),
    [
        ("quickstart", "/none", (), r"--checkpoint = '/none' .*give a model folder"),
        ("quickstart", "", ("model.path=/none",), r"model\.path = '/none'"),
        ("no-such", "", (), "RECIPE = 'no-such'"),
        ("quickstart", "", ("cluster=slurm",), "starts engines on this machine only"),
        ("quickstart", "", ("evaluation.top_p=0.5",), r"evaluation\.top_k"),
    ],
)
def test_refusals(
    recipe: str, model: str, settings: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen(recipe, model, tmp_path, *settings)


def test_without_evaluation_settings_it_is_what_a_run_evaluates(tmp_path: Path) -> None:
    config = evaluated("quickstart", [], "--checkpoint", "", tmp_path / "eval")
    assert replace(config.evaluation, every=0) == load_config("quickstart").evaluation
    lines = tmp_path / "train.jsonl"
    lines.write_text('{"prompt": "a", "answer": "b"}\n')
    task = ["task.name=jsonl", "task.reward=exact_match", f"task.path={lines}"]
    with pytest.raises(ConfigError, match=r"evaluation\.path = ''"):
        evaluated("quickstart", task, "--checkpoint", "", tmp_path / "eval")


# --- the command --------------------------------------------------------------------------------
Root = Callable[..., int]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the root processes were asked; each answers with the rewards of its model."""
    requests: list[dict[str, Any]] = []

    def root(request: dict[str, Any], module: str) -> int:
        assert module == "moerl.launch.eval_root"
        requests.append(request)
        reward = 0.25 if request["model"] == "base" else 1.0
        Path(request["out"]).write_text(json.dumps(findings({i: [reward] for i in range(4)})))
        return 0

    monkeypatch.setattr(eval_command, "guarded", root)
    monkeypatch.chdir(tmp_path)
    return requests


def test_two_models_one_after_the_other_as_one_json_object(asked: list[dict[str, Any]]) -> None:
    done = CliRunner().invoke(app, ["eval", "quickstart", "--against", "base", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [request["option"] for request in asked] == ["--against", "--checkpoint"]
    assert list(found["models"]) == ["against", "model"]
    assert found["difference"][""]["mean"] == 0.75
    assert Path("eval.html").is_file()


def test_a_table_and_the_sentence_of_the_difference(asked: list[dict[str, Any]]) -> None:
    words = ["eval", "quickstart", "run.seed=1", "--against", "base", "--keep", "logs"]
    done = CliRunner().invoke(app, words)
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["model", "task", "reward"]
    assert [line.split()[:2] for line in lines[1:3]] == [["against", "all"], ["model", "all"]]
    assert lines[3].startswith("difference: +0.750 [+0.750, +0.750] over 4 prompts")
    assert [Path(request["keep"]).name for request in asked] == ["against", "model"]
    assert all("run.seed=1" in request["overrides"] for request in asked), "the same prompts"


@pytest.mark.parametrize("status", [1, 130])
def test_a_failure_of_the_first_ends_the_command(
    status: int, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_command, "guarded", lambda *_, **__: status)
    done = CliRunner().invoke(app, ["eval", "quickstart", "--against", "base", "--json"])
    assert (done.exit_code, done.stdout) == (status, "")
    assert not Path("eval.html").exists()


def test_a_run_of_no_step_is_told_of_it() -> None:
    with pytest.raises(ConfigError, match="at least 1 is needed; without a step, `moerl eval`"):
        load_config("quickstart", ["run.steps=0"])


def test_paths_are_checked_before_an_engine_starts(asked: list[dict[str, Any]]) -> None:
    for words, option in ((["--keep", "."], "--keep"), (["--page", "no/x.html"], "--page")):
        done = CliRunner().invoke(app, ["eval", "quickstart", *words])
        assert isinstance(done.exception, ConfigError)
        assert option in str(done.exception)
    assert not asked
