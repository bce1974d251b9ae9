"""An agent with little patience: TURNS answers, for each of which it waits SECONDS at a time.

    python tests/helpers/hasty_agent.py TURNS SECONDS

Every other answer may take longer as long as something is heard within SECONDS, as with a timeout
of OpenAI's client.  The others may not: the agent hangs up and sends the same request again, as a
retry of that client.  It prints how often it did.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai


async def main() -> None:
    task, turns, seconds = json.load(sys.stdin), int(sys.argv[1]), float(sys.argv[2])
    client = openai.AsyncOpenAI(timeout=seconds, max_retries=0)
    history: list[Any] = [{"role": "user", "content": task["prompt"]}]
    again, said = 0, ""
    for turn in range(turns):
        retries = 0
        while True:
            try:
                async with asyncio.timeout(seconds if turn % 2 else None):
                    reply = await client.chat.completions.create(
                        model="policy",
                        messages=history,
                        extra_headers={"x-stainless-retry-count": str(retries)},
                    )
                break
            except TimeoutError:
                retries += 1
        again += retries
        text = reply.choices[0].message.content or ""
        said += text
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    print(f"asked again: {again}", file=sys.stderr)
    print(json.dumps({"reward": sum(map(ord, said)) % 11 / 11, "secret": task["secret"]}))


if __name__ == "__main__":
    asyncio.run(main())
