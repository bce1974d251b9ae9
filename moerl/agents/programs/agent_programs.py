"""Plays episodes of `task.agent.command`: a gateway, and external programs, one per episode or
workers that play many.
"""

from __future__ import annotations

import asyncio
import logging
import math
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from moerl.agents.agent_loop import (
    AgentRunner,
    EngineClock,
    EngineFar,
    EpisodeTable,
    PolicySettings,
    played_episode,
)
from moerl.agents.episode_types import FinishedEpisode
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.gateway.other_models import OtherModels
from moerl.agents.programs.agent_process import ProgramEnd, run_program
from moerl.agents.programs.agent_workers import AgentWorkers
from moerl.config.schema import TaskConfig
from moerl.controller.agent_episodes import ENDED, PlayedEpisode
from moerl.core.types import Prompt, SamplingParams

log = logging.getLogger(__name__)

_LOG_BYTES = 16 << 20  # of the log of all programs; one older file is kept
_MOST_IN_ENVIRONMENT = 100_000  # bytes; Linux takes 128 KiB in one variable
_SHOWN = 300  # characters of a program's last words in an error


class AgentPrograms(AgentRunner):
    """An `EpisodeRunner`."""

    def __init__(self, task: TaskConfig, settings: PolicySettings, log_file: Path) -> None:
        super().__init__(lambda engine: _ProgramTable(task, settings, engine, log_file))


class _ProgramTable(EpisodeTable):
    """Gateway and running programs."""

    def __init__(
        self, task: TaskConfig, settings: PolicySettings, engine: EngineFar, log_file: Path
    ) -> None:
        super().__init__(engine)
        self._task, self._log = task, _program_log(log_file)
        self._gateway = Gateway(settings.policy(engine), Endpoint(), OtherModels(task.agent.models))
        self._limits = settings.limits(task.agent)
        self._workers = AgentWorkers(task, self._log) if task.agent.workers else None

    async def start(self) -> None:
        await self._gateway.start()
        if self._workers is not None:
            self._workers.start()

    async def stop(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        await self._gateway.stop()
        for handler in list(self._log.handlers):
            handler.close()
            self._log.removeHandler(handler)

    async def play_one(
        self, name: str, prompt: Prompt, end: asyncio.Event, held_out: SamplingParams | None
    ) -> PlayedEpisode:
        now = asyncio.get_running_loop().time
        episode, begin = self._gateway.open_episode(name, self._limits, held_out), now()
        try:
            given = self._given(name, prompt) | {"held_out": held_out is not None}
            ended = await self._run(name, given, episode.key, end)
        except Exception as error:  # an error of one episode does not end the run
            log.exception("the episode %s failed", name)
            ended = ProgramEnd(-1, b"", repr(error).encode(errors="replace"), "failed")
        finally:
            done = await self._gateway.end_episode(name)
        self._log_end(name, ended)
        clock = self.engine.clocks.pop(name, EngineClock())
        seconds = {"engine_s": clock.seconds, "program_s": now() - begin - clock.seconds}
        return _played(self._task, prompt, done, ended, seconds)

    async def _run(
        self, name: str, given: dict[str, object], key: str, end: asyncio.Event
    ) -> ProgramEnd:
        """The program's part of an episode."""
        url = self._gateway.base_url(name)
        if self._workers is not None:
            return await self._workers.play(name, given | {"base_url": url, "api_key": key}, end)
        text = msgspec.json.encode(given)
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # its clients add the version
            "ANTHROPIC_API_KEY": key,
        }
        if len(text) <= _MOST_IN_ENVIRONMENT:
            variables["MOERL_PROMPT"] = text.decode()
        try:
            return await run_program(self._task, variables, text, end)
        except OSError as error:
            return ProgramEnd(-1, b"", f"it cannot be started: {error}".encode(), "exit")

    def _given(self, name: str, prompt: Prompt) -> dict[str, object]:
        """Input of the program; the answer is in it where the program gives the reward."""
        extra = dict(prompt.extra)
        messages = extra.pop("messages", None) or [{"role": "user", "content": prompt.text}]
        given: dict[str, object] = {"episode": name, "index": prompt.index, "prompt": prompt.text}
        given |= {"messages": messages, "extra": extra}
        judges = self._task.agent.reward == "agent"
        return given | {"answer": prompt.answer} if judges else given

    def _log_end(self, name: str, ended: ProgramEnd) -> None:
        printed = (ended.out + ended.err).decode(errors="replace").strip()
        self._log.info("%s: %s %d\n%s", name, ended.why, ended.code, printed)


def _program_log(file: Path) -> logging.Logger:
    found = logging.getLogger(f"{__name__}.{file.name}")
    found.propagate = False
    found.setLevel(logging.INFO)
    handler = RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    found.addHandler(handler)
    return found


def _played(
    task: TaskConfig,
    prompt: Prompt,
    done: FinishedEpisode,
    ended: ProgramEnd,
    seconds: dict[str, float],
) -> PlayedEpisode:
    reward = _reward(ended.out) if task.agent.reward == "agent" else None
    return played_episode(prompt, done, _failure(task, done, ended, reward), reward, seconds)


def _failure(
    task: TaskConfig, done: FinishedEpisode, ended: ProgramEnd, reward: float | None
) -> tuple[str, str]:
    """Why an episode cannot be trained; empty if it can."""
    if ended.why == "ended":
        return ENDED, "was ended"
    if ended.why == "timeout":
        return "timeout", f"took longer than task.agent.wall_s = {task.agent.wall_s:g}"
    if ended.why == "error":
        return "error", f"has answered with an error: {_last_line(ended.err)}"
    if ended.why == "failed":
        return "error", f"failed: {_last_line(ended.err)}"
    if ended.why == "lost":
        return "lost", f"was lost with its worker, which {_last_line(ended.err)}"
    if ended.code:
        return "exit", f"ended with exit code {ended.code}: {_last_line(ended.err)}"
    if not done.turns:
        return "no_turn", "asked for no turn that was finished"
    if task.agent.reward == "agent" and reward is None:
        return "no_reward", (
            'did not print {"reward": NUMBER} as its last line, but ' + repr(_last_line(ended.out))
        )
    return "", ""


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1][-_SHOWN:] if lines else ""


class _Reward(msgspec.Struct):
    reward: float


def _reward(printed: bytes) -> float | None:
    """Of the last line {"reward": x}; None where there is no finite number."""
    lines = printed.strip().splitlines()
    try:
        found = msgspec.json.decode(lines[-1] if lines else b"", type=_Reward).reward
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found if math.isfinite(found) else None
