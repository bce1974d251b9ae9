"""The scorer's actor died during a call: that call fails, unless deaths end the run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.exceptions import ActorDiedError

from moerl.core.errors import EngineError, ScoreError
from moerl.core.types import Prompt
from moerl.launch.supervision.actors import RemoteScorer


async def dies(*_: object) -> NoReturn:
    raise ActorDiedError()


@pytest.mark.parametrize(("is_restarted", "error"), [(True, ScoreError), (False, EngineError)])
def test_a_dead_scorer_fails_its_calls(is_restarted: bool, error: type[Exception]) -> None:
    call = SimpleNamespace(remote=dies)
    actor: Any = SimpleNamespace(score=call, ask=call)
    scorer = RemoteScorer(actor, is_restarted=is_restarted)
    prompt = Prompt(0, (1,), "text", None, {})
    for asked in (scorer.score("", "reward", []), scorer.reply(prompt, [])):
        with pytest.raises(error, match="the process of the scorer died"):
            asyncio.run(asked)
