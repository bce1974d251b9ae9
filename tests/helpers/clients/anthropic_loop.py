"""Anthropic's client, unchanged, in a loop with a tool, whole and as streams in turn.

The program reads one line, {"base_url", "api_key", "prompt", "extra": {"turns"}}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

ADD: Any = {
    "name": "add",
    "description": "Add two integers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


def play(task: dict[str, Any]) -> None:
    client = anthropic.Anthropic(
        base_url=task["base_url"].removesuffix("/v1"), api_key=task["api_key"], max_retries=0
    )
    history: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for turn in range(task["extra"]["turns"]):
        asked = {"messages": history, "tools": [ADD], "system": "You add."}
        said = ask(client, stream=bool(turn % 2), model="policy", max_tokens=60, **asked)
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "11"}
            for block in said.content
            if block.type == "tool_use"
        ]
        history += [
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": results or "use the tool"},
        ]


def ask(client: anthropic.Anthropic, *, stream: bool, **fields: Any) -> anthropic.types.Message:
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as events:
        return events.get_final_message()


if __name__ == "__main__":
    play(json.loads(sys.stdin.readline()))
