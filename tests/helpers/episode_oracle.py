"""Digests of the groups that a controller admits, in a form that no machinery shows through.

The form holds what a trainer may read of a group: prompt, rows, log-probabilities, versions, masks,
routes, scores, graph, peers.  It holds no place of a blob, number of a try, engine, or time.

    python -m tests.helpers.episode_oracle            # compare with the stored digests
    python -m tests.helpers.episode_oracle --write    # store those of this tree; not in CI

Store digests anew only with a change that means to change what is trained, and say so.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from moerl.core.types import (
    BlobRef,
    Episode,
    EpisodeGroup,
    GraphTurn,
    LogprobBlob,
    MaskBlob,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Score,
    Turn,
    TurnEnd,
    VersionSpan,
)
from moerl.records import BlobStore
from tests.helpers.oracle_engine import turn_name

FILE = Path(__file__).parents[1] / "data" / "episode_oracle.json"
_FIELDS: dict[type, str] = {
    EpisodeGroup: "group_id prompt episodes peers",
    Prompt: "index token_ids text answer extra task",
    Episode: "episode_id turns score graph",
    Score: "reward steps text_steps turns errors",
    GraphTurn: "name parent role left_out versions num_sampled",
    Turn: "rollout parents origins",
    Rollout: "rollout_id token_ids loss_mask logprobs versions routing sampling_mask finish "
    "sampling audit_rows sealed_logprobs turn_ends",
    VersionSpan: "first version kept_kv",
    RoutingBlob: "ids row_begin row_end version layers num_experts",
    MaskBlob: "offsets ids first num_tokens",
    LogprobBlob: "values first num_tokens",
    SamplingParams: "max_new_tokens temperature top_p top_k min_p stop_token_ids ignore_eos",
    TurnEnd: "end finish",
}
_TRY = re.compile(r"\.r(\d+)-\d+")
# Sums over a run.  Those of episodes have another prefix where one machinery plays all of them.
_COUNTS = re.compile(
    r"refused/.*|scorer/failed|sample/context_ends|eval/given_up|"
    r"async/(dropped_\w+|carried_siblings|cancelled_\w+|recomputed_tokens|interrupts|"
    r"engine_restarts|engines_excluded|stalled_requests)"
)
_EPISODE_COUNTS = re.compile(r"(agent|episode)/(?!engine_s$|program_s$|open/)(.*)")
_OF_STEPS = re.compile(
    r"reward/\w+|sample/(?!context_ends).*|async/(segments|partial|lag)_.*|"
    r"async/lag_frac/.*"
)


def form(value: Any, store: BlobStore) -> Any:
    """JSON of a record; a reference to a blob becomes a digest of its bytes."""
    if isinstance(value, tuple) and value and isinstance(value[0], RoutingBlob):
        return _routes(value, store)
    if fields := _FIELDS.get(type(value)):
        return {name: _named(name, form(getattr(value, name), store)) for name in fields.split()}
    if isinstance(value, BlobRef):
        return [value.dtype, list(value.shape), _sha256(store.load(value))]
    if isinstance(value, PolicyVersion | Enum):
        return str(value)
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, Mapping):
        return {str(key): form(one, store) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [form(one, store) for one in value]
    assert value is None or isinstance(value, str | int | float), f"{type(value)} has no form"
    return value


def _routes(parts: Sequence[RoutingBlob], store: BlobStore) -> list[Any]:
    """Rows of one version: siblings may share those of a prompt, or have them in their own part."""
    runs: list[list[RoutingBlob]] = []
    for part in parts:
        last = runs[-1][-1] if runs else None
        if last and (last.row_end, last.version) == (part.row_begin, part.version):
            runs[-1].append(part)
        else:
            runs.append([part])
    found = []
    for run in runs:
        rows = np.concatenate([store.load(part.ids) for part in run], axis=1)
        fields = form(replace(run[0], row_end=run[-1].row_end), store)
        found.append(fields | {"ids": [list(rows.shape), _sha256(rows)]})
    return found


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _named(field: str, value: Any) -> Any:
    """Names without the number of a try, which depends on the order of other groups."""
    if field not in ("rollout_id", "episode_id", "name", "parent") or not value:
        return value
    if field in ("name", "parent"):  # of a turn
        life = _TRY.search(value)
        return turn_name(value) + (f" of life {life[1]}, again" if life else "")
    return _TRY.sub(r".r\1", value).removesuffix(".t0")


def digest(value: Any) -> str:
    """sha256 of its JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def counts_of(rows: Sequence[Mapping[str, float]], *, of_episodes: bool) -> dict[str, float]:
    """Counts of a whole run that are not 0.  of_episodes: those that `agent/` begins, too."""
    found: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("refused/"):  # counted from the start of the run
                found[name] = value
            elif _COUNTS.fullmatch(name):
                found[name] = found.get(name, 0.0) + value
            elif of_episodes and (match := _EPISODE_COUNTS.fullmatch(name)):
                found[f"episode/{match[2]}"] = found.get(f"episode/{match[2]}", 0.0) + value
    return {name: value for name, value in sorted(found.items()) if value}


def rows_of_steps(rows: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Figures of each batch."""
    return [
        {name: value for name, value in sorted(row.items()) if _OF_STEPS.fullmatch(name)}
        for row in rows
    ]


def evaluations_of(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Figures by the step that was evaluated, whichever row they are in."""
    return {
        f"{row['eval/step']:g}": {
            name: value
            for name, value in sorted(row.items())
            if name.startswith("eval/") and name not in ("eval/seconds", "eval/given_up")
        }
        for row in rows
        if "eval/step" in row
    }


def _text_of(found: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with one line for each part of a scenario."""
    scenarios = []
    for name, parts in found.items():
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in parts.items()]
        scenarios.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(scenarios) + "\n}\n"


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def differences(found: Any, known: Any, where: str = "") -> list[str]:
    """Places where two results differ, in words."""
    if isinstance(found, dict) and isinstance(known, dict):
        keys = sorted(found.keys() | known.keys())
        parts = [differences(found.get(k), known.get(k), f"{where}/{k}") for k in keys]
        return [line for part in parts for line in part]
    return [] if found == known else [f"{where}: {found}, stored {known}"]


def main(words: Sequence[str]) -> int:
    from tests.helpers.oracle_runs import SCENARIOS, played

    if set(words) - {"--write"}:
        print(__doc__)
        return 2
    if "--write" in words and os.environ.get("CI"):
        print("the digests are not stored in CI: they would hide what changed")
        return 2
    found = {}
    for name in SCENARIOS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = played(name, Path(folder)).summary
    if "--write" in words:
        FILE.write_text(_text_of(found))
        print(f"{len(found)} scenarios in {FILE}")
        return 0
    lines = differences(found, stored())
    print("\n".join(lines) or f"{len(found)} scenarios agree")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
