"""The SDK openai-agents, unchanged, in a loop with a tool.

The program reads one line, {"base_url", "api_key", "prompt", "extra": {"turns"}}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import agents
import openai

agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def play(task: dict[str, Any]) -> None:
    client = openai.AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)
    model = agents.OpenAIChatCompletionsModel("policy", client)
    agent = agents.Agent("adder", instructions="You add.", tools=[add], model=model)
    history: Any = task["prompt"]
    left = task["extra"]["turns"]
    while left > 0:
        try:
            done = await agents.Runner.run(agent, history, max_turns=left)
        except agents.MaxTurnsExceeded:
            return
        left -= len(done.raw_responses)  # it answered without a call: ask again
        history = [*done.to_input_list(), {"role": "user", "content": "use the tool"}]


if __name__ == "__main__":
    asyncio.run(play(json.loads(sys.stdin.readline())))
