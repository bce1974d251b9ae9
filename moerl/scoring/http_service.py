"""A scorer that is a service: batches of questions as JSON (docs/scoring.md has the schema).

Nothing that the service sends runs here; an unreadable message counts as no answer, and an unusable
answer is an error of its own request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
import msgspec

from moerl.config.reward_terms import RewardTerm
from moerl.config.secret_values import HIDDEN
from moerl.config.task_mixture import TaskEntry
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError, ScorerDown
from moerl.core.types import Score
from moerl.data.reward_values import BadReturn, score_of
from moerl.scoring.process import usable_score

_SHOWN = 200  # characters of an answer in an error
_BUSY = (429, 503)  # statuses of a service that is well
_WAIT_S = 1.0, 60.0  # of a busy service that names no time, and the longest


class HttpScorer:
    """The `Scorer` of an HTTP service.  Use it from one event loop."""

    def __init__(self, task: TaskEntry, term: RewardTerm) -> None:
        self._term, self._timeout_s = term, task.timeout_of(term)
        self._most = task.limits.reply_kb * 1024  # bytes of an answer to one request
        self._session: aiohttp.ClientSession | None = None

    async def score(self, asked: Sequence[ScoreRequest]) -> list[Score | ScoreError]:
        """Answers, in order.  Raises ScorerDown."""
        body = msgspec.json.encode(
            {"unit": self._term.unit, "requests": [_shown(one) for one in asked]}, enc_hook=str
        )
        try:
            data = await self._post(body, self._most * len(asked))
        except TimeoutError as error:
            raise self._down(f"did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._down(f"cannot be reached: {error}") from error
        found = self._read(data)
        return [self._score_of(found.get(one.key), one) for one in asked]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: bytes, most: int) -> bytes:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        key = self._term.api_key
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        post = self._session.post(self._term.url, data=body, headers=headers, allow_redirects=False)
        async with post as reply:
            data = bytearray()
            async for part in reply.content.iter_chunked(1 << 16):
                data += part
                if len(data) > most:
                    raise self._down(f"answered with more than {most} bytes")
            if reply.status in _BUSY:
                raise self._down("is busy", _seconds(reply.headers.get("Retry-After", "")))
            if reply.status != 200:
                said = data[:_SHOWN].decode(errors="replace")
                raise self._down(f"answered with status {reply.status}: {said}")
            return bytes(data)

    def _read(self, data: bytes) -> dict[str, Mapping[str, Any]]:
        """The answers by key.  Raises ScorerDown."""
        try:
            found = json.loads(data)  # it takes NaN, which is a lie of one answer
            scores = found["scores"]
            return {one["key"]: one for one in scores if isinstance(one["key"], str)}
        except (ValueError, RecursionError) as error:
            raise self._down(f"answered with what is no JSON: {error}") from error
        except (KeyError, TypeError, IndexError) as error:
            shown = data[:_SHOWN].decode(errors="replace")
            raise self._down(f"answered {shown!r}, want scores with keys") from error

    def _score_of(self, found: Mapping[str, Any] | None, asked: ScoreRequest) -> Score | ScoreError:
        name, score = f"service {self._term.name}", None
        if found is not None and found.get("error"):
            why = str(found["error"])[:_SHOWN]
            return ScoreError(f"{name} said {why!r} about {asked.prompt.name}")
        if found is not None:
            try:
                score = score_of({key: found[key] for key in found if key not in ("key", "error")})
            except (BadReturn, TypeError, ValueError, OverflowError) as error:
                return ScoreError(f"{name} {error} for {asked.prompt.name}")
        return usable_score(name, score, asked)

    def _down(self, why: str, wait_s: float = 0.0) -> ScorerDown:
        key = self._term.api_key
        return ScorerDown(f"{self._term.url} {why.replace(key, HIDDEN) if key else why}", wait_s)


def _shown(asked: ScoreRequest) -> dict[str, Any]:
    prompt = asked.prompt
    return {
        "key": asked.key,
        "group": asked.group,
        "step_begin": asked.step_begin,
        "prompt": {"text": prompt.text, "answer": prompt.answer, "extra": prompt.extra},
        "turns": [asdict(turn) for turn in asked.episode.turns],
        "graph": list(asked.episode.graph),
    }


def _seconds(text: str) -> float:
    default, longest = _WAIT_S
    try:
        return min(longest, max(0.05, float(text)))
    except ValueError:
        return default
