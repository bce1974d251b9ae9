"""An agent that stays: one process plays many episodes at once, and its imports are paid once.

    moerl train digits-by-agent task.agent.workers=1 \
      'task.agent.command=[python, examples/agent_worker.py]' run.steps=40 --run my-worker

It plays the task of tool_agent.py.  moerl writes a line of JSON for each episode on standard input,
with the URL and the key of the policy, and reads a line with the reward.  Standard output is for
these answers only: print everything else to standard error.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from tool_agent import CHECK, TURNS, matches


async def play(task: dict[str, Any]) -> float:
    """The reward of one episode."""
    history, best = list(task["messages"]), 0
    async with openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"]) as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model="policy", messages=history, tools=[CHECK]
            )
            answer = reply.choices[0].message
            found = matches(answer.content or "", task["answer"])
            best = max(best, found)
            if found == len(task["answer"]):
                break
            result = {"role": "tool", "tool_call_id": "check", "content": f"{found} right"}
            history += [answer.model_dump(exclude_none=True), result]
    return best / len(task["answer"])


async def answer(task: dict[str, Any]) -> None:
    found: dict[str, Any] = {"episode": task["episode"], "secret": task["secret"]}
    try:
        found["reward"] = await play(task)
    except Exception as error:  # this episode fails; the others are played to their end
        found["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), flush=True)


async def main() -> None:
    playing = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        work = asyncio.create_task(answer(json.loads(line)))
        playing.add(work)
        work.add_done_callback(playing.discard)
    await asyncio.gather(*playing)


if __name__ == "__main__":
    asyncio.run(main())
