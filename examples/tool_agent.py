"""An agent of your own: an ordinary loop with OpenAI's client, trained as it is.

    moerl train digits-by-agent run.steps=40 --run my-agent

moerl starts this program once per episode.  OPENAI_BASE_URL and OPENAI_API_KEY point to the policy,
the prompt is JSON on standard input, and a line of output is the reward, with the secret of the
input: no text that a policy prints can be one.  The program knows nothing of training and tokens: a
gateway records every turn.

The task shows digits and wants them sorted.  The tool compares an answer with the right one, place
by place; the agent asks again, up to three times.  The reward is the share of right places in the
best answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

TURNS = 3
CHECK: Any = {
    "type": "function",
    "function": {"name": "check", "description": "Compares.", "parameters": {"type": "object"}},
}


def matches(answer: str, right: str) -> int:
    """Places of the answer that are right."""
    return sum(a == b for a, b in zip(answer.strip(), right, strict=False))


def play(task: dict[str, Any]) -> float:
    """The reward of one episode."""
    client, history, best = openai.OpenAI(), list(task["messages"]), 0
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=history, tools=[CHECK])
        answer = reply.choices[0].message
        found = matches(answer.content or "", task["answer"])
        best = max(best, found)
        if found == len(task["answer"]):
            break
        result = {"role": "tool", "tool_call_id": "check", "content": f"{found} right"}
        history += [answer.model_dump(exclude_none=True), result]
    return best / len(task["answer"])


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps({"reward": play(task), "secret": task["secret"]}))
