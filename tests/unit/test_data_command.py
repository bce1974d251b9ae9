"""Lines are checked before a run: `moerl data`, a dry run and a start say the same of them."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moerl import cli
from moerl.cli import app
from moerl.config import load_config, resolve
from moerl.config.engine_context import check_context, longest_sequence
from moerl.config.schema import EngineConfig
from moerl.config.task_mixture import TaskEntry, entries_of
from moerl.core.errors import ConfigError, LineError
from moerl.data.prompt_checks import LineCheck
from moerl.data.tasks import PromptMixture, PromptStream, load_tokenizer, usable
from moerl.launch.line_checks import LineChecks

GOOD = {"prompt": "12=", "answer": "12"}
LONG = {"prompt": "1" * 20, "answer": "1"}
BAD = {"prompt": "12="}
OWN = "tests.helpers.reward_forms:three"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def settings(folder: Path, *lines: object) -> list[str]:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["quickstart-smoke", "task.name=jsonl", f"task.path={path}", "task.reward=exact_match"]


def checked(tokenizer: Any, words: list[str], longest: int = 0) -> LineCheck:
    (entry,) = entries_of(load_config(words[0], words[1:]))
    (stream,) = PromptMixture([entry], tokenizer, 0, longest).streams
    one = LineCheck(*stream)
    one.go_on(10**6, float("inf"))
    return one


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, f"{done.output}{done.exception or ''}"


# --- the command ----------------------------------------------------------------------------------
def test_the_command_shows_what_a_run_would_see(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "1<eos>2="}], "answer": "12"}
    words = settings(tmp_path, asked, GOOD, GOOD, BAD, LONG, "text", BAD)
    code, text = said("data", *words, "task.max_prompt_tokens=19", "--response", "12")
    assert code == 1, "a run would refuse it"
    path = tmp_path / "p.jsonl"
    for part in (
        "lines       7; 2 can be used",
        f"unusable    1, not an object: {path} line 6",
        f"unusable    2, no answer: {path} line 4, 7",
        f"unusable    2, too long: {path} line 1, 5",
        "duplicates  1",
        f"line 2 of {path}",
        "text     '12='",
        "tokens   3: 1|2|=",
        "answer   '12'",
        "reward   '12' -> 1",
        "a run would refuse this",
    ):
        assert part in text, text
    code, text = said(
        "data", *settings(tmp_path, asked, GOOD), "--response", "a", "--response", "12"
    )
    assert code == 0
    assert "control     1 with names of control tokens" in text
    assert "1|<|e|o|s|>|2|=" in text
    assert "'a' -> 0" in text
    assert "'12' -> 1" in text
    assert said("data", *words, *["--response", "a"] * 4)[0] != 0


def test_prompts_that_are_made_are_shown_too() -> None:
    code, text = said("data", "quickstart-smoke")
    assert code == 0
    assert text.count("  tokens   5: ") == 3


def test_a_dry_run_checks_the_lines(tmp_path: Path) -> None:
    code, text = said("train", *settings(tmp_path, GOOD, BAD), "--dry-run")
    assert code == 1
    assert "line 2 has no 'answer'" in text
    code, text = said("train", *settings(tmp_path, GOOD, GOOD), "--dry-run")
    assert code == 0
    assert f"{tmp_path}/p.jsonl: 2 lines can be used" in text
    code, text = said(
        "train", *settings(tmp_path, GOOD), "sampling.max_new_tokens=100000", "--dry-run"
    )
    assert "sampling.max_new_tokens = 100000 is not usable: the engines take 4090 tokens" in text
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps(BAD))
    held_out_settings = ["evaluation.every=1", f"evaluation.path={held_out}"]
    code, text = said("train", *settings(tmp_path, GOOD), *held_out_settings, "--dry-run")
    assert code == 1
    assert f"task.path = '{held_out}' is not usable: line 1 has no 'answer'" in text


# --- lengths --------------------------------------------------------------------------------------
def test_the_engine_leaves_six_tokens_of_its_context() -> None:
    assert longest_sequence(EngineConfig(), 4096) == 4090
    assert longest_sequence(EngineConfig(args={"context_length": 512}), 4096) == 506
    assert longest_sequence(EngineConfig(max_total_tokens=256), 4096) == 250
    assert longest_sequence(EngineConfig(max_total_tokens=0), 4096) == 4090
    for fits, answer in ((True, 4089), (False, 4090)):
        config = resolve(load_config("quickstart", [f"sampling.max_new_tokens={answer}"]))
        if fits:
            check_context(config, 4096)
        else:
            with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens = 4090"):
                check_context(config, 4096)


def test_prompts_that_the_engine_would_refuse_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    words = [*settings(tmp_path, GOOD, LONG, *[LONG] * 4), "sampling.max_new_tokens=4"]
    checked(tokenizer, words, longest=24).refuse()
    with pytest.raises(ConfigError) as caught:
        checked(tokenizer, words, longest=23).refuse()
    text = str(caught.value)
    assert "line 2 of" in text
    assert "line 4 of" in text
    assert "has 20 tokens; the engines leave 19 beside sampling.max_new_tokens" in text
    assert "5 of 6 lines are too long, and task.overlong=skip leaves them out" in text


def test_prompts_that_do_not_fit_are_skipped_on_request(tokenizer: Any, tmp_path: Path) -> None:
    words = [
        *settings(tmp_path, GOOD, LONG, GOOD),
        "task.max_prompt_tokens=9",
        "task.shuffle=false",
    ]
    skipping = [*words, "task.overlong=skip"]
    one = checked(tokenizer, skipping)
    one.refuse()
    assert "1 set aside (too long): line 2" in one.summary()
    mixture = PromptMixture(entries_of(load_config(*[skipping[0], skipping[1:]])), tokenizer, 0)
    found = usable(mixture.prompt)
    assert [next(found).index for _ in range(4)] == [0, 2, 3, 5], "the line is out of each epoch"
    alone = [*settings(tmp_path, LONG), "task.max_prompt_tokens=9", "task.overlong=skip"]
    one = checked(tokenizer, alone)
    with pytest.raises(ConfigError, match="none of its 1 lines can be used"):
        one.refuse()


# --- bad lines ------------------------------------------------------------------------------------
def test_as_many_bad_lines_as_allowed_are_set_aside(tokenizer: Any, tmp_path: Path) -> None:
    words = [*settings(tmp_path, GOOD, BAD, GOOD, "x", GOOD), "task.shuffle=false"]
    with pytest.raises(
        ConfigError, match=r"line 2 .*; line 4 .*2 lines are bad.*max_bad_lines = 1"
    ):
        checked(tokenizer, [*words, "task.max_bad_lines=1"]).refuse()
    checked(tokenizer, [*words, "task.max_bad_lines=2"]).refuse()
    for most, last in ((1, 3), (2, 9)):
        (entry,) = entries_of(load_config(words[0], [*words[1:], f"task.max_bad_lines={most}"]))
        stream = PromptStream(entry, tokenizer, 0)
        drawn, failure = [], None
        for index in range(10):
            try:
                drawn.append(stream.prompt(index).index)
            except LineError:
                continue
            except ConfigError as error:
                failure = error
                break
        assert drawn == [n for n in range(last + 1) if n % 5 not in (1, 3)], "drawn late, too"
        assert (failure is None) == (most == 2)
        assert failure is None or "line 2 has no 'answer'" in str(failure)


def test_a_start_says_how_far_it_came_and_goes_on(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moerl.launch import line_checks

    monkeypatch.setattr(line_checks, "MOST_LINES", 10)
    for last, fails in ((GOOD, False), (BAD, True)):
        words = settings(tmp_path, *[GOOD] * 50, last)
        mixture = PromptMixture(entries_of(load_config(words[0], words[1:])), tokenizer, 0)
        lines, heard = LineChecks([mixture]), []
        lines.begin(heard.append)
        assert heard == [f"{tmp_path}/p.jsonl: 10 of 51 lines checked before the start"]
        lines.raise_failure()
        lines.go_on()
        limit = time.monotonic() + 60
        while lines.checks[0].read < 51 and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.05)
        if fails:
            with pytest.raises(ConfigError, match="line 51 has no 'answer'"):
                lines.raise_failure()
        else:
            lines.raise_failure()


def test_eight_seconds_are_the_most(tokenizer: Any, tmp_path: Path) -> None:
    words = settings(tmp_path, GOOD, GOOD)
    (entry,) = entries_of(load_config(words[0], words[1:]))
    one = LineCheck(entry, PromptStream(entry, tokenizer, 0))
    one.go_on(2, time.monotonic() - 1)
    assert one.read == 0
    one.go_on(1, float("inf"))
    assert one.read == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"prompt": "12=", "answer": None}, "line 2 has the answer None; sft needs a text"),
        ({"prompt": "12="}, "line 2 has the answer None; sft needs a text"),
        ({"prompt": "12=", "answer": 12}, "line 2 has the answer 12; sft needs a text"),
        (GOOD | {"demonstration": ["a", "b"]}, "line 2 has the demonstration ['a', 'b']; a list"),
        (GOOD | {"demonstration": ["a"]}, ""),
        (GOOD, ""),
    ],
)
def test_sft_finds_a_line_without_text_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any], says: str
) -> None:
    started: list[str] = []

    def guarded(arguments: Any, module: str = "train") -> int:
        started.append(module)
        return 0

    monkeypatch.setattr(cli, "_guarded", guarded)
    words = [*settings(tmp_path, GOOD, line), f"task.reward={OWN}"]
    code, text = said("sft", *words)
    assert says in text
    assert (code, len(started)) == ((1, 0) if says else (0, 1))
    assert said("train", *words)[0] == 0
    assert started[-1] == "train", "control: a run needs no text"


def test_lines_without_an_answer_for_an_own_reward_are_counted(
    tokenizer: Any, tmp_path: Path
) -> None:
    none = GOOD | {"answer": None}
    words = [*settings(tmp_path, GOOD, none, BAD), f"task.reward={OWN}"]
    said_of_it = f"2 have no answer: {OWN} gets None (task.columns={{answer: ''}} says that this"
    assert said_of_it in checked(tokenizer, words).summary()
    code, text = said("data", *words)
    assert code == 0
    assert f"no answer   2: {OWN} gets None" in text
    meant = [*words, "task.columns={answer: ''}"]
    assert checked(tokenizer, meant).summary() == "", "control: it is meant"
    words = [*settings(tmp_path, GOOD, GOOD), f"task.reward={OWN}"]
    assert checked(tokenizer, words).summary() == "", "control: all have one"


# --- memory ---------------------------------------------------------------------------------------
def test_memory_is_sixteen_bytes_a_line(tmp_path: Path) -> None:
    """Only places and digests are kept; 100,000 lines with their text would be 30 MB."""
    import tracemalloc

    path = tmp_path / "p.jsonl"
    line = json.dumps({"prompt": "12=" * 20, "answer": "1" * 200}) + "\n"
    path.write_text(line * 100_000)
    entry = replace(TaskEntry(), name="jsonl", path=str(path), reward="exact_match")
    tracemalloc.start()
    begin = time.monotonic()
    one = LineCheck(entry, PromptStream(entry, None, 0))
    empty, _ = tracemalloc.get_traced_memory()
    one.go_on(300, float("inf"))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{time.monotonic() - begin:.1f} s, {after / 1e6:.2f} MB, process {most} MiB")
    assert one.lines == 100_000
    assert 16 * one.lines <= empty <= 16 * one.lines + 500_000
    assert after - empty < 500_000
