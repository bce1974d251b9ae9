"""Plays episodes of `task.agent`: a gateway, and external programs, one per episode or workers that
play many; remote workers are started by others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from dataclasses import replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec

from moerl.agents.agent_loop import AgentRunner, EpisodeTable
from moerl.agents.chat_messages import first_messages
from moerl.agents.chat_turns import ChatTurns
from moerl.agents.cross_loop_episode import CrossLoopEpisode, called_here
from moerl.agents.episode_types import Policy
from moerl.agents.gateway.gateway import Endpoint, Gateway
from moerl.agents.gateway.other_models import OtherModels
from moerl.agents.programs.agent_process import BOX_PORT, ProgramEnd, run_program
from moerl.agents.programs.agent_workers import AgentWorkers
from moerl.agents.programs.remote_workers import RemoteWorkers
from moerl.config.schema import TaskConfig
from moerl.core.types import Prompt, Score, reward_problem
from moerl.episodes.finished_episode import ENDED
from moerl.episodes.open_episode import Outcome
from moerl.sandbox.isolation import Isolation
from moerl.sandbox.limits import isolation_of

log = logging.getLogger(__name__)

_LOG_BYTES = 16 << 20  # of the log of all programs; one older file is kept
_MOST_IN_ENVIRONMENT = 100_000  # bytes; Linux takes 128 KiB in one variable
_SHOWN = 300  # characters of a program's last words in an error


class AgentPrograms(AgentRunner):
    """An `EpisodeRunner`."""

    def __init__(
        self,
        task: TaskConfig,
        policy: Policy,
        log_file: Path,
        remote: RemoteWorkers | None = None,
        sockets: Path | None = None,
        *,
        awaits_retries: bool = False,
    ) -> None:
        """Start nothing.  remote: plays the episodes of a task with an agent.port.

        sockets: folder of this user alone, with a short path, for the gateway of sandboxes.
        awaits_retries: engines take turns with a trainer, which may take longer than a timeout.
        """
        endpoint = Endpoint(port=task.agent.port, awaits_retries=awaits_retries)
        super().__init__(_ProgramTable(task, policy, log_file, remote, sockets, endpoint))


class _ProgramTable(EpisodeTable):
    """Gateway and running programs."""

    def __init__(
        self,
        task: TaskConfig,
        policy: Policy,
        log_file: Path,
        remote: RemoteWorkers | None,
        sockets: Path | None,
        endpoint: Endpoint,
    ) -> None:
        super().__init__()
        self._task, self._log, self._remote = task, _program_log(log_file), remote
        routes = remote.routes if remote is not None else ()
        if task.agent.command and task.isolation == "bwrap":
            socket = f"{sockets}/{log_file.stem}.sock"
            endpoint = replace(endpoint, port=BOX_PORT, socket=socket)
        self._door = endpoint.socket
        self._gateway = Gateway(
            policy, endpoint, OtherModels(task.agent.models, task.roles), routes
        )
        self._limits = policy.limits(task)
        self._isolation: Isolation | None = None
        self._workers = AgentWorkers(task, self._log) if task.agent.workers else None

    async def start(self) -> None:
        if self._remote is not None:
            self._remote.start()
        await self._gateway.start()
        if self._task.agent.command:
            self._isolation = isolation_of(self._task, self._door)
        if self._workers is not None and self._isolation is not None:
            self._workers.start(self._isolation)

    async def stop(self) -> None:
        if self._workers is not None:
            await self._workers.close()
        if self._remote is not None:
            self._remote.close()
        await self._gateway.stop()
        for handler in list(self._log.handlers):
            handler.close()
            self._log.removeHandler(handler)

    async def play_one(self, episode: CrossLoopEpisode, end: asyncio.Event) -> Outcome:
        name, spec = episode.name, episode.spec
        turns = self._gateway.open_episode(episode, self._limits)
        # Printed with the reward: the text of a policy, printed as well, does not have it.  A
        # remote worker submits its reward with its key.
        secret = "" if self._remote is not None else secrets.token_urlsafe(16)
        try:
            given = self._given(name, spec.prompt) | {"held_out": spec.held_out}
            ended = await self._run(name, given, secret, turns, end)
        except Exception as error:  # an error of one episode does not end the run
            log.exception("the episode %s failed", name)
            ended = ProgramEnd(-1, b"", repr(error).encode(errors="replace"), "failed")
        finally:
            await self._gateway.end_episode(name)
        self._log_end(name, ended)
        own = _own_score(ended.out, secret) if self._task.brings_reward else None
        has_turns = bool(turns.forest.turns)
        failure = _failure(self._task, ended, own, has_turns=has_turns)
        outcome = turns.outcome(failure, own, {})
        if self._remote is None:
            return outcome
        return replace(outcome, on_retired=called_here(partial(self._remote.settled, name)))

    async def _run(
        self,
        name: str,
        given: dict[str, object],
        secret: str,
        turns: ChatTurns,
        end: asyncio.Event,
    ) -> ProgramEnd:
        """The program's part of an episode."""
        url, key = self._gateway.base_url(name), turns.key
        line = given | {"base_url": url, "api_key": key}
        if self._remote is not None:
            return await self._remote.play(name, line, end, turns)
        if self._workers is not None:
            return await self._workers.play(name, line | {"secret": secret}, end)
        text = msgspec.json.encode(given)
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),  # its clients add the version
            "ANTHROPIC_API_KEY": key,
        }
        if len(text) <= _MOST_IN_ENVIRONMENT:
            variables["MOERL_PROMPT"] = text.decode()
        assert self._isolation is not None, "start comes first"
        # Not in the environment, which the programs that it starts inherit.
        text = msgspec.json.encode(given | {"secret": secret})
        try:
            return await run_program(self._task, self._isolation, variables, text, end)
        except OSError as error:
            return ProgramEnd(-1, b"", f"it cannot be started: {error}".encode(), "exit")

    def _given(self, name: str, prompt: Prompt) -> dict[str, object]:
        """Input of the program; the answer is in it where the program gives the reward."""
        messages, extra = first_messages(prompt)
        given: dict[str, object] = {"episode": name, "index": prompt.index, "prompt": prompt.text}
        given |= {"messages": messages, "extra": extra}
        return given | {"answer": prompt.answer} if self._task.brings_reward else given

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


