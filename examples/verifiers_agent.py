"""A worker that plays episodes of a verifiers environment, as it is installed.

    moerl train digits-by-agent task.agent.workers=1 task.call_format=qwen25 \
      'task.agent.command=[python, examples/verifiers_agent.py, TASKSET]' --run with-verifiers

Give the Python of an environment that has verifiers 0.4 in place of `python`, which is moerl's own.
TASKSET is the name of an installed set of tasks.  A second argument is the environment's JSON
configuration, where it has other roles than `agent`, another harness or another place to run.

moerl sends a line of JSON for each episode, many at a time, and takes one back for each.  The
number of the prompt chooses the task; every tenth of the set is played in evaluations only.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import sys
from typing import Any

import verifiers.v1 as vf

MOST_TASKS = 100_000
LOCAL = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}


def config_of(taskset: str, given: str = "") -> vf.EnvConfig:
    roles = json.loads(given) if given else LOCAL
    return vf.resolve_env_config({"taskset": {"id": taskset}} | roles)


async def play(config: vf.EnvConfig, task: vf.Task, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to one line."""
    variable = "KEY_" + re.sub(r"\W", "_", asked["episode"])
    os.environ[variable] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
    # One environment for each episode: it keeps a client for each URL until it ends.
    env = vf.load_environment(config)
    try:
        async with env.serving():
            done = await env.run_episode(task, vf.ModelContext("policy", client))
    finally:
        del os.environ[variable]
    errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
    if errors or not done.ok:
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors)}
    return {"reward": statistics.fmean(trace.reward for trace in done.traces)}


def chosen(tasks: list[vf.Task], asked: dict[str, Any]) -> vf.Task:
    trained = [task for place, task in enumerate(tasks) if place % 10] or tasks
    own = tasks[::10] if asked.get("held_out") else trained
    return own[asked.get("index", 0) % len(own)]


async def answer(config: vf.EnvConfig, tasks: list[vf.Task], asked: dict[str, Any]) -> None:
    try:
        found = await play(config, chosen(tasks, asked), asked)
    except Exception as error:  # one episode's; the others are not touched
        found = {"error": f"{type(error).__name__}: {error}"}
    own = {name: asked[name] for name in ("episode", "secret")}
    print(json.dumps(own | found), flush=True)


async def main() -> None:
    config = config_of(*sys.argv[1:])
    tasks = list(vf.load_environment(config).taskset.take(MOST_TASKS))
    playing = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        work = asyncio.create_task(answer(config, tasks, json.loads(line)))
        playing.add(work)
        work.add_done_callback(playing.discard)
    await asyncio.gather(*playing)


if __name__ == "__main__":
    asyncio.run(main())
