"""The report of any run: complete, dead at birth, torn, hostile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moerl.config.schema import Config, RunConfig, TaskConfig
from moerl.config.task_programs import AgentConfig
from moerl.observe.charts import COLORS, Chart, Heatmap, draw_chart, draw_heatmap
from moerl.observe.episode_section import MAX_EPISODES
from moerl.observe.metrics import MetricsWriter
from moerl.observe.report import (
    ENGINE_ALONE,
    _bars,
    held_out_words,
    reward_gain,
    wall_time_s,
    write_report,
)
from moerl.observe.report_sections import BY_ROLE, BY_TASK, chart_sections, charts_by
from moerl.runtime.run_dir import RunDir, next_incarnation
from moerl.runtime.trace import Tracer, read_spans

HOSTILE = (
    "</div><script>alert('x')</script><img src=x onerror=y> & \x07 \ud800 {{ 7 * 7 }} $\\frac$"
)
VOID = {"meta", "img", "br", "path", "use"}


class Page(HTMLParser):
    """Counts tags, checks that they nest, and collects the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self._open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "r1")
    directory.create()
    return directory


def fill(run: RunDir, num_steps: int, **more: float) -> None:
    """A run whose numbers are known: reward 0, 1, 2, ...; two seconds a step."""
    writer = MetricsWriter(run.metrics)
    engine, trainer = Tracer(run.trace, "engine0"), Tracer(run.trace, "trainer0")
    for step in range(num_steps):
        start = 100.0 + 2 * step
        trainer.add("step", start, start + 2.0)
        trainer.add("wait", start, start + 1.0)
        trainer.add("publish", start + 1.5, start + 2.5)
        engine.add("generate", start + 1.25, start + 2.0)
        values = {
            "reward/mean": float(step),
            "reward/std": 0.5,
            "mismatch/k3": 1e-6 * (step + 1),
            "mismatch/abs_dlogp_max": 1e-3,
            "routing/replay_cover_frac": 1.0,
            "keep/cover_frac": 1.0,
            "async/lag_max": 2.0,
            "perf/step_s": 2.0,
            "perf/rollout_tokens_per_s": 1000.0,
        }
        writer.write(step, f"0.{step + 1}", values | more, time_s=start + 2.0)
    writer.close()


def report(run: RunDir, config: Config | None = None, **summary: float) -> str:
    config = config if config is not None else Config(run=RunConfig(steps=20))
    path = write_report(run, config, summary)
    return Path(path).read_text(encoding="utf-8")


def card(html: str, label: str) -> str:
    found = re.search(rf'label">{re.escape(label)}</div>\s*<div class="value">([^<]*)<', html)
    assert found, f"no card {label}"
    return found[1]


def test_headline_numbers(run: RunDir) -> None:
    fill(run, 20)
    html = report(run, **{ENGINE_ALONE: 2450.0})
    assert card(html, "Reward") == "0.500 \u2192 18.500"
    assert "+18.000" in html
    assert card(html, "Wall time") == "0:40"
    assert card(html, "Engine tokens/s") == "1,000"
    assert "alone 2,450" in html
    assert card(html, "Overlap") == "75%"
    assert card(html, "Largest mismatch") == "0.001"
    assert card(html, "Routing replayed") == "100%"
    assert card(html, "Largest lag") == "2"
    assert "Complete: 20 of 20 steps" in html
    assert 'class="stat bad"' not in html


def test_the_mismatch_of_fresh_tokens_is_the_headline(run: RunDir) -> None:
    """Tokens of older weights differ by right; they must not look like a broken replay."""
    fill(run, 3, **{"probe/exact_abs_dlogp_max": 1e-6})
    html = report(run)
    assert card(html, "Largest mismatch") == "1e-06"
    assert "all lags: 0.001" in html