def _failure(
    task: TaskConfig, ended: ProgramEnd, own: Score | None, *, has_turns: bool
) -> tuple[str, str]:
    """Why an episode cannot be trained; empty if it can."""
    if ended.why == "ended":
        return ENDED, "was ended"
    if ended.why == "timeout":
        return "timeout", f"took longer than task.wall_s = {task.wall_limit_s:g}"
    if ended.why == "error":
        return "error", f"has answered with an error: {_last_line(ended.err)}"
    if ended.why == "failed":
        return "error", f"failed: {_last_line(ended.err)}"
    if ended.why == "lost":
        return "lost", f"was lost with its worker, which {_last_line(ended.err)}"
    if ended.code:
        return "exit", f"ended with exit code {ended.code}: {_last_line(ended.err)}"
    if not has_turns:
        return "no_turn", "asked for no turn that was finished"
    if task.brings_reward and own is None:
        return "no_reward", (
            'did not print {"reward": NUMBER, "secret": SECRET} with the secret of its input; its '
            f"last line is {_last_line(ended.out)!r}"
        )
    return "", ""


def _last_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines()
    return lines[-1][-_SHOWN:] if lines else ""


class _Reward(msgspec.Struct):
    reward: float
    secret: str = ""
    roles: dict[str, float] = {}


def _own_score(printed: bytes, secret: str) -> Score | None:
    """Of the last line {"reward": x, "secret": ...}; None where there is no finite number."""
    for line in reversed(printed.splitlines()):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = msgspec.json.decode(line, type=_Reward)
            if hmac.compare_digest(found.secret.encode(), secret.encode()):
                numbers = (found.reward, *found.roles.values())
                is_wrong = any(map(reward_problem, numbers))
                return None if is_wrong else Score(found.reward, roles=found.roles)
    return None
