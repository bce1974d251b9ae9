"""A scorer as an HTTP service: questions in, scores out (docs/scoring.md).

    python examples/score_service.py 8800

A run asks it with 'task.rewards=[{name: sorted, where: http, url: "http://127.0.0.1:8800/"}]'.

The same key always asks about the same text: a service may keep its answers by key, and here a
repeated question costs nothing.  Questions of one message are answered together, in any order; one
that cannot be answered gets an `error`.  Status 429 with `Retry-After` asks for a pause.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from aiohttp import web

KNOWN: dict[str, dict[str, Any]] = {}  # answers by key


async def score(request: web.Request) -> web.Response:
    asked = (await request.json())["requests"]
    found = await asyncio.gather(*(answer(one) for one in asked))
    return web.json_response({"scores": found})


async def answer(asked: dict[str, Any]) -> dict[str, Any]:
    key = asked["key"]
    if key not in KNOWN:
        await asyncio.sleep(
            float(asked["prompt"]["extra"].get("wait_s", 0))
        )  # e.g. another service
        want, said = str(asked["prompt"]["answer"]), asked["turns"][-1]["response"]
        right = sum(a == b for a, b in zip(want, said, strict=False)) / max(len(want), len(said), 1)
        KNOWN[key] = {"reward": right, "length": len(said), "reason": f"{right:.0%} in place"}
    return {"key": key, **KNOWN[key]}


if __name__ == "__main__":
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/", score)])
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