def test_a_publish_beside_a_step_does_not_hide_it(run: RunDir) -> None:
    """Its parts are spans of their own in the same process; the engine's update has a colour."""
    trainer, engine = Tracer(run.trace, "trainer-0"), Tracer(run.trace, "engine0")
    controller = Tracer(run.trace, "controller")
    for start in (100.0, 110.0, 120.0):
        trainer.add("step", start, start + 8.0)
        trainer.add("wait", start, start + 1.0)
        trainer.add("publish", start + 2.0, start + 6.0)
        trainer.add("publish commit", start + 3.0, start + 6.0)
        engine.add("update", start + 3.0, start + 4.0)
        for kind in ("TakePlan", "StepDone", "CommitUpdate", "Hello", "AskEngine"):
            controller.add(kind, start, start + 8.0)
    drawn, hidden = _bars(read_spans(run.trace), (100.0, 130.0))
    assert drawn["trainer-0", "step"] == [(1.0, 8.0), (11.0, 18.0), (21.0, 28.0)]
    assert drawn["trainer-0 publish", "publish"][0] == (2.0, 6.0)
    assert ("engine0", "update") in drawn
    assert ("trainer-0", "other") not in drawn
    assert not hidden


def test_a_running_run_is_not_called_stopped_and_its_page_reads_itself_again(run: RunDir) -> None:
    fill(run, 3)
    html = Path(write_report(run, Config(run=RunConfig(steps=20)), is_running=True)).read_text()
    assert '<div class="state good">Running: 3 of 20 steps</div>' in html
    assert '<meta http-equiv="refresh" content="20">' in html
    stopped = report(run)
    assert '<div class="state bad">Stopped: 3 of 20 steps</div>' in stopped
    assert 'http-equiv="refresh' not in stopped


def test_alarms_are_marked(run: RunDir) -> None:
    fill(run, 3, **{"routing/replay_cover_frac": 0.99999, "async/lag_max": 9.0, "refused/x": 2.0})
    html = report(run)
    assert card(html, "Routing replayed") == "99.9990%"
    assert card(html, "Records refused") == "2"  # each row counts since the start
    assert html.count('class="stat bad"') == 3
    assert "Stopped: 3 of 20 steps" in html


