"""trace.json: all processes of a run on one time axis, for Perfetto and chrome://tracing.

It reads only the trace folder (`moerl.runtime.trace`), so it also works for a run that is still
training or
that died.  Times are microseconds since the first span, by the clock of each node.  Spans of one
process may overlap (requests, threads): each gets the first free thread track, so a viewer nests or
stacks them correctly.

Format: the JSON object of the Trace Event Format, with complete events (X), counters (C) and names
(M).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moerl.core.atomic import atomic_write
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import read_counters, read_spans

MAX_EVENTS = 500_000  # the newest are kept; viewers are slow with more
_ORDER = ("controller", "engine", "scorer", "trainer", "ref_models")  # processes, top to bottom
_SPAN_KEYS = ("process", "name", "start_s", "end_s")

Event = dict[str, Any]


def write_trace(run: RunDir) -> Path:
    """Write trace.json of a run in any state; returns its path."""
    events = trace_events(read_spans(run.trace), read_counters(run.trace))
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    atomic_write(run.perfetto, json.dumps(document))
    return run.perfetto


def trace_events(
    spans: Sequence[Mapping[str, Any]], counters: Sequence[Mapping[str, Any]] = ()
) -> list[Event]:
    """Trace events of the spans and counters that `moerl.runtime.trace` reads."""
    spans, counters = spans[-MAX_EVENTS:], counters[-MAX_EVENTS:]
    starts = [span["start_s"] for span in spans] + [value["time_s"] for value in counters]
    zero = min(starts, default=0.0)
    names = {str(line["process"]) for line in (*spans, *counters)}
    pids = {name: pid for pid, name in enumerate(sorted(names, key=_rank), start=1)}
    events: list[Event] = []
    for name, pid in pids.items():
        own = [span for span in spans if span["process"] == name]
        events += _names(name, pid, own)
        events += _complete(own, pid, zero)
    for value in counters:
        events.append(
            {
                "ph": "C",
                "name": value["counter"],
                "pid": pids[value["process"]],
                "tid": 0,
                "ts": _microseconds(value["time_s"] - zero),
                "args": {"value": value["value"]},
            }
        )
    return events


def _complete(spans: Iterable[Mapping[str, Any]], pid: int, zero: float) -> Iterable[Event]:
    for span, track in _tracks(spans):
        yield {
            "ph": "X",
            "name": span["name"],
            "cat": str(span["name"]).split()[0],
            "pid": pid,
            "tid": track,
            "ts": _microseconds(span["start_s"] - zero),
            "dur": max(0, _microseconds(span["end_s"] - span["start_s"])),
            "args": {key: value for key, value in span.items() if key not in _SPAN_KEYS},
        }


def _tracks(spans: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], int]]:
    """Each span with the first thread track where it nests in the open spans or follows them."""
    tracks: list[list[float]] = []  # ends of the open spans of a track, outermost first
    for span in sorted(spans, key=lambda span: (span["start_s"], -span["end_s"])):
        for ends in tracks:
            while ends and ends[-1] <= span["start_s"]:
                ends.pop()
        fits = (i for i, ends in enumerate(tracks) if not ends or span["end_s"] <= ends[-1])
        track = next(fits, len(tracks))
        if track == len(tracks):
            tracks.append([])
        tracks[track].append(span["end_s"])
        yield span, track


def _names(name: str, pid: int, spans: Sequence[Mapping[str, Any]]) -> list[Event]:
    def named(kind: str, tid: int, **args: Any) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}

    tracks = {track for _, track in _tracks(spans)}
    return [
        named("process_name", 0, name=name),
        named("process_sort_index", 0, sort_index=pid),
        *(named("thread_name", track, name=f"{name} {track}") for track in sorted(tracks)),
    ]


def _rank(name: str) -> tuple[int, str]:
    kind = next((at for at, head in enumerate(_ORDER) if name.startswith(head)), len(_ORDER))
    return kind, name


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
