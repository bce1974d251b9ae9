"""`moerl train` with an external program as the agent, on real SGLang and Megatron."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moerl.data.tasks import load_tokenizer
from tests.helpers.documented_metrics import undocumented
from tests.helpers.short_agent_runs import (
    METRICS,
    ROOT,
    SETTINGS,
    check_agent_run,
    check_scores,
)
from tests.helpers.stub_model import completion, stub_model
from tests.helpers.train_runs import Run, start, survivors

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

LONG_TURNS = [
    f"task.agent.command=[python, {ROOT}/tests/helpers/text_agent.py, '3', '20']",
    "checkpoint.keep_versions=true",
    "sampling.ignore_eos=true",
    "sampling.max_new_tokens=160",
]
JOINED = "mismatch/abs_dlogp_max/joined_lag_"


@pytest.mark.parametrize("isolation", ["process", "bwrap"])
def test_an_ordinary_agent_is_trained(isolation: str, tmp_path: Path) -> None:
    settings = [*SETTINGS, "run.steps=2", f"task.isolation={isolation}"]
    run = start(tmp_path, "digits-by-agent", *settings, name="x", copies=True)
    run.wait_for(lambda: bool(agents_of(run)))
    members = run.members()
    assert run.finish() == 0, run.text()
    check_agent_run(run, 2)
    assert not survivors(members, 10.0)


def test_held_out_prompts_are_played(tmp_path: Path) -> None:
    """Greedy, and no version differs from another, so every evaluation has the same rewards."""
    held_out = ["evaluation.every=1", "evaluation.prompts=4", "evaluation.samples=2"]
    worker = f"task.agent.command=[python, {ROOT}/examples/agent_worker.py]"
    still = "trainer.optimizer={lr: 0, min_lr: 0, warmup_steps: 0}"
    settings = [*SETTINGS, *held_out, still, worker, "task.agent.workers=1"]
    settings += ["evaluation.hold_s=120", "run.steps=2"]
    run = start(tmp_path, "digits-by-agent", *settings, name="x", copies=True)
    assert run.finish() == 0, run.text()
    rows = run.rows()
    found = [row for row in rows if "eval/step" in row]
    assert [row["eval/step"] for row in found] == [0.0, 1.0, 2.0]
    assert len({row["eval/reward_mean"] for row in found}) == 1
    assert all(row["eval/reward_best"] == row["eval/reward_mean"] for row in found), "two are equal"
    assert all((row["eval/failed"], row["eval/played_again"]) == (0, 0) for row in found)
    assert not undocumented((name for row in rows for name in row if "/" in name), METRICS)
    groups = [group for _, group in run.trained.groups(rows)]
    assert len(groups) == 4, "held-out episodes are in no batch"


def test_remote_workers_play_a_run(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    remote = ["task.agent.command=[]", f"task.agent.port={port}"]
    run = start(
        tmp_path, "digits-by-agent", *SETTINGS, *remote, "run.steps=2", name="x", copies=True
    )
    token = run.dir.root / "worker-token"
    run.wait_for(token.exists)
    command = [sys.executable, f"{ROOT}/examples/remote_worker.py", port]
    env = os.environ | {"WORKER_TOKEN": token.read_text()}
    workers = [subprocess.Popen([*command, name], env=env) for name in ("one", "two")]
    try:
        assert run.finish() == 0, run.text()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    check_agent_run(run, 2)


def test_another_model_is_called_and_never_trained(tmp_path: Path) -> None:
    """Its answers are messages to the policy; its key is in no file but the one for secrets."""
    key, said = "s3cr3t-key", "a bad cafe faded"
    with stub_model(body=json.dumps(completion(said)).encode()) as stub:
        agent = f"{ROOT}/tests/helpers/text_agent.py"
        settings = [f"task.agent.command=[python, {agent}, '2', '20', judge]"]
        settings += [f"task.agent.models.judge={{base_url: '{stub.base_url}', api_key: {key}}}"]
        settings += [*SETTINGS, "task.max_turns=4", "run.steps=2"]
        run = start(tmp_path, "digits-by-agent", *settings, name="x", copies=True)
        assert run.finish() == 0, run.text()
    check_agent_run(run, 2)
    assert all(headers["Authorization"] == f"Bearer {key}" for _, headers, _ in stub.asked)
    groups = [group for _, group in run.trained.groups(run.rows())]
    episodes = [episode for group in groups for episode in group.episodes]
    for episode in episodes:
        assert [turn.role for turn in episode.graph] == ["policy", "judge"] * 2
        assert [turn.trained for turn in episode.graph] == [True, False] * 2
        sampled = sum(turn.num_sampled for turn in episode.graph if turn.trained)
        assert sampled == sum(node.rollout.num_sampled for node in episode.turns)
    decode = load_tokenizer(run.plan().model_path).decode
    read = [decode(episode.turns[-1].rollout.token_ids.tolist()) for episode in episodes]
    assert all(said in text for text in read), "the policy has read it"
    rows = run.rows()
    assert sum(row.get("agent/graph/judge/other_model", 0) for row in rows) >= 2 * len(episodes)
    files = [path for path in run.dir.root.rglob("*") if path.is_file()]
    holding = {path.name for path in files if key.encode() in path.read_bytes()}
    assert holding == {"secrets.yaml"}
    assert "not trained: other model" in report_of(run)


def report_of(run: Run) -> str:
    return (run.dir.root / "report.html").read_text()


def agents_of(run: Run) -> list[psutil.Process]:
    """Programs of the run, not their keepers."""
    found = []
    for member in run.members():
        try:
            command = member.cmdline()
        except psutil.Error:
            continue
        if command[1:2] and command[1].endswith(("tool_agent.py", "text_agent.py")):
            found.append(member)
    return found


@pytest.mark.parametrize("victim", ["controller", "engine-0", "program"])
def test_a_death_in_mid_episode_costs_no_step(tmp_path: Path, victim: str) -> None:
    run = start(tmp_path, "digits-by-agent", *SETTINGS, "run.steps=4", name="x", copies=True)
    try:
        # a step is in the run directory, whether or not the supervisor has been told
        run.wait_for(lambda: bool(run.rows()) and bool(agents_of(run)))
        members, playing = run.members(), agents_of(run)
        os.kill(playing[-1].pid if victim == "program" else run.pids()[victim], signal.SIGKILL)
        if victim == "controller":
            assert not survivors(playing, 10.0), "programs end with the gateway"
        assert run.finish() == 0, run.text()
    finally:
        run.end()
    check_agent_run(run, 4)
    assert not survivors(members, 10.0)
    failed = sum(row.get("agent/failed/exit", 0.0) for row in run.rows())
    assert failed == (victim == "program"), "its group is replaced"


@pytest.mark.parametrize("mode", ["drain", "in_place", "retract"])
def test_an_update_meets_running_turns(tmp_path: Path, mode: str) -> None:
    """Long answers, so that updates come into the middle of turns; scored with each version's
    saved weights.

    Rows are split where the weights change, so every row is exact; tokens on a KV cache of older
    weights, which no weights reproduce, are joined and have bins of their own.
    """
    rows_of = "join" if mode == "in_place" else "split"
    settings = [*SETTINGS, *LONG_TURNS, f"rollout.in_flight_mode={mode}"]
    settings += [f"rollout.turn_rows={rows_of}", f"replay.audit={str(rows_of == 'split').lower()}"]
    run = start(tmp_path, "digits-by-agent", *settings, "run.steps=3", name="x", copies=True)
    run.wait_for(lambda: bool(agents_of(run)))
    members = run.members()
    assert run.finish(540.0) == 0, run.text()
    check_agent_run(run, 3)
    assert not survivors(members, 10.0)
    steps = run.rows()
    groups = [group for _, group in run.trained.groups(steps)]
    rows = [node.rollout for g in groups for e in g.episodes for node in e.turns]
    changed = sum(row["async/interrupts"] + row["async/recomputed_tokens"] for row in steps)
    behind = [name for row in steps for name in row if name.startswith(JOINED)]
    kept = [span for row in rows for span in row.versions if span.kept_kv]
    print(f"{mode}: {len(rows)} rows, {len(kept)} spans on a kept cache, {changed:.0f} recomputed")
    assert bool(behind) == bool(kept) == (mode == "in_place")
    assert (changed > 0) == (mode == "retract"), "an update met a running turn"
    check_scores(run, tmp_path, [row for row in rows if row.joined_from == row.num_sampled])
