"""Tools of an episode: what the policy is offered and reads, and the pool of boxes behind them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from moerl.agents.environments.sandbox_tools import SandboxTools, ToolSettings, cut_text
from moerl.sandbox import limits
from moerl.sandbox.isolation import SandboxError
from moerl.sandbox.limits import NoSandbox
from moerl.sandbox.sandbox import SandboxFactory, SandboxPool


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    pool = SandboxPool(SandboxFactory(), warm=1)
    yield pool
    pool.close()


@pytest.fixture
def tools(pool: SandboxPool) -> Iterator[SandboxTools]:
    tools = SandboxTools(pool)
    yield tools
    tools.close()


def test_schemas_say_what_a_call_takes(tools: SandboxTools, pool: SandboxPool) -> None:
    described = [schema["function"] for schema in tools.schemas]
    assert all(isinstance(one, dict) for one in described)
    found = {one["name"]: one["parameters"] for one in described if isinstance(one, dict)}
    assert list(found) == ["python", "shell", "read_file", "write_file"]
    jsonschema.validate({"code": "1"}, found["python"])
    for wrong in ({}, {"code": 1}, {"code": "1", "more": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, found["python"])
        assert tools.call("python", wrong).startswith("error: the arguments of python must be")
    few = SandboxTools(pool, ToolSettings(names=("python",)))
    assert len(few.schemas) == 1
    assert few.call("shell", {"command": "id"}) == "error: there is no tool 'shell'; use python"


def test_files_stay_and_variables_do_not(tools: SandboxTools) -> None:
    written = {"path": "notes/own.py", "content": "value = 'ae \u00e4 \U0001f600'\n"}
    assert tools.call("write_file", written) == "written"
    code = "from notes.own import value\nprint(value)\nx = 1"
    assert tools.call("python", {"code": code}) == "ae \u00e4 \U0001f600\n"
    assert "NameError: name 'x' is not defined" in tools.call("python", '{"code": "print(x)"}')
    assert tools.call("shell", {"command": "ls notes; cat"}).split() == ["__pycache__", "own.py"]
    assert tools.call("read_file", {"path": "notes/own.py"}) == written["content"]


def test_variables_stay_where_the_setting_says_so(pool: SandboxPool) -> None:
    tools = SandboxTools(pool, ToolSettings(keeps_variables=True, timeout_s=1.0))
    assert tools.call("python", {"code": "x = 20"}) == ""
    assert tools.call("python", {"code": "print(x + 1)"}) == "21\n"
    lost = "its variables are lost"
    assert lost in tools.call("python", {"code": "import time; time.sleep(60)"})
    assert "NameError" in tools.call("python", {"code": "print(x)"})
    assert tools.call("python", {"code": "exit(3)"}) == "\n[exit code 3]"
    tools.close()


@pytest.mark.parametrize(
    ("name", "argument", "says"),
    [
        ("python", "import os; os.kill(os.getpid(), 9)", "\n[ended by signal 9]"),
        ("python", "import time; time.sleep(60)", "\n[ended after 1 s]"),
        ("python", "while True: print('x' * 999)", "[ended: more output than 256 bytes]"),
        ("shell", "echo out; echo err >&2; exit 2", "out\nerr\n\n[exit code 2]"),
        ("shell", "printf '\\377\\376'", "\ufffd\ufffd"),
        ("shell", "x" * 200_000, "Argument list too long: /bin/sh"),
        ("read_file", "absent", "error: No such file or directory: "),
        ("read_file", "../etc/ld.so.cache", "error: Not in the workspace /scratch: ../etc/ld"),
    ],
)
def test_what_goes_wrong_is_text(pool: SandboxPool, name: str, argument: str, says: str) -> None:
    tools = SandboxTools(pool, ToolSettings(timeout_s=1.0, output_bytes=256))
    key = {"python": "code", "shell": "command", "read_file": "path"}[name]
    text = tools.call(name, {key: argument})
    assert says in text
    assert len(text.encode()) <= 256
    tools.close()


@pytest.mark.parametrize(
    "arguments", ["", "{", "[]", '"code"', '{"code": null}', "[" * 100_000, '{"code": "\\ud800"}']
)
def test_arguments_that_are_none(tools: SandboxTools, arguments: str) -> None:
    assert tools.call("python", arguments).startswith("error: ")
    assert tools.counts["errors"] == tools.counts["calls"] == 1


def test_surrogates_in_parsed_arguments_do_no_harm(tools: SandboxTools) -> None:
    assert tools.call("write_file", {"path": "\ud800", "content": "x"}).startswith("error: ")
    assert tools.call("write_file", {"path": "x", "content": "\ud800"}) == "written"
    tools.call("python", {"code": "'\ud800'"}).encode()


def test_texts_are_cut_between_characters() -> None:
    for most in range(256, 264):
        text = cut_text("\U0001f600" * 100, most)
        assert len(text.encode()) <= most
        assert text.endswith(f"[cut at {most} bytes]")
    assert cut_text("short", 256) == "short"


def test_an_episode_whose_box_ended_gets_another(pool: SandboxPool) -> None:
    tools = SandboxTools(pool)
    assert tools.call("shell", {"command": "echo mine > file"}) == ""
    assert tools._sandbox is not None
    tools._sandbox._program._kept.process.kill()  # the keeper, with which the box ends
    texts = []
    deadline = time.monotonic() + 20
    while not texts or (texts[-1] == "mine\n" and time.monotonic() < deadline):
        texts.append(tools.call("shell", {"command": "cat file"}))
    assert "its files are lost; the next call has a new one" in texts[-1]
    assert "No such file" in tools.call("shell", {"command": "cat file"})
    tools.close()
    assert tools.call("shell", {"command": "true"}) == "error: the sandbox was closed"


def test_each_episode_has_a_box_of_its_own_and_they_do_not_wait_for_each_other(
    pool: SandboxPool,
) -> None:
    episodes = [SandboxTools(pool, ToolSettings(timeout_s=30.0)) for _ in range(3)]

    async def all_at_once() -> list[str]:
        slow = {"command": "ls; echo x > mine; id -u >> /dev/null; sleep 1; cat mine"}
        with ThreadPoolExecutor(3) as threads:
            calls = [one.call_in(threads, "shell", slow) for one in episodes]
            return await asyncio.gather(*calls)

    assert asyncio.run(all_at_once()) == ["x\n"] * 3
    boxes = [one._sandbox for one in episodes]
    assert len({id(box) for box in boxes}) == 3
    for one in episodes:
        one.close()
    assert all(box is not None and box.lost == "was closed" for box in boxes)
    assert pool.take() not in boxes


def test_a_pool_has_boxes_that_have_started(pool: SandboxPool) -> None:
    deadline = time.monotonic() + 60
    while not pool.waiting and time.monotonic() < deadline:
        time.sleep(0.02)
    waiting = pool._ready[0]
    assert pool.take() is waiting


def test_a_closed_pool_leaves_nothing(running_under: Callable[[str], int], tmp_path: Path) -> None:
    pool = SandboxPool(SandboxFactory(read_paths=[str(tmp_path)]), warm=2)
    box = pool.take()
    assert running_under(str(tmp_path))
    pool.close()
    assert not running_under(str(tmp_path))
    assert box.lost
    with pytest.raises(SandboxError, match="was closed"):
        pool.take()


@pytest.fixture
def running_under() -> Callable[[str], int]:
    """Number of processes with a text in their command line."""

    def count(text: str) -> int:
        found = 0
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += text.encode() in file.read_bytes()
            except OSError:
                continue
        return found

    return count


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("echo 'no new namespace' >&2; exit 1", "refuses it: no new namespace"),
        ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "has: network|may write"),
    ],
)
def test_without_a_sandbox_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(limits, "_find_bwrap", lambda: str(tmp_path / "bwrap"))
    with pytest.raises(NoSandbox, match=says):
        SandboxFactory()


def test_a_refusal_names_what_the_kernel_has_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(limits, "_find_bwrap", lambda: str(tmp_path / "bwrap"))
    monkeypatch.setattr(limits, "_KERNEL", tmp_path)
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "max_user_namespaces").write_text("0\n")
    with pytest.raises(NoSandbox, match=r"the kernel has user\.max_user_namespaces = 0"):
        SandboxFactory()
    with pytest.raises(NoSandbox, match="read_paths has /nowhere"):
        SandboxFactory(read_paths=["/nowhere"])
