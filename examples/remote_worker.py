"""A worker on its own: it asks a run for episodes over HTTP, and submits a reward for each.

    moerl train digits-by-agent 'task.agent.command=[]' task.agent.port=8700 \
      run.steps=40 --run remote

    WORKER_TOKEN=$(cat runs/remote/worker-token) python examples/remote_worker.py 8700 my-worker

Start any number of them, at any time, each under a name of its own; through a tunnel to this port
they may run on other machines.  A worker plays an episode as the workers of moerl do: the URL and
the key in it lead to the policy, so its tokens and records are those of the run's engines.

What cannot be sent is sent again: an episode counts once, however often it is submitted.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import aiohttp
from agent_worker import play

AT_ONCE = 8  # episodes


async def call(http: aiohttp.ClientSession, what: str, key: str, body: Any = None) -> Any:
    """The answer of the run; it may be restarting."""
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        try:
            async with http.post(f"/workers/{what}", json=body, headers=headers) as reply:
                if reply.status < 500:
                    return await reply.json() if reply.status != 204 else None
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(2)


async def work(http: aiohttp.ClientSession, key: str) -> None:
    while True:
        if (task := await call(http, "task", key)) is None:
            continue  # none yet
        found: dict[str, Any] = {"episode": task["episode"]}
        try:
            found["reward"] = await play(task)
        except Exception as error:  # this episode fails, its worker goes on
            found["error"] = f"{type(error).__name__}: {error}"
        await call(http, "submit", key, found)


async def main(port: str, name: str) -> None:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
        begun = await call(http, "register", os.environ["WORKER_TOKEN"], {"name": name})
        await asyncio.gather(*(work(http, begun["key"]) for _ in range(AT_ONCE)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
