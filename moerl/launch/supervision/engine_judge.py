"""A model as scorer, by prompt, on an SGLang server of its own.

The judge samples nothing: its reward is the mean value of the choices under the probabilities with
which it would begin its answer with each of them (as in G-Eval, arXiv 2303.16634, section 3.2).  In
a whole group it compares each pair in both orders, because judges prefer a place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from moerl.config.reward_terms import RewardTerm
from moerl.config.schema import EngineConfig
from moerl.config.validate import read_section
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import AnswerError, ConfigError, EngineError, ScoreError, ScorerDown
from moerl.core.types import Score
from moerl.data.chat_template import ChatTemplate
from moerl.data.tasks import load_tokenizer
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer

log = logging.getLogger(__name__)
_FIELD = re.compile(r"\{(prompt|answer|response|step|turns|other)\}")


class EngineJudge:
    """The `Scorer` of one server.  It starts with the first question, and again when it is dead."""

    def __init__(self, term: RewardTerm, token: str, server_log: Path) -> None:
        """Raises ConfigError.  token: of the server."""
        self._term, self._token, self._log = term, token, server_log
        tokenizer = load_tokenizer(term.model)
        self._template = ChatTemplate(
            tokenizer, term.chat_template, term.template_arguments, "task.rewards"
        )
        self._values = first_tokens(term, tokenizer.encode)
        self._starting = asyncio.Lock()
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None
        self._asked = 0  # prompts

    async def score(self, asked: Sequence[ScoreRequest]) -> Sequence[Score | ScoreError]:
        """Answers, in order.  Raises ScorerDown."""
        if self._term.unit == "group":
            return await self._compare(asked)
        return [Score(value) for value in await self._ask([self._filled(one) for one in asked])]

    async def _compare(self, asked: Sequence[ScoreRequest]) -> list[Score | ScoreError]:
        """The mean over all others of the same group, and over both orders."""
        pairs = [(a, b) for a, b in permutations(asked, 2) if a.group == b.group]
        values = await self._ask([self._filled(a, b) for a, b in pairs])
        both = min(self._term.choices.values()) + max(self._term.choices.values())
        won: dict[str, list[float]] = {one.key: [] for one in asked}
        for (a, b), value in zip(pairs, values, strict=True):
            won[a.key].append(value)
            won[b.key].append(both - value)
        alone = both / 2  # a sibling without others
        return [
            Score(math.fsum(won[o.key]) / len(won[o.key]) if won[o.key] else alone) for o in asked
        ]

    def _filled(self, asked: ScoreRequest, other: ScoreRequest | None = None) -> list[int]:
        """Tokens of the prompt about a question.  Control tokens in the policy's text are text."""
        response = asked.episode.responses[-1]
        fields = {
            "prompt": asked.prompt.text,
            "answer": str(asked.prompt.answer),
            "response": response,
            "step": response[max(0, asked.step_begin) :],
            "turns": "\n".join(f"{turn.read}\n{turn.response}" for turn in asked.episode.turns),
            "other": other.episode.responses[-1] if other else "",
        }
        text = _FIELD.sub(lambda found: fields[found[1]], self._term.prompt)
        if not self._template.tokenizer.chat_template:
            return list(self._template.encode_plain(text, begin=True))
        return self._template.encode(self._template.render([{"role": "user", "content": text}]))[0]

    async def _ask(self, prompts: Sequence[list[int]]) -> list[float]:
        """The judge's value of each prompt.  Raises ScorerDown."""
        first, self._asked = self._asked, self._asked + len(prompts)
        count, found = len(prompts), dict[int, float]()
        body = {
            "rid": [f"judge-{first + place}" for place in range(count)],
            "input_ids": prompts,
            "sampling_params": [{"max_new_tokens": 1, "temperature": 0.0}] * count,
            "return_logprob": [True] * count,
            "logprob_start_len": -1,
            "token_ids_logprob": [list(self._values)] * count,
        }

        def took(place: int, reply: dict[str, Any]) -> None:
            found[place] = mean_value(self._values, reply)

        try:
            client = await self._served()
            await client.generate(body, took)
        except EngineError as error:
            raise ScorerDown(f"judge {self._term.name}: {error}") from error
        return [found[place] for place in range(count)]

    async def _served(self) -> EngineClient:
        """The client of a server that lives.  Raises EngineError."""
        async with self._starting:
            if self._server is not None and (cause := self._server.death()) is None:
                assert self._client is not None
                return self._client
            elif self._server is not None:
                log.warning("the judge's server is started again: %s", cause)
            await self.close()
            config, folder = judge_engine(self._term), Path(self._term.model)
            server = EngineServer(
                config, folder, routing=False, version="0.0", token=self._token, log=self._log
            )
            client = EngineClient(server.url)
            await server.start(client)
            self._server, self._client = server, client
            return client

    async def close(self) -> None:
        """End the server."""
        server, client = self._server, self._client
        self._server = self._client = None
        if client is not None:
            with contextlib.suppress(EngineError):
                await client.close()
        if server is not None:
            await server.stop()


def judge_engine(term: RewardTerm) -> EngineConfig:
    """Settings of the judge's engine.  Raises ConfigError."""
    return read_section(EngineConfig, term.engine, "task.rewards.engine.")


def first_tokens(term: RewardTerm, encode: Callable[..., list[int]]) -> dict[int, float]:
    """Values of the choices by the token with which each begins.  Raises ConfigError."""
    firsts = {text: encode(text, add_special_tokens=False)[:1] for text in term.choices}
    values = {ids[0]: term.choices[text] for text, ids in firsts.items() if ids}
    if len(values) < len(term.choices):
        allowed = "the model must begin each of them with another token"
        raise ConfigError("task.rewards.choices", term.choices, allowed)
    return values


def mean_value(values: Mapping[int, float], reply: Mapping[str, Any]) -> float:
    """Mean of the values, weighted by the probability of their tokens.  Raises AnswerError."""
    try:
        (told,) = reply["meta_info"]["output_token_ids_logprobs"]
        logprobs = {int(token): float(logprob) for logprob, token, *_ in told}
        highest = max(logprobs[token] for token in values)
        weights = {token: math.exp(logprobs[token] - highest) for token in values}
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(
            f"the engine gave no log-probabilities of the choices: {error}"
        ) from error
    total = math.fsum(weights.values())
    return math.fsum(weights[token] * value for token, value in values.items()) / total
