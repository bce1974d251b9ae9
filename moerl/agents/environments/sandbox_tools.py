"""Tools that a policy may call in its episode: Python, a shell and files, in a sandbox of its own.

The answer to any call is text: the policy reads an error as the result, and no error is raised
in the run.  The answer is valid UTF-8 of a bounded number of bytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from moerl.agents.chat_messages import Json
from moerl.config.task_programs import ToolName
from moerl.sandbox.isolation import SandboxError
from moerl.sandbox.sandbox import Sandbox, SandboxPool, ToolOutput


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """Tools of an episode, and the limits of each call."""

    names: tuple[ToolName, ...] = ("python", "shell", "read_file", "write_file")
    timeout_s: float = 20.0
    output_bytes: int = 16384  # of the text that the policy gets; at least 256
    keeps_variables: bool = False  # python: one interpreter for all calls


@dataclass(frozen=True, slots=True)
class _Tool:
    description: str
    arguments: Mapping[str, str]  # name: description; all of them are text and required


_TOOLS: Mapping[str, _Tool] = {
    "python": _Tool(
        "Run Python code and get what it prints. Files stay, {variables}.",
        {"code": "Python code; print what you want to see"},
    ),
    "shell": _Tool(
        "Run a shell command in the workspace and get what it prints.",
        {"command": "a command for sh; there is no network"},
    ),
    "read_file": _Tool(
        "Get the contents of a file of the workspace.", {"path": "path below the workspace"}
    ),
    "write_file": _Tool(
        "Write a file of the workspace; what it held is replaced.",
        {"path": "path below the workspace", "content": "what the file shall hold"},
    ),
}
_ENDS = {
    "timeout": "ended after {timeout_s:g} s",
    "output": "ended: more output than {most} bytes",
    "memory": "ended: out of memory",
}


class SandboxTools:
    """The tools of one episode; its sandbox is taken from the pool at the first call."""

    def __init__(self, pool: SandboxPool, settings: ToolSettings | None = None) -> None:
        self._pool, self._settings = pool, settings or ToolSettings()
        self._sandbox: Sandbox | None = None
        self._lock = threading.Lock()  # one call of an episode at a time
        self._closed = False
        self.counts: Counter[str] = Counter()  # calls, and by how they ended

    @property
    def schemas(self) -> list[Json]:
        """As the `tools` of a chat request have them."""
        return [_schema(name, self._settings) for name in self._settings.names]

    def call(self, name: str, arguments: str | Mapping[str, object]) -> str:
        """The answer to a call; arguments: a JSON object, as text or parsed.  It blocks."""
        with self._lock:
            text = self._answer(name, arguments)
        return cut_text(text, self._settings.output_bytes)

    async def call_in(
        self, threads: Executor, name: str, arguments: str | Mapping[str, object]
    ) -> str:
        """The same from an event loop; the number of threads bounds the calls at once."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(threads, self.call, name, arguments)

    def close(self) -> None:
        """End the sandbox, also while a call runs in it."""
        self._closed = True
        if (sandbox := self._sandbox) is not None:
            self._pool.end(sandbox)

    def _answer(self, name: str, arguments: str | Mapping[str, object]) -> str:
        self.counts["calls"] += 1
        if name not in self._settings.names:
            return self._error(f"there is no tool {name!r}; use {', '.join(self._settings.names)}")
        wanted = _TOOLS[name].arguments
        given = _parsed(arguments, wanted)
        if given is None:
            names = ", ".join(f'"{key}": text' for key in wanted)
            return self._error(f"the arguments of {name} must be a JSON object {{{names}}}")
        try:
            sandbox = self._opened()
        except SandboxError as error:
            return self._error(f"the sandbox {error}")
        return self._told(name, self._act(sandbox, name, given), sandbox)

    def _opened(self) -> Sandbox:
        if self._closed:
            raise SandboxError("was closed")
        if self._sandbox is None:
            self._sandbox = self._pool.take()
            if self._closed:  # in the meantime
                self._pool.end(self._sandbox)
        return self._sandbox

    def _act(self, sandbox: Sandbox, name: str, given: Mapping[str, str]) -> ToolOutput:
        wait_s, most = self._settings.timeout_s, self._settings.output_bytes
        acts: dict[str, Callable[[], ToolOutput]] = {
            "python": lambda: sandbox.python(
                given["code"],
                timeout_s=wait_s,
                max_output=most,
                keeps=self._settings.keeps_variables,
            ),
            "shell": lambda: sandbox.run(
                ["/bin/sh", "-c", given["command"]], timeout_s=wait_s, max_output=most
            ),
            "read_file": lambda: sandbox.read(given["path"], timeout_s=wait_s, max_output=most),
            "write_file": lambda: sandbox.write(
                given["path"], given["content"].encode(errors="replace"), timeout_s=wait_s
            ),
        }
        return acts[name]()

    def _told(self, name: str, ran: ToolOutput, sandbox: Sandbox) -> str:
        """Text that the policy reads about a call."""
        self.counts[f"ended/{ran.why}"] += 1
        if ran.why == "lost":
            self._pool.end(sandbox)
            self._sandbox = None
            return self._error(
                f"the sandbox {sandbox.lost}, and its files are lost; the next call has a new one"
            )
        out, err = ran.out.decode(errors="replace"), ran.err.decode(errors="replace")
        if ran.why == "refused" or (ran.why == "exit" and ran.code and name.endswith("_file")):
            return self._error(err.strip())
        if name == "write_file":
            return "written" if ran.why == "exit" else self._error(self._end_of(ran))
        notes = [text for text in (self._end_of(ran), _lost_of(ran)) if text]
        self.counts["errors"] += bool(notes)
        # The policy must see the end, so it is kept out of the text that `cut_text` cuts.
        tail = "".join(f"\n[{note}]" for note in notes)
        room = self._settings.output_bytes - len(tail.encode())
        return cut_text(_joined(out, err), room) + tail if notes else _joined(out, err)

    def _end_of(self, ran: ToolOutput) -> str:
        if ran.why in _ENDS:
            limits = {
                "timeout_s": self._settings.timeout_s,
                "most": self._settings.output_bytes,
            }
            return _ENDS[ran.why].format(**limits)
        if ran.code < 0:
            return f"ended by signal {-ran.code}"
        return f"exit code {ran.code}" if ran.code else ""

    def _error(self, text: str) -> str:
        self.counts["errors"] += 1
        return f"error: {text}"


