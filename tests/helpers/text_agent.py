"""An agent of any length: TURNS messages of CHARACTERS, and a reward that differs by what it hears.

    python tests/helpers/text_agent.py TURNS CHARACTERS [MODEL]

MODEL: another one, whose answer is the next message.
It sends the whole conversation with each turn, as any client does.  A random policy gets other
rewards for other texts, so every step changes the weights.
"""

from __future__ import annotations

import json
import os
import random
import sys
import urllib.request


def ask(history: list[dict[str, str]], model: str = "policy") -> str:
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": model, "messages": history}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    reply = json.load(urllib.request.urlopen(request))
    return str(reply["choices"][0]["message"]["content"] or "")


def main() -> None:
    task, (turns, characters) = json.load(sys.stdin), map(int, sys.argv[1:3])
    # An episode that is played again gets the same messages, as most agents give them.
    chance, said = random.Random(task["episode"].partition(".r")[0]), ""
    history: list[dict[str, str]] = []
    for _ in range(turns):
        text = "".join(chance.choices("0123456789abcdef ", k=characters))
        history.append({"role": "user", "content": text})
        history.append({"role": "assistant", "content": ask(history)})
        said += history[-1]["content"]
        for model in sys.argv[3:]:
            history.append({"role": "user", "content": ask(history, model)})
    print(json.dumps({"reward": sum(map(ord, said)) % 11 / 11, "secret": task["secret"]}))


if __name__ == "__main__":
    main()