def test_page_is_self_contained_and_well_formed(run: RunDir) -> None:
    fill(run, 20)
    html = report(run)
    page = Page(html)
    assert "script" not in page.tags
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    assert 0 < html.index(policy) < html.index("<style")
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\((?!#)|@import", html)
    identifiers = re.findall(r'clipPath id="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert "#0a00" not in html  # every placeholder colour became a variable of the page


def test_hostile_text_is_shown_and_never_markup(run: RunDir) -> None:
    fill(run, 2)
    Tracer(run.trace, "engine<script>$x$").add("<b>$\\frac$", 101.0, 103.0)
    sample = {"step": 0, "version": HOSTILE, "prompt": HOSTILE, "response": HOSTILE, "reward": 0.5}
    sample["origin"] = "line 31 of <i>.jsonl"
    run.samples.write_text(json.dumps(sample) + "\n" + '{"step": 1, "prom')
    name = HOSTILE.replace("\ud800", "")  # YAML, where settings come from, has no lone surrogates
    html = report(run, Config(run=RunConfig(name=name, steps=20)))
    page = Page(html)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("<script>alert('x')</script>") >= 3
    assert "{{ 7 * 7 }}" in page.text
    assert "line 31 of <i>.jsonl:" in page.text
    assert "49" not in card(html, "Reward")
    assert "\u2407" in page.text, "the bell is visible"
    assert "\x07" not in page.text, "in every text, the heading too"


def turn(text: str, **more: object) -> dict[str, object]:
    piece = {"version": "0.1", "kept_kv": False, "tokens": 3, "text": text}
    return {"row": 0, "context": "ask", "context_tokens": 2, "pieces": [piece], **more}


def test_an_episode_is_shown_turn_by_turn(run: RunDir) -> None:
    fill(run, 2)
    later = {"version": "0.2", "kept_kv": True, "tokens": 1, "text": "late"}
    turns = [
        turn("one", finish="stop", origin="first"),
        turn("two", row=1, continues=0, shared_tokens=5, origin="rewritten"),
    ]
    turns[1]["pieces"] = [*turns[1]["pieces"], later]  # type: ignore[misc]
    sample = {"step": 1, "episode": "7.0", "version": "0.2", "reward": 0.5, "turns": turns}
    policy = {"name": "7.0.t1", "parent": "7.0.t0", "role": "policy", "versions": ["0.1", "0.2"]}
    judge = {"name": "7.0.t2", "role": "judge", "left_out": "other_model"}
    policy |= {"tokens": 4, "tools": ["get", "add"]}
    run.samples.write_text(json.dumps(sample | {"graph": [policy, judge]}) + "\n")
    text = " ".join(Page(report(run)).text.split())
    for shown in (
        "step 2, episode 7.0: reward 0.500",
        "2 turns in 2 rows; 7 tokens trained, 4 of context",
        "7.0.t1 policy; continues 7.0.t0; version 0.1, 0.2; 4 tokens; calls get, add; trained",
        "7.0.t2 judge; not trained: other model",
        "context, 2 tokens, not trained ask",
        "turn 1, version 0.1, 3 tokens, trained; lag 0; ended: stop one",
        "row 2 has the first 5 tokens of row 1; context, 2 tokens, not trained",
        "turn 2, version 0.1, 3 tokens, trained; lag 0; the history was rewritten two",
        "turn 2, version 0.2, 1 tokens, trained; lag -1; after an update of the weights",
        "after an update of the weights; on the KV cache of older weights; ended: - late",
    ):
        assert shown in text
    html = report(run)
    assert [html.count(f"--edge: var(--c{number})") for number in (1, 2, 3)] == [2, 1, 0]


def test_roles_forks_steps_and_scorers_are_shown(run: RunDir) -> None:
    more = {
        "scorer/asked/judge": 8.0,
        "scorer/unscored/judge": 1.0,
        "scorer/waiting_max/judge": 5.0,
    }
    fill(run, 2, **more, **{"scorer/wait_s/judge": 0.25, "scorer/cost/judge": 1.5})
    steps = [{"text": "ab", "reward": 0.5}, {"text": "c", "reward": -1}]
    turns = [
        turn("abc", role="solver", steps=steps),
        turn("ab!", row=1, continues=0, fork_at=2, reward=0.25),
    ]
    graph = [{"name": "7.0.t1", "parent": "7.0.t0", "role": "policy", "fork_at": 2}]
    sample = {"step": 1, "reward": 0.5, "roles": {"solver": 2.0}, "turns": turns, "graph": graph}
    run.samples.write_text(json.dumps(sample) + "\n")
    text = " ".join(Page(report(run)).text.split())
    for shown in (
        "reward 0.500, solver 2.0",
        "trained; role solver; lag 0",
        "rewards of the 2 steps of turn 1 +0.500 ab -1.000 c",
        "fork behind token 2, reward 0.25",
        "7.0.t1 policy; continues 7.0.t0 behind token 2",
        "judge 16 0 2 5 0.250 0.000 3",
    ):
        assert shown in text


def test_hostile_episodes_are_shown_and_never_markup(run: RunDir) -> None:
    fill(run, 2)
    bad = turn(HOSTILE, context=HOSTILE, finish=HOSTILE, origin=HOSTILE)
    bad["pieces"] = [{"version": HOSTILE, "tokens": 1, "text": HOSTILE}]
    wrong = ([{"pieces": 7}], [7], "text", [turn("x", row=HOSTILE)], [{"pieces": [HOSTILE]}])
    lines = [{"step": HOSTILE, "episode": HOSTILE, "reward": HOSTILE, "turns": [bad, bad]}]
    lines[0]["graph"] = [
        {"name": HOSTILE, "role": HOSTILE, "left_out": HOSTILE, "tools": [HOSTILE]}
    ]
    lines += [{"step": 1, "turns": turns} for turns in wrong]
    shown = {"turns": [turn("a"), turn("b")], "reward": 0.25}
    lines += [shown | {"graph": graph} for graph in (7, [7], [{"name": 7}])]
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in [*lines, [1], 2]))
    page = Page(report(run))
    assert page.text.count("reward -") == 1, "lines of another form are left out"
    assert page.text.count("reward 0.250") == 3, "and graphs"
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("<script>alert('x')</script>") >= 2 * 4 + 2 + 3
    assert "{{ 7 * 7 }}" in page.text


def test_the_tokens_of_a_single_answer_are_shown_with_their_lag(run: RunDir) -> None:
    fill(run, 2)
    answer = turn("one")
    answer["pieces"] = [{"version": v, "tokens": 3, "text": "x"} for v in ("0.1", "2.4")]
    run.samples.write_text(json.dumps({"step": 5, "turns": [answer]}) + "\n")
    text = " ".join(Page(report(run)).text.split())
    assert "turn 1, version 0.1, 3 tokens, trained; lag 4; ended" not in text
    assert "turn 1, version 0.1, 3 tokens, trained; lag 4 x" in text
    assert "version 2.4, 3 tokens, trained; lag 1; after an update of the weights" in text


def test_many_episodes_are_spread_over_the_run(run: RunDir) -> None:
    fill(run, 2)
    sample = {"turns": [turn("a"), turn("b")]}
    run.samples.write_text("".join(json.dumps(sample | {"step": n}) + "\n" for n in range(100)))
    html = report(run)
    assert html.count('<div class="card transcript">') == MAX_EPISODES
    assert "step 1, episode" in html
    assert "step 100, episode" in html


def test_charts_of_agents_are_those_of_a_run_with_an_agent(run: RunDir) -> None:
    fill(run, 3, **{"agent/engine_s": 1.0, "agent/program_s": 2.0})
    config = Config(run=RunConfig(steps=3))
    assert "Time of episodes" not in report(run, config)
    program = TaskConfig(agent=AgentConfig(command=["python", "agent.py"]))
    for task in (program, TaskConfig(environment="x:Y")):
        assert "Time of episodes" in report(run, replace(config, task=task))


@pytest.mark.parametrize("with_folders", [True, False])
def test_run_that_died_before_the_first_step(tmp_path: Path, with_folders: bool) -> None:
    run = RunDir(tmp_path / "dead")
    run.create() if with_folders else run.root.mkdir()
    html = report(run)
    Page(html)
    assert "Stopped before the first step" in html
    assert card(html, "Reward") == "-"
    assert "<svg" not in html
    for absent in ("Not drawn", "<h2>Learning", "<h2>Timeline"):
        assert absent not in html
    assert "observe.sample_rollouts" in html


def test_a_missing_metric_has_no_card(run: RunDir) -> None:
    fill(run, 5)
    html = report(run)
    assert "Gradient norm" not in html
    assert "k3 divergence" in html, "control"


def test_one_value_is_a_number_and_not_a_chart(run: RunDir) -> None:
    fill(run, 1)
    html = report(run)
    assert "mean \u00b1 standard deviation: 0 (optimizer step 1)" in html
    assert "routing: 1, sampling mask: 1 (optimizer step 1)" in html
    assert html.count("<svg") == 1, "the timeline"
    longer = RunDir(run.root.parent / "r2")
    longer.create()
    fill(longer, 2)
    assert "(optimizer step" not in report(longer), "control"


def test_charts_of_evaluations_are_over_versions_and_others_count_steps_from_1() -> None:
    rows: list[dict[str, Any]] = [
        {"step": step, "reward/mean": 0.1, "eval/step": step, "eval/reward_mean": 0.2}
        for step in (4, 8)
    ]
    drawn = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "moerl.observe.report_sections.figure",
            lambda chart, rows: drawn.setdefault(chart.title, [row[chart.x] for row in rows]),
        )
        chart_sections(rows, [], ["a"], ["r"], has_agent=False)
    assert drawn == {"Reward": [5, 9], "Held-out prompts": [4, 8]}
    held = [chart for chart in charts_by(["a"], [*BY_TASK, *BY_ROLE]) if "Held" in chart.title]
    assert [chart.x for chart in held] == ["eval/step"] * 2


