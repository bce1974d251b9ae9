"""The stream of a run: its chain, its steps over restarts, and every change in a copy is named."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moerl.audit.verify_run import verify
from moerl.core.errors import StreamError
from moerl.core.types import EpisodeGroup, PolicyVersion, Score, VersionSpan
from moerl.records.stream_files import (
    StepFile,
    StepLine,
    StreamDir,
    read_lines,
    surviving,
    whole_plan,
)
from tests.helpers.streams import (
    Content,
    change_group,
    group_of,
    remove_group,
    small_stream,
    with_rollout,
)

REPO = Path(__file__).parents[2]


def steps_of(root: Path) -> list[StepLine]:
    kept, _ = surviving(line for line, _ in read_lines(StreamDir(root / "stream").log))
    return kept


def step_path(root: Path, step: int = 1) -> Path:
    return root / "stream/steps" / f"0.{step:06d}.step"


def test_a_stream_holds_what_was_trained(tmp_path: Path) -> None:
    small_stream(tmp_path)
    found = verify(tmp_path)
    assert not found.differences
    assert (found.starts, found.steps, found.cut, found.groups) == (1, 3, 0, 6)
    assert (found.rollouts, found.tokens) == (12, 12 * 6)
    plan, blobs = whole_plan(StepFile(StreamDir(tmp_path / "stream"), steps_of(tmp_path)[1]))
    sealed = {f"blob://n/{path.name}": path.read_bytes() for path in (tmp_path / "blobs").iterdir()}
    assert blobs == {uri: data for uri, data in sealed.items() if uri[9] in "23"}
    assert [group.group_id for group in plan.groups] == [2, 3]
    assert plan.version == PolicyVersion(0, 1)


def test_a_step_is_in_it_once_over_restarts(tmp_path: Path) -> None:
    """A later trainer begins at step 1: steps 1 and 2 of the first one are cut, not removed."""
    writing = small_stream(tmp_path, steps=2)
    last = asyncio.run(writing.train(PolicyVersion(0, 2)))
    begins = (PolicyVersion(0, 0), PolicyVersion(1, 1))

    async def again() -> None:
        writing.open()  # another controller, to which the trainer reports the step again
        await writing.report(PolicyVersion(0, 2), last)
        writing.begin(*begins)
        writing.begin(*begins)
        await writing.train(PolicyVersion(1, 1), life=1)
        await writing.train(PolicyVersion(1, 2), life=1)

    asyncio.run(again())
    lines = [line for line, _ in read_lines(writing.folder.log)]
    assert len(lines) == 1 + 3 + 1 + 2
    kept, cut = surviving(lines)
    assert [str(line.version) for line in kept] == ["0.1", "1.2", "1.3"]
    assert [str(line.version) for line in cut] == ["0.2", "0.3"]
    found = verify(tmp_path)
    assert not found.differences
    assert (found.starts, found.steps, found.cut) == (2, 3, 2)


def test_a_torn_line_is_cut_and_written_again(tmp_path: Path) -> None:
    writing = small_stream(tmp_path)
    whole = writing.folder.log.read_bytes()
    writing.folder.log.write_bytes(whole[:-7])
    assert len(steps_of(tmp_path)) == 2
    writing.open()
    asyncio.run(writing.train(PolicyVersion(0, 2), life=1))
    found = verify(tmp_path)
    assert (found.steps, found.differences) == (3, [])


def test_files_of_old_steps_are_deleted_and_their_lines_stay(tmp_path: Path) -> None:
    small_stream(tmp_path, steps=5, keep_steps=2)
    assert sorted(path.name for path in (tmp_path / "stream/steps").iterdir()) == [
        "0.000003.step",
        "0.000004.step",
    ]
    found = verify(tmp_path)
    assert (found.steps, found.kept_from, found.rollouts, found.differences) == (5, 3, 8, [])
    step_path(tmp_path, 3).unlink()  # control: a file that should be there
    assert verify(tmp_path).differences[0].startswith("step 3: ")


def _expert(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    ref = group.episodes[0].turns[0].rollout.routing[0].ids
    data = bytearray(blobs[ref.uri])
    data[ref.offset] ^= 1
    return group, blobs | {ref.uri: bytes(data)}


def _mask(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    ref = group.episodes[0].turns[0].rollout.sampling_mask[0].ids
    data = bytearray(blobs[ref.uri])
    data[ref.offset] ^= 1
    return group, blobs | {ref.uri: bytes(data)}


def _version(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    return with_rollout(group, versions=(VersionSpan(0, PolicyVersion(0, 0)),)), blobs


def _later_version(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    return with_rollout(group, versions=(VersionSpan(0, PolicyVersion(0, 2)),)), blobs


def _reward(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    first, *others = group.episodes
    return replace(group, episodes=(replace(first, score=Score(0.5)), *others)), blobs


def _token(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    tokens = group.episodes[0].turns[0].rollout.token_ids.copy()
    tokens[-1] ^= 1
    return with_rollout(group, token_ids=tokens), blobs


def _prompt(group: EpisodeGroup, blobs: dict[str, bytes]) -> Content:
    return replace(group, prompt=replace(group.prompt, text="q")), blobs


CHANGES = {
    "expert": (_expert, "rollout 2.0-0: routes"),
    "mask": (_mask, "rollout 2.0-0: mask"),
    "version": (_version, "its versions differ"),
    "later version": (_later_version, "not between the trainer's start and step 1"),
    "reward": (_reward, "its rewards differ"),
    "token": (_token, "its tokens differ"),
    "prompt": (_prompt, "its header differ"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_with_step_and_group(name: str, tmp_path: Path) -> None:
    small_stream(tmp_path)
    change, told = CHANGES[name]
    change_group(step_path(tmp_path), 2, change)
    found = verify(tmp_path).differences
    assert found[0] == "step 1: the index of 0.000001.step is not the one in the log"
    named = [line for line in found if line.startswith("step 1, group 2: ")]
    assert named
    assert len(named) == len(found) - 1  # nothing else is blamed
    assert any(told in line for line in named), found


def test_sealing_again_without_a_change_blames_no_group(tmp_path: Path) -> None:
    """Control of the changes above."""
    small_stream(tmp_path)
    change_group(step_path(tmp_path), 2, lambda group, blobs: (group, blobs))
    assert [line for line in verify(tmp_path).differences if "group" in line] == []


def test_a_byte_of_a_file_is_found(tmp_path: Path) -> None:
    small_stream(tmp_path)
    path = step_path(tmp_path)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1  # in the last group
    path.write_bytes(data)
    (found,) = [line for line in verify(tmp_path).differences if "group" in line]
    assert found.startswith("step 1, group 3: ")


def test_a_missing_group_is_found(tmp_path: Path) -> None:
    small_stream(tmp_path)
    remove_group(step_path(tmp_path), 3)
    assert "step 1: group 3: missing" in verify(tmp_path).differences


def test_a_group_that_is_trained_twice_is_found(tmp_path: Path) -> None:
    writing = small_stream(tmp_path, steps=1)
    again = group_of(0, writing.blobs, PolicyVersion(0, 1), life=5)
    line = steps_of(tmp_path)[0]
    asyncio.run(writing.train(PolicyVersion(0, 1)))
    lines = writing.folder.log.read_bytes().splitlines(keepends=True)
    body = json.loads(lines[-1])
    body["groups"] = {str(again.group_id): next(iter(line.groups.values()))}
    lines[-1] = json.dumps(body).encode() + b"\n"
    writing.folder.log.write_bytes(b"".join(lines))
    assert "step 1, group 0: trained 2 times" in verify(tmp_path).differences


@pytest.mark.parametrize("edit", ["removed", "changed", "moved"])
def test_a_line_of_the_log_cannot_be_changed(edit: str, tmp_path: Path) -> None:
    writing = small_stream(tmp_path)
    lines = writing.folder.log.read_bytes().splitlines(keepends=True)
    if edit == "removed":
        del lines[2]
    elif edit == "changed":
        lines[2] = lines[2].replace(b'"loss/grad_norm":1.0', b'"loss/grad_norm":2.0')
    else:
        lines[2], lines[3] = lines[3], lines[2]
    writing.folder.log.write_bytes(b"".join(lines))
    with pytest.raises(StreamError, match="does not follow the line before"):
        read_lines(writing.folder.log)
    assert len(verify(tmp_path).differences) == 1


def test_a_run_without_a_stream_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match=r"stream\.keep_steps=-1"):
        verify(tmp_path)


def test_a_second_reader_finds_the_same(tmp_path: Path) -> None:
    """examples/read_stream.py reads the form from docs/formats.md, without moerl."""
    small_stream(tmp_path)
    command = [sys.executable, "-I", str(REPO / "examples/read_stream.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    plan, _ = whole_plan(StepFile(StreamDir(tmp_path / "stream"), steps_of(tmp_path)[2]))
    first = plan.groups[0].episodes[0].turns[0].rollout
    assert rows[2]["groups"]["4"]["tokens"][0] == first.token_ids.tolist()
    assert rows[2]["groups"]["4"]["rewards"] == [0.0, 1.0]
    assert np.shape(rows[2]["groups"]["4"]["tokens"]) == (2, 9)
