"""Pydantic AI, unchanged, in a loop with a tool.

The program reads one line, {"base_url", "api_key", "prompt", "extra": {"turns"}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import RunUsage, UsageLimits


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def play(task: dict[str, Any]) -> None:
    provider = OpenAIProvider(base_url=task["base_url"], api_key=task["api_key"])
    model = OpenAIChatModel("policy", provider=provider)
    agent = Agent(model, instructions="You add.", tools=[add])
    limits, usage = UsageLimits(request_limit=task["extra"]["turns"]), RunUsage()
    question, history = task["prompt"], None
    while True:
        try:
            done = agent.run_sync(
                question, message_history=history, usage_limits=limits, usage=usage
            )
        except UsageLimitExceeded:
            return
        question, history = "use the tool", done.all_messages()


if __name__ == "__main__":
    play(json.loads(sys.stdin.readline()))