def cut_text(text: str, most: int) -> str:
    """Valid UTF-8 of at most `most` bytes; where it was cut, it says so."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    mark = f"\n[cut at {most} bytes]"
    return data[: max(0, most - len(mark))].decode(errors="ignore") + mark


def _joined(out: str, err: str) -> str:
    return out + ("\n" if out and err and not out.endswith("\n") else "") + err


def _lost_of(ran: ToolOutput) -> str:
    return "the interpreter has ended, and its variables are lost" if ran.lost_variables else ""


def _parsed(
    arguments: str | Mapping[str, object], wanted: Mapping[str, str]
) -> dict[str, str] | None:
    """The arguments by name, or None when the tool wants other arguments."""
    try:
        found = msgspec.json.decode(arguments) if isinstance(arguments, str) else dict(arguments)
        given = msgspec.convert(found, dict[str, str])
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None
    return given if given.keys() == wanted.keys() else None


def _schema(name: str, settings: ToolSettings) -> Json:
    tool = _TOOLS[name]
    variables = "and variables too" if settings.keeps_variables else "variables do not"
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool.description.replace("{variables}", variables),
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": text}
                    for key, text in tool.arguments.items()
                },
                "required": list(tool.arguments),
                "additionalProperties": False,
            },
        },
    }