def test_equal_values_of_a_heatmap_are_dark() -> None:
    same = draw_heatmap(Heatmap("t", "x", "y", [0, 1], [0], [[1.0, 1.0]], 1.0, 1.0))
    lowest = draw_heatmap(Heatmap("t", "x", "y", [0, 1], [0], [[0.0, 0.0]], 0.0, 1.0))
    assert same
    assert lowest
    assert same.count(f"fill: {COLORS[0]}") == 2, "both cells"
    assert COLORS[0] not in lowest, "control: light"


@pytest.mark.parametrize("num_steps", [1, 2, 25, 1000])
def test_any_length_of_run(run: RunDir, num_steps: int) -> None:
    fill(run, num_steps)
    run.samples.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(num_steps)))
    html = report(run)
    Page(html)
    assert "<svg" in html
    assert len(html) < 600_000


def test_values_of_few_steps_are_marked(run: RunDir) -> None:
    """A line through two checkpoints says nothing about the steps between them."""
    chart = Chart("c", "s", {"checkpoint/pause_s": "pause"})
    rows = [{"step": step, "checkpoint/pause_s": 1.0} for step in range(40)]
    few = [row if row["step"] in (9, 29) else {"step": row["step"]} for row in rows]
    marks = [(draw_chart(chart, some) or "").count("<use ") for some in (rows, few)]
    ticks = marks[0]
    assert marks == [ticks, ticks + 2]


