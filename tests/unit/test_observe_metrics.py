"""metrics.jsonl holds each surviving step once, in order, whatever killed the process before."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moerl.config.schema import Config, ObserveConfig
from moerl.core.errors import ConfigError, ProtocolError, RecordError
from moerl.core.types import PolicyVersion
from moerl.observe import metrics
from moerl.observe.metrics import (
    MetricsWriter,
    newest_row,
    read_lines,
    read_rows,
)
from moerl.observe.mirrors import Mirror
from moerl.observe.sinks import TensorBoardSink, check_sinks, mirrors_of
from moerl.runtime.beside import LineWriter
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import Patience


def write(path: Path, steps: range) -> None:
    writer = MetricsWriter(path)
    for step in steps:
        writer.write(step, PolicyVersion(0, step + 1), {"b": step, "a": 0.5}, time_s=float(step))
    writer.close()


def test_row_order_and_fields(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", range(2))
    assert (tmp_path / "m.jsonl").read_text().splitlines() == [
        '{"step": 0, "version": "0.1", "time_s": 0.0, "a": 0.5, "b": 0.0}',
        '{"step": 1, "version": "0.2", "time_s": 1.0, "a": 0.5, "b": 1.0}',
    ]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_step_out_of_order_is_refused(tmp_path: Path, step: int) -> None:
    write(tmp_path / "m.jsonl", range(3))
    writer = MetricsWriter(tmp_path / "m.jsonl")  # also after opening the file again
    with pytest.raises(ProtocolError, match="only step 3 may follow"):
        writer.write(step, "0.1", {})
    writer.write(3, "0.4", {})
    assert [row["step"] for row in read_rows(tmp_path / "m.jsonl")] == [0, 1, 2, 3]


def test_row_is_readable_before_close(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(0, "0.1", {"x": 1.0})
    assert read_rows(tmp_path / "m.jsonl")[0]["x"] == 1.0


def test_nonfinite_is_named_and_left_out(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m.jsonl")
    writer.write(0, "0.1", {"x": float("nan"), "y": 1.0, "z": float("inf")})
    (row,) = read_rows(tmp_path / "m.jsonl")
    assert row["nonfinite"] == ["x", "z"]
    assert {"x", "z"}.isdisjoint(row)
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()


@pytest.mark.parametrize("torn", ['{"step": 3, "ver', '{"step": 3, "version": "0.4"}', "\0\0\n"])
def test_torn_last_line_is_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(3))
    with path.open("a") as file:
        file.write(torn)
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]
    writer = MetricsWriter(path)
    writer.write(3, "0.4", {})
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_rewind_reads_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It happens on the controller's loop; after it the next row follows."""
    path = tmp_path / "m.jsonl"
    write(path, range(3))
    whole = path.read_bytes().splitlines(keepends=True)
    writer = MetricsWriter(path)
    for step in (3, 4):
        writer.write(step, "0.4", {"loss/pg": 0.5}, time_s=1.0)
    rows = read_rows(path)
    monkeypatch.setattr(metrics, "json_values", None)
    for step, left in ((7, 5), (4, 4), (2, 2)):
        writer.rewind(step)
        assert len(path.read_bytes().splitlines()) == left
        assert writer.last_step == left - 1
    assert path.read_bytes() == b"".join(whole[:2])
    with pytest.raises(ProtocolError, match="only step 2 may follow"):
        writer.write(3, "0.4", {})
    for step in (2, 3, 4):
        writer.write(step, "0.4", {"loss/pg": 0.5}, time_s=1.0)
    writer.rewind(0)
    writer.write(0, "1.1", {})
    writer.close()
    monkeypatch.undo()
    assert len(rows) == 5
    assert [row["version"] for row in read_rows(path)] == ["1.1"]


def test_damage_that_is_not_a_torn_tail_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(3))
    lines = path.read_text().splitlines()
    for broken in ([lines[0], "{", lines[2]], [lines[0], lines[0]], [lines[0], "[]"]):
        path.write_text("\n".join(broken) + "\n")
        with pytest.raises(RecordError, match="line 2"):
            read_rows(path)


