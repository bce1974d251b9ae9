"""Trace files are bounded, and become events that Perfetto and chrome://tracing accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moerl.observe.perfetto import trace_events, write_trace
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer, read_counters, read_spans


def _span(process: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"process": process, "name": name, "start_s": start, "end_s": end, "version": "0.1"}


def _check(events: list[dict[str, Any]]) -> None:
    """The rules of the Trace Event Format that a viewer relies on."""
    open_ends: dict[tuple[int, int], list[int]] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] in {"X", "C", "M"}
        assert event["name"]
        if event["ph"] != "X":
            continue
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0 <= event["dur"]
        ends = open_ends.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1], "events of one lane nest or follow each other"
        ends.append(end)


def test_every_process_is_on_one_time_axis(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    for process in ("trainer-0", "engine1", "controller", "scorer", "engine0"):
        with Tracer(run.trace, process).span("work"):
            pass
    Tracer(run.trace, "controller").count("async/in_flight", 3.0)
    (run.trace / "engine0.jsonl").open("a").write('{"process": "engine0", "na')  # killed here
    document = json.loads(write_trace(run).read_text())
    events = document["traceEvents"]
    _check(events)
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named == ["controller", "engine0", "engine1", "scorer", "trainer-0"]
    assert len([e for e in events if e["ph"] == "X"]) == 5
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"value": 3.0}]


def test_overlapping_spans_get_lanes_of_their_own_and_nested_ones_do_not() -> None:
    spans = [
        _span("engine0", "generate", 10.0, 12.0),
        _span("engine0", "update", 10.5, 11.0),  # inside the first
        _span("engine0", "generate", 11.5, 13.0),  # crosses its end
        _span("engine0", "generate", 12.0, 14.0),  # begins where the first ends
    ]
    events = [e for e in trace_events(spans) if e["ph"] == "X"]
    _check(events)
    assert [(e["ts"], e["dur"], e["tid"]) for e in events] == [
        (0, 2_000_000, 0),
        (500_000, 500_000, 0),
        (1_500_000, 1_500_000, 1),
        (2_000_000, 2_000_000, 0),
    ]
    assert events[0]["args"] == {"version": "0.1"}


def test_a_trace_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path, "engine0", limit_bytes=4000)
    for index in range(200):
        tracer.add("generate", index, index + 1)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4200
    starts = [span["start_s"] for span in read_spans(tmp_path)]
    assert starts == list(range(starts[0], 200))
    assert starts[0] > 0
    assert read_counters(tmp_path) == []
