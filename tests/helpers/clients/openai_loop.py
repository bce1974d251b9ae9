"""OpenAI's client, unchanged, in a loop with a tool.

The program reads one line, {"base_url", "api_key", "prompt", "extra": {"turns"}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def play(task: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=task["base_url"], api_key=task["api_key"], max_retries=0)
    history: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(task["extra"]["turns"]):
        said = client.chat.completions.create(model="policy", messages=history, tools=[ADD])
        message = said.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "11"}
            for call in message.tool_calls or []
        ]
        history += [
            message.model_dump(exclude_none=True),
            *(results or [{"role": "user", "content": "use the tool"}]),
        ]


if __name__ == "__main__":
    play(json.loads(sys.stdin.readline()))