@pytest.mark.parametrize("torn", ["", "{", '{"step": 9}'])
def test_the_newest_row_is_read_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_row(path) is None
    path.write_text(torn)
    assert newest_row(path) is None
    path.unlink()
    write(path, range(7))
    with path.open("a") as file:
        file.write(torn)
    monkeypatch.setattr(metrics, "_TAIL", 100 + len(torn))  # cuts the row before
    assert newest_row(path) == read_rows(path)[-1]
    monkeypatch.setattr(metrics, "_TAIL", 10 + len(torn))
    assert newest_row(path) is None, "the row is longer than what is read"


def test_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "m.jsonl") == []


# --- sinks ---------------------------------------------------------------------------------------
def test_sinks_are_off_by_default(tmp_path: Path) -> None:
    assert mirrors_of(RunDir(tmp_path), Config(), print) == []
    check_sinks(ObserveConfig())


@pytest.mark.parametrize(
    ("observe", "module", "field"),
    [
        (ObserveConfig(tensorboard=True), "tensorboard.summary", "observe.tensorboard"),
        (ObserveConfig(wandb_project="p"), "wandb", "observe.wandb_project"),
        (ObserveConfig(trackio_project="p"), "trackio", "observe.trackio_project"),
    ],
)
def test_missing_sink_package_is_named(
    monkeypatch: pytest.MonkeyPatch, observe: ObserveConfig, module: str, field: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # makes the import fail
    with pytest.raises(ConfigError, match=f"{field}.*pip install {module.partition('.')[0]}"):
        check_sinks(observe)


def settle(writer: MetricsWriter) -> None:
    """Until every mirror has every row."""
    limit = Patience(20)
    for mirror in writer._mirrors:
        while mirror._asked_s is not None or mirror._woken.is_set():
            assert not limit.over()
            time.sleep(0.005)


def fake_tracker() -> tuple[list[tuple[object, ...]], Any]:
    """(calls, a module with the calls that W&B and trackio share)."""
    calls: list[tuple[object, ...]] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)),
        finish=lambda: calls.append(("end",)),
    )
    return calls, SimpleNamespace(
        Settings=lambda **settings: settings,
        init=lambda **given: calls.append((given["project"], given["name"])) or run,
    )


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_goes_on_and_loses_the_steps_that_are_trained_again(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fake = fake_tracker()
    monkeypatch.setitem(sys.modules, package, fake)
    observe: dict[str, Any] = {f"{package}_project": "p"}
    run, config = RunDir(tmp_path / "r1"), Config(observe=ObserveConfig(**observe))
    run.root.mkdir()

    def start() -> MetricsWriter:
        writer = MetricsWriter(run.metrics, mirrors_of(run, config, print))
        settle(writer)
        return writer

    first = start()
    for step in range(3):
        first.write(step, "0.1", {"x": float(step)})
    settle(first)
    calls.clear()
    again = start()  # as after a kill
    again.rewind(3)
    again.write(3, "1.4", {"x": 3.0})
    settle(again)
    assert calls == [("p", "r1"), (3, {"x": 3.0})], "nothing is lost: the same run goes on"
    calls.clear()
    again.rewind(1)
    again.write(1, "2.2", {"x": 9.0})
    settle(again)
    assert calls == [("end",), ("p", "r1-2"), (0, {"x": 0.0}), (1, {"x": 9.0})]
    calls.clear()
    start()
    assert calls == [("p", "r1-2")]
    last = start()
    last.rewind(0)
    settle(last)
    assert calls[1:] == [("p", "r1-2"), ("end",), ("p", "r1-3")], "all steps are trained again"


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_copied_run_is_a_run_of_its_own_in_a_tracker(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fake = fake_tracker()
    monkeypatch.setitem(sys.modules, package, fake)
    observe: dict[str, Any] = {f"{package}_project": "p"}
    config = Config(observe=ObserveConfig(**observe))
    (tmp_path / "r1").mkdir()

    def start(name: str) -> None:
        run = RunDir(tmp_path / name)
        settle(MetricsWriter(run.metrics, mirrors_of(run, config, print)))

    for name in ("r1", "r1"):
        start(name)
    state = (tmp_path / "r1" / f"{package}.json").read_bytes()
    shutil.copytree(tmp_path / "r1", tmp_path / "r2")
    start("r2")
    (tmp_path / "r1").rename(tmp_path / "r3")
    start("r3")  # control: a moved run goes on
    assert calls == [("p", "r1"), ("p", "r1"), ("p", "r2"), ("p", "r1")]
    assert (tmp_path / "r3" / f"{package}.json").read_bytes() == state


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def start() -> MetricsWriter:
        open_sink = partial(TensorBoardSink, tmp_path / "tb")
        mirror = Mirror("tensorboard", open_sink, tmp_path / "place.json", print)
        return MetricsWriter(tmp_path / "m.jsonl", [mirror])

    def curve() -> list[tuple[int, float]]:
        events = EventAccumulator(str(tmp_path / "tb"))
        events.Reload()
        return [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors("x")]

    first = start()
    for step in range(5):
        first.write(step, "0.1", {"x": float(step)})
    first.close()
    again = start()
    again.write(5, "0.6", {"x": 5.0})
    settle(again)
    assert curve() == [(step, float(step)) for step in range(6)], "control: nothing was cut"
    again.rewind(3)
    for step in (3, 4):
        again.write(step, "1.4", {"x": 10.0 + step})
    again.close()
    assert curve() == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]


def test_sinks_get_the_finite_values_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses, fake = fake_tracker()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "r1").mkdir()
    config = Config(observe=ObserveConfig(wandb_project="p"))
    mirrors = mirrors_of(RunDir(tmp_path / "r1"), config, print)
    writer = MetricsWriter(tmp_path / "m.jsonl", mirrors)
    writer.write(4, "0.5", {"x": 1.0, "y": float("nan")})
    writer.close()
    assert responses == [("p", "r1"), (4, {"x": 1.0}), ("end",)]