def test_zero_mismatch_is_no_reason_to_crash(run: RunDir) -> None:
    """A logarithmic axis cannot show 0: bitwise equal sides leave the plot out."""
    fill(run, 5, **{"mismatch/k3": 0.0})
    html = report(run)
    assert "k3 divergence" not in html
    assert "Reward" in html, "control"


def test_reward_gain_is_last_tenth_less_first() -> None:
    rows = [{"step": s, "time_s": 0.0, "reward/mean": float(s)} for s in range(30)]
    assert reward_gain(rows) == (1.0, 28.0)
    assert reward_gain(rows[:1]) == (0.0, 0.0)
    assert reward_gain([{"step": 0, "time_s": 0.0}]) is None


def test_held_out_reward_is_first_evaluation_to_last(run: RunDir) -> None:
    def row(step: int, mean: float) -> dict[str, float]:
        near = {"eval/reward_low": mean - 0.1, "eval/reward_high": mean + 0.1}
        return {"step": step, "time_s": 0.0, "eval/reward_mean": mean, **near}

    rows = [row(0, 0.2), {"step": 1, "time_s": 0.0}, row(2, 0.5), row(3, 0.7)]
    assert held_out_words(rows) == ("0.200 [0.100, 0.300]", "0.700 [0.600, 0.800]")
    assert held_out_words(rows[1:2]) is None
    fill(run, 5)
    assert "Held-out reward" not in report(run)
    run.metrics.unlink()
    fill(run, 5, **{name: value for name, value in row(0, 0.2).items() if "eval/" in name})
    assert "0.200 [0.100, 0.300]" in report(run)


def test_wall_time_counts_the_first_step() -> None:
    assert wall_time_s([]) == 0.0
    rows = [{"time_s": 10.0, "perf/step_s": 3.0}, {"time_s": 12.0}]
    assert wall_time_s(rows) == 5.0
    assert wall_time_s(rows, began_s=1.0) == 11.0, "with the start-up"


def test_the_start_of_a_run_is_that_of_its_first_start(run: RunDir) -> None:
    next_incarnation(run, resume=False)
    began = run.began_s()
    assert began is not None
    next_incarnation(run, resume=True)
    assert run.began_s() == began
    (run.root / "state.json").write_text('{"starts": 2, "time_s": 5.0}')
    assert run.began_s() is None, "a run of before: nothing says when it began"


def test_a_row_of_the_last_evaluation_alone(run: RunDir) -> None:
    """The weights after the last step have a row that no step trained."""
    fill(run, 20)
    before = report(run)
    writer = MetricsWriter(run.metrics)
    writer.write(20, "0.20", {"eval/step": 20.0, "eval/reward_mean": 0.75}, time_s=141.0)
    writer.close()
    after = report(run)
    assert "Complete: 20 of 20 steps" in after
    assert "min:s, for 20 steps" in after
    assert card(after, "Wall time") == "0:41"
    for label in ("Reward", "Engine tokens/s", "Largest mismatch", "Routing replayed"):
        assert card(after, label) == card(before, label)
