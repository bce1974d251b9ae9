"""Workers that moerl does not start: they ask for episodes over HTTP, and submit rewards.

    POST /workers/register {"name"}, with the token of the run     -> {"key"}
    POST /workers/task, with the key                               -> an episode; 204: none yet
    POST /workers/submit {"episode", "reward"} or {.., "error"}    -> {"episode", "accepted"}
    GET  /workers/status?episode=NAME                              -> {"episode", "state"}

An episode has the form of `moerl.agents.programs.agent_workers`, and a worker plays it as every
program does, through the gateway.  So the run's engines record its tokens, versions, routes and
masks, and its group follows the usual rules.

An episode is submitted once, by its name: a repeated submit gets the same answer, and the first
reward counts.  Accepted names are in a file, for the next controller, which plays groups that were
not admitted again, under new names.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from moerl.agents.chat_turns import ChatTurns
from moerl.agents.gateway.api_errors import ApiError
from moerl.agents.gateway.gateway import given_key, json_answer
from moerl.agents.programs.agent_process import ProgramEnd
from moerl.config.schema import TaskConfig
from moerl.core.atomic import atomic_write
from moerl.core.types import reward_problem

T = TypeVar("T")
_POLL_S = 30.0  # a request for an episode is answered after this time
_REMEMBERED = 10_000  # episodes that have ended
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_SUBMIT = '{"episode": NAME, "reward": NUMBER} or {"episode": NAME, "error": TEXT}'


class _Register(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Submit(msgspec.Struct, forbid_unknown_fields=True):
    episode: str
    reward: float | None = None
    roles: dict[str, float] = {}
    error: str | None = None


class _Ended(msgspec.Struct):
    """An episode that is not open any more; a line of the file if it was submitted."""

    episode: str
    worker: str
    state: str  # submitted, admitted, dropped, played_again; ended: it was not submitted
    accepted: bool = True


@dataclass(slots=True, eq=False)
class _Open:
    given: Mapping[str, object]
    turns: ChatTurns
    end: asyncio.Future[ProgramEnd]
    worker: str = ""  # that plays it

    def finish(self, why: ProgramEnd) -> None:
        if not self.end.done():
            self.end.set_result(why)


class RemoteWorkers:
    """Used from one event loop."""

    def __init__(self, task: TaskConfig, token_file: Path, file: Path) -> None:
        """Write the run's token to `token_file`, and read names of submitted episodes from `file`.

        The file has the journal's lifetime: names of episodes are new as long as the journal is
        kept.
        """
        self._task, self._token_file, self._file, self._token = task, token_file, file, ""
        self._open: dict[str, _Open] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._queue: asyncio.Queue[str] = asyncio.Queue()  # of open episodes; empty: it is closed
        self.routes = [
            web.post("/workers/register", self._register),
            web.post("/workers/task", self._take),
            web.post("/workers/submit", self._submit),
            web.get("/workers/status", self._status),
        ]

    def start(self) -> None:
        if not self._token_file.exists():
            atomic_write(self._token_file, secrets.token_urlsafe(24), mode=0o600)
        self._token = self._token_file.read_text()
        for ended in self._read():
            if ended.state == "submitted":  # its group was not admitted by an earlier controller
                ended.state = "played_again"
            self._remember(ended)
        kept = (ended for ended in self._ended.values() if ended.accepted)
        lines = b"".join(msgspec.json.encode(ended) + b"\n" for ended in kept)
        atomic_write(self._file, lines, mode=0o600)

    async def play(
        self, name: str, given: Mapping[str, object], end: asyncio.Event, turns: ChatTurns
    ) -> ProgramEnd:
        """One episode, in the worker that asks for it.

        It ends when its worker has submitted it, when it has had the episode for task.wall_s, or
        when `end` is set.
        """
        self._ended.pop(name, None)
        one = self._open[name] = _Open(given, turns, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(name)
        ending = asyncio.ensure_future(end.wait())
        ending.add_done_callback(lambda _: one.finish(ProgramEnd(-1, b"", b"", "ended")))
        try:
            return await one.end
        finally:
            ending.cancel()
            del self._open[name]
            if name not in self._ended:
                self._remember(_Ended(name, one.worker, "ended", accepted=False))

    def settled(self, name: str, how: str) -> None:
        """The fate of an episode that has ended: admitted, dropped, played_again."""
        if ended := self._ended.get(name):
            ended.state = how
            if ended.accepted:
                with contextlib.suppress(OSError):  # the file says that it is played again
                    self._write(ended)

    def close(self) -> None:
        """Answer the requests that wait for an episode."""
        self._queue.put_nowait("")

    # --- routes -----------------------------------------------------------------------------------
    async def _register(self, request: web.Request) -> web.Response:
        """A worker begins, or begins again: then the episodes that it had are lost."""
        _check_key(given_key(request), self._token)
        name = (await _read_body(request, _Register, '{"name": NAME}')).name
        if not _NAMES.fullmatch(name):
            allowed = "up to 64 letters, digits, `_` and `-`, the first of them no mark"
            raise _invalid(f"name: {name[:80]!r}; allowed are {allowed}")
        for one in self._open.values():
            if one.worker == name:
                one.finish(ProgramEnd(-1, b"", b"has registered again", "lost"))
        return json_answer({"key": f"{name}:{self._digest(name)}"})

    async def _take(self, request: web.Request) -> web.Response:
        worker = self._worker(request)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                while name := await self._queue.get():
                    one = self._open.get(name)
                    if one is not None and not one.end.done():
                        self._begin(one, worker)
                        return json_answer(one.given)
                self._queue.put_nowait("")  # for the next waiting worker
        return web.Response(status=204)

    def _begin(self, one: _Open, worker: str) -> None:
        one.worker = worker
        one.turns.begin()
        timeout = ProgramEnd(-1, b"", b"", "timeout")
        timer = asyncio.get_running_loop().call_later(self._task.wall_limit_s, one.finish, timeout)
        one.end.add_done_callback(lambda _: timer.cancel())

    async def _submit(self, request: web.Request) -> web.Response:
        worker = self._worker(request)
        given = await _read_body(request, _Submit, _SUBMIT)
        name = given.episode
        known = self._known(name, worker)
        if isinstance(known, _Open) and not known.end.done():
            self._check(given, known)
            ended = _Ended(name, worker, "submitted")
            self._write(ended)
            self._remember(ended)
            if given.error is None:
                known.finish(ProgramEnd(0, msgspec.json.encode(given), b"", "exit"))
            else:
                known.finish(ProgramEnd(1, b"", given.error.encode(), "error"))
        elif isinstance(known, _Open) or not known.accepted:
            state = "ended" if isinstance(known, _Open) else known.state
            message = f"episode: {name!r} was not submitted and is {state}; ask for another one"
            raise ApiError(410, "episode_ended", message, retry=False)
        return json_answer({"episode": name, "accepted": True})

    def _check(self, given: _Submit, one: _Open) -> None:
        """Raises ApiError; then the episode stays open."""
        if given.error is not None:
            return
        if not one.turns.forest.turns:
            raise _invalid(f"episode: {given.episode!r} has no finished turn of the gateway")
        reward, task = given.reward, self._task
        if not task.brings_reward and reward is not None:
            raise _invalid(f"reward: {reward:g}; allowed is none, {task.reward!r} scores episodes")
        wrong = [
            one for one in (reward, *given.roles.values()) if one is None or reward_problem(one)
        ]
        if task.brings_reward and wrong:
            raise _invalid(f"reward: {wrong[0]}; allowed is a finite number")

    async def _status(self, request: web.Request) -> web.Response:
        name = request.query.get("episode", "")
        known = self._known(name, self._worker(request))
        state = "open" if isinstance(known, _Open) else known.state
        return json_answer({"episode": name, "state": state})

    # --- plumbing ---------------------------------------------------------------------------------
    def _worker(self, request: web.Request) -> str:
        """The worker whose key a request has, of an earlier controller too.  Raises ApiError."""
        key = given_key(request)
        name = key.rpartition(":")[0]
        _check_key(key, f"{name}:{self._digest(name)}")
        return name

    def _digest(self, name: str) -> str:
        return hmac.digest(self._token.encode(), name.encode(errors="replace"), "sha256").hex()

    def _known(self, name: str, worker: str) -> _Open | _Ended:
        """Raises ApiError for an episode that this worker never had."""
        known = self._ended.get(name) or self._open.get(name)
        if known is None or known.worker != worker:
            message = f"episode: {name[:80]!r}; allowed are the episodes of this worker, {worker}"
            raise ApiError(404, "not_found", message, retry=False)
        return known

    def _read(self) -> list[_Ended]:
        found: list[_Ended] = []
        for line in self._file.read_bytes().splitlines() if self._file.exists() else ():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # a torn tail
                found.append(msgspec.json.decode(line, type=_Ended))
        return found

    def _write(self, ended: _Ended) -> None:
        """Raises OSError."""
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(ended) + b"\n")

    def _remember(self, ended: _Ended) -> None:
        self._ended[ended.episode] = ended
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


async def _read_body(request: web.Request, form: type[T], allowed: str) -> T:
    """Call after the key is checked.  Raises ApiError."""
    try:
        return msgspec.json.decode(await request.read(), type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(f"the body cannot be read: {error}; allowed is {allowed}") from error


def _check_key(given: str, key: str) -> None:
    """Raises ApiError."""
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode()):
        message = "Authorization: this is neither the token of the run nor the key of a worker"
        raise ApiError(401, "invalid_api_key", message, retry=False)


def _invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_request", message, retry=False)
