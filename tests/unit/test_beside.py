"""Writers beside the training fail alone, are told once, are tried again, and miss nothing."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from moerl.config.schema import Config, ObserveConfig
from moerl.core.errors import ProtocolError
from moerl.observe import mirrors
from moerl.observe.console import Console
from moerl.observe.metrics import MetricsWriter, read_lines
from moerl.observe.mirrors import Mirror
from moerl.observe.report_sections import notice_section
from moerl.observe.sinks import mirrors_of
from moerl.runtime import beside
from moerl.runtime.beside import Beside, LineWriter
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer, read_spans
from tests.helpers.patience import Patience

BAD = "503 from api.example.invalid"


def until(is_true: Callable[[], object]) -> None:
    limit = Patience(20)
    while not is_true():
        assert not limit.over()
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(mirrors, "LONGEST_PAUSE_S", 0.02)


# --- the guard ------------------------------------------------------------------------------------
def test_a_cause_is_said_once_and_the_end_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = SimpleNamespace(now=0.0), list[str]()
    monkeypatch.setattr(beside.time, "monotonic", lambda: clock.now)
    guard = Beside("wandb", said.append)

    def fails(text: str) -> Callable[[], object]:
        def write() -> object:
            raise RuntimeError(text)

        return write

    assert guard.call(lambda: None), "control: a call that works is silent"
    assert said == []
    for number in range(50):
        assert not guard.call(fails(f"{BAD}, request {number}"))
    assert len(said) == 1, "other numbers are no other cause"
    assert f"wandb failed: RuntimeError: {BAD}" in said[0]
    assert "the training goes on" in said[0]
    guard.call(fails("the key is wrong"))
    assert len(said) == 2, "another cause"
    clock.now = 35.0
    assert guard.call(lambda: None)
    assert said[2:] == ["wandb works again after 35 s"]
    guard.call(fails(f"{BAD}, request 51"))
    guard.call(lambda: None)
    assert len(said) == 3, "one that comes and goes is not said each time"
    clock.now = 1000.0
    guard.call(fails(f"{BAD}, request 52"))
    assert len(said) == 4, "an hour later it is"
    assert not guard.call(lambda: sys.exit(3)), "packages exit, too"


def test_lines_wait_for_their_file(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "gone"
    folder.write_text("a file in the way")
    lines = LineWriter(folder / "samples.jsonl", said.append)
    lines.write([{"step": 0}])
    lines.write([{"step": 1, "bad": object()}])
    lines.write([{"step": 2}, {"step": 3}])
    lines.rewind(3)
    folder.unlink()
    lines.write([{"step": 3, "text": "again"}])
    found = read_lines(folder / "samples.jsonl")
    assert [one["step"] for one in found] == [0, 2, 3]
    assert "text" in found[2]
    assert len(said) == 3, "the disk, the object, the recovery"


def test_a_trace_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "trace"
    folder.write_text("a file in the way")
    tracer = Tracer(folder, "controller", tell=said.append)
    for _ in range(3):
        with tracer.span("work"):
            pass
    assert len(said) == 1
    folder.unlink()
    tracer.add("late", 1.0, 2.0)
    assert [span["name"] for span in read_spans(folder)] == ["late"]
    assert "works again" in said[1]


def test_a_console_whose_pipe_closed_ends_nothing() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    console = Console("lines", 3, Closed())
    console.event("x")
    console.close({"a": "b"})


# --- mirrors --------------------------------------------------------------------------------------
class Flaky:
    """A sink, and its service, which fails while `bad` says so."""

    def __init__(self) -> None:
        self.bad, self.opened, self.calls, self.rows = False, 0, 0, list[int]()
        self.rewound: list[int] = []
        self.held = threading.Event()
        self.held.set()

    def open(self, step: int) -> Flaky:
        self.opened += 1
        self.answer()
        return self

    def answer(self) -> None:
        self.calls += 1
        self.held.wait()
        if self.bad:
            raise RuntimeError(BAD)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.answer()
        self.rows.append(step)

    def rewind(self, step: int) -> int:
        self.answer()
        self.rewound.append(step)
        self.rows.clear()
        return 0

    def close(self) -> None:
        self.answer()


def follow(folder: Path, sink: Flaky, said: list[str]) -> MetricsWriter:
    mirror = Mirror("wandb", sink.open, folder / "mirrors" / "wandb.json", said.append)
    return MetricsWriter(folder / "m.jsonl", [mirror])


def test_a_mirror_that_fails_gets_its_rows_from_the_file(tmp_path: Path) -> None:
    sink, said = Flaky(), list[str]()
    writer = follow(tmp_path, sink, said)
    for step in range(3):
        writer.write(step, "0.1", {"x": 1.0})
    until(lambda: sink.rows == [0, 1, 2])
    sink.bad = True
    for step in range(3, 9):
        writer.write(step, "0.1", {"x": 1.0})
        calls = sink.calls
        until(lambda calls=calls: sink.calls > calls + 1)
    assert [line for line in said if BAD in line] == said, said
    assert len(said) == 1
    sink.bad = False
    until(lambda: sink.rows == list(range(9)))
    until(lambda: len(said) == 2)
    assert "delivered from metrics.jsonl" in said[1]
    writer.close()
    assert len(said) == 2


def test_a_mirror_that_fails_at_every_call_costs_its_rows_only(tmp_path: Path) -> None:
    sink, said = Flaky(), list[str]()
    sink.bad = True
    writer = follow(tmp_path, sink, said)
    for step in range(40):
        writer.write(step, "0.1", {"x": 1.0})
    writer.rewind(30)
    writer.write(30, "1.1", {})
    writer.close(limit_s=5.0)
    assert said[1:] == ["wandb lacks the steps from 0 of metrics.jsonl"]
    assert len(read_lines(tmp_path / "m.jsonl")) == 31
    with pytest.raises(ProtocolError):  # control: errors of the file itself are errors
        writer.write(50, "0.1", {})
    sink.bad = False
    again = follow(tmp_path, sink, said)  # a resume
    again.close()
    assert sink.rows == list(range(31)), "a later start delivers what was missed"


def test_a_mirror_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "HANG_S", 0.05)
    sink, said = Flaky(), list[str]()
    writer = follow(tmp_path, sink, said)
    sink.held.clear()
    for step in range(5):
        writer.write(step, "0.1", {"x": 1.0})
        time.sleep(0.03)
    writer.rewind(2)  # it may be getting row 0 just now
    writer.write(2, "1.1", {"x": 2.0})
    assert len(said) == 1
    assert "no answer for" in said[0]
    begin = time.monotonic()
    writer.close(limit_s=0.1)
    assert time.monotonic() - begin < 5.0
    sink.held.set()
    until(lambda: sink.rows == [0, 1, 2])


def test_a_rewind_that_a_mirror_missed_is_taken_after_a_restart(tmp_path: Path) -> None:
    sink, said = Flaky(), list[str]()
    writer = follow(tmp_path, sink, said)
    for step in range(6):
        writer.write(step, "0.1", {"x": 1.0})
    until(lambda: sink.rows == list(range(6)))
    sink.held.clear()  # it hangs for ever
    writer.write(6, "0.1", {})
    writer.rewind(2)
    for step in range(2, 5):
        writer.write(step, "1.1", {"x": 2.0})
    other = Flaky()
    follow(tmp_path, other, said).close()
    assert other.rewound == [2]
    assert other.rows == list(range(5))
    plain = Flaky()
    follow(tmp_path, plain, said).close()
    assert plain.rewound == [], "control: it is taken once"
    assert plain.rows == []
    sink.held.set()


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_that_raises_503(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of a user; each of the calls of a package."""
    state, got, said = SimpleNamespace(bad="init"), list[int](), list[str]()

    def call(name: str) -> None:
        if state.bad in (name, "all"):
            raise RuntimeError(f"{BAD} at {name}")

    def log(values: object, step: int) -> None:
        call("log")
        got.append(step)

    def init(**given: object) -> object:
        call("init")
        return SimpleNamespace(log=log, finish=lambda: call("finish"))

    fake = SimpleNamespace(Settings=lambda **settings: settings, init=init)
    monkeypatch.setitem(sys.modules, package, fake)
    run = RunDir(tmp_path / "r1")
    run.root.mkdir()
    observe = ObserveConfig(**{f"{package}_project": "p"})  # type: ignore[arg-type]
    writer = MetricsWriter(run.metrics, mirrors_of(run, Config(observe=observe), said.append))
    steps = iter(range(100))
    for bad in ("init", "log", "all", "finish"):
        state.bad = bad
        writer.write(next(steps), "0.1", {"x": 1.0})
        if bad != "finish":
            until(lambda bad=bad: any(bad == "all" or f"at {bad}" in line for line in said))
    state.bad = ""
    until(lambda: got == [0, 1, 2, 3])
    writer.close()


# --- the page -------------------------------------------------------------------------------------
def test_the_page_says_what_happened() -> None:
    assert notice_section([]) == []
    (section,) = notice_section([{"step": 7, "time_s": 0.0, "text": "wandb failed"}])
    assert section.table is not None
    assert section.table.rows == [["7", "1970-01-01 00:00:00", "wandb failed"]]