def test_tensorboard_event_file_holds_the_values(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tb", 0)
    sink.write(7, {"reward/mean": 0.25})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Tensors("reward/mean")
    assert (event.step, event.tensor_proto.float_val[0]) == (7, 0.25)


# --- a full disk ---------------------------------------------------------------------------------
@contextlib.contextmanager
def no_room_after(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_does_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    """Half a row in a buffer or in the file would become a second row of its step later."""
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    for step in range(3):
        writer.write(step, "0.1", {"a": 1.0})
    whole = path.read_bytes()
    with no_room_after(len(whole) + 10), pytest.raises(OSError, match="No space"):
        writer.write(3, "0.1", {"a": 1.0})
    assert path.read_bytes() == whole
    assert writer.last_step == 2
    writer.rewind(3)  # a trainer that starts again from a checkpoint of exactly these steps
    for step in (3, 4):
        writer.write(step, "1.4", {"a": 1.0})
    writer.close()
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2, 3, 4]


def test_half_a_row_that_could_not_be_cut_is_cut_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write(0, "0.1", {})
    end = path.stat().st_size

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing, no_room_after(end + 10):
        failing.setattr(os, "ftruncate", fails)
        with pytest.raises(OSError, match="No space"):
            writer.write(1, "0.1", {})
    assert path.stat().st_size == end + 10
    writer.write(1, "0.1", {})
    writer.close()
    assert [row["step"] for row in read_rows(path)] == [0, 1]


def test_samples_never_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    samples = LineWriter(path)
    samples.write([{"step": 0, "response": "half of a pair \ud83d, or \u00e9"}])
    with no_room_after(path.stat().st_size + 5):
        samples.write([{"step": 1, "response": "does not fit"}])
    samples.write([{"step": 2, "response": "x"}, {"step": 2, "response": "y"}])
    assert [one["step"] for one in read_lines(path)] == [0, 1, 2, 2], "it waited for room"
    samples.rewind(2)
    samples.close()
    path.write_bytes(b"{\n" + path.read_bytes())
    LineWriter(path).write([{"step": 2}])
    assert read_lines(path) == [{"step": 2}], "a damaged file is set aside"
    assert (tmp_path / "samples.damaged").exists()
