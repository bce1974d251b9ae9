"""Agent programs that look for secrets, other processes, the network and a reward of their choice.

Each program plays an episode over a real gateway first: a wall that keeps the gateway out, too, is
no use.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from moerl.config.schema import TaskConfig
from moerl.config.task_programs import TaskLimits
from moerl.core.errors import ConfigError
from moerl.core.types import Prompt, Score
from moerl.episodes.finished_episode import FinishedEpisode
from moerl.sandbox import limits
from moerl.sandbox.isolation import Isolation
from tests.helpers.agent_stubs import play, program_runner, task_of
from tests.helpers.chat_tokenizer import SIZE
from tests.helpers.left_processes import left_children
from tests.helpers.scripted_engine import ScriptedEngine

SECRET = "c0ffee" * 6
SYSTEM_PYTHON = Path("/usr/bin/python3")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="programs of root")
TURN = """
import json, os, sys, urllib.request
def turn(url, key, messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(
        url + "/chat/completions", body, {"Authorization": "Bearer " + key}
    )
    reply = json.load(urllib.request.urlopen(request))
    return reply["choices"][0]["message"]["content"]
"""
# Its reward is the number of things that it reached; they are named in the log.
ATTACK = (
    TURN
    + """
import socket, time
folder, port, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3][::-1]
task = json.load(sys.stdin)
turn(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != os.getpid()]
def opens(path):
    try:
        return open(path, "rb")
    except OSError:
        return None
def holds(path):
    try:
        return secret.encode() in open(path, "rb").read(1 << 20)
    except OSError:
        return False
def processes():
    made = 0
    try:
        while made < 100:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            made += 1
    except OSError:
        pass
    return made
def connects():
    try:
        socket.create_connection(("127.0.0.1", port), 2)
        return True
    except OSError:
        return False
rights = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
found = {
    "root": os.getuid() == 0,
    "capabilities": int(rights["CapEff"], 16) | int(rights["CapPrm"], 16) != 0,
    "a file of ours": holds(folder + "/token"),
    "a token of its own": any(secret in value for value in os.environ.values()),
    "environments of processes": any(holds(f"/proc/{pid}/environ") for pid in pids),
    "memory of processes": any(opens(f"/proc/{pid}/mem") for pid in sys.argv[4:]),
    "another listener": connects(),
    "processes": processes() > 60,
}
print(json.dumps([name for name, is_so in found.items() if is_so]))
print(json.dumps({"reward": sum(found.values()), "secret": task["secret"]}))
"""
)


class Prey:
    """A process and a listener of the run, and a file with mode 0600."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)  # the file has to protect itself
        self.folder, self.listener = folder, socket.create_server(("127.0.0.1", 0))
        (folder / "token").write_text(SECRET)
        (folder / "token").chmod(0o600)
        variables = dict(os.environ) | {"RAY_AUTH_TOKEN": SECRET}
        self.process = subprocess.Popen(["/bin/sleep", "600"], env=variables)

    @property
    def arguments(self) -> list[str]:
        """The secret is turned round: the command line of a program does not hold it."""
        port = self.listener.getsockname()[1]
        return [str(self.folder), str(port), SECRET[::-1], str(self.process.pid)]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()


@pytest.fixture
def prey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prey]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    made = Prey(tmp_path)
    yield made
    made.close()


def played(tmp_path: Path, task: TaskConfig, num_turns: int = 1) -> FinishedEpisode:
    async def body() -> FinishedEpisode:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(num_turns)])
        agents = program_runner(tmp_path, task)
        await agents.start()
        try:
            return await play(agents, engine, "8.0", Prompt(8, (1,), "p", None, {}))
        finally:
            await agents.close()

    return asyncio.run(body())


def reached(
    tmp_path: Path,
    prey: Prey,
    python: str,
    agent: Path | None = None,
    user: Literal["other", "same"] = "other",
    **changes: Any,
) -> list[str]:
    """What the attack reached; its turn has been played.  agent: a file that holds the attack."""
    bounds = TaskLimits(processes=24, user=user)
    attack = ("-c", ATTACK) if agent is None else (str(agent),)
    command = (python, "-I", *attack, *prey.arguments)
    episode = played(tmp_path, task_of(*command, limits=bounds, wall_s=60.0, **changes))
    assert not episode.failure, episode.detail
    assert len(episode.turns) == 1
    lines = (tmp_path / "agents.log").read_text().splitlines()
    found = next(json.loads(line) for line in lines if line.startswith("["))
    assert episode.own_score == Score(len(found))
    assert not [one for one in left_children() if one.pid != prey.process.pid]
    return list(found)


# --- isolation -----------------------------------------------------------------------------------
def test_a_program_in_a_box_reaches_the_gateway_and_nothing_else(
    tmp_path: Path, prey: Prey
) -> None:
    assert not reached(tmp_path, prey, "python", isolation="bwrap")


@needs_root
def test_a_program_of_root_is_another_user(
    tmp_path: Path, prey: Prey, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SYSTEM_PYTHON.exists():
        pytest.skip("needs a Python that every user can read")
    monkeypatch.setattr(limits, "_needed", lambda task: [])
    assert reached(tmp_path, prey, str(SYSTEM_PYTHON)) == ["another listener"]


@needs_root
def test_with_python_below_a_closed_home_it_is_another_user(tmp_path: Path, prey: Prey) -> None:
    """moerl's own Python, and an agent in a folder of root, through mounts of the program's own."""
    home = tmp_path / "home"
    (home / "agents").mkdir(parents=True)
    home.chmod(0o700)
    agent, neighbour = home / "agents/agent.py", home / "agents/other.py"
    agent.write_text(ATTACK)
    neighbour.write_text("")
    task = task_of("python", "-I", str(agent))
    isolation = limits.isolation_of(task)
    assert isolation.changes_user
    assert str(agent) in isolation.shown
    assert reached(tmp_path, prey, "python", agent) == ["another listener"]
    ls = ["/bin/sh", "-c", f"cat {agent} && ! cat {neighbour} && pwd && ! touch {home}/x"]
    done = isolation.run(ls, timeout_s=60, max_output=1 << 14)
    assert done.code == 0, done


@needs_root
def test_where_no_other_user_can_be_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence names the risk; bwrap, or the setting that takes the risk, is accepted."""
    (tmp_path / "closed").mkdir(mode=0o700)
    agent = tmp_path / "closed/agent.py"
    agent.write_text("")
    task = task_of("python", str(agent))
    assert limits.isolation_of(task).changes_user, "control"
    same = replace(task, limits=TaskLimits(user="same"))
    agent.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"limits\.user = 'other' .* mode of {agent} .*=same"):
        limits.isolation_of(task)
    agent.chmod(0o644)
    monkeypatch.setattr(limits, "_no_start", lambda _: "no mounts here")
    with pytest.raises(ConfigError, match=r"no mounts here, and .* keys of other runs"):
        limits.isolation_of(task)
    monkeypatch.setattr(limits, "fresh_uid", lambda: 0)
    with pytest.raises(ConfigError, match="may take no other user's id"):
        limits.isolation_of(task)
    assert not limits.isolation_of(same).changes_user
    assert limits.isolation_of(replace(task, isolation="bwrap")).wrapper


@needs_root
def test_where_it_stays_root_it_opens_keys_and_reads_no_process(tmp_path: Path, prey: Prey) -> None:
    """The control of the tests above: the setting takes the risk that its sentence names."""
    found = set(reached(tmp_path, prey, "python", user="same"))
    assert found >= {"root", "a file of ours", "another listener"}, "what the page says of it"
    assert not found & {"capabilities", "environments of processes", "memory of processes"}


def test_root_without_another_user_has_no_capabilities() -> None:
    """In a namespace whose user is root, so that any user can try it."""
    root = ("--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL")
    wrapper = (limits._find_bwrap(), *root, "--dev-bind", "/", "/", "--")
    isolation = Isolation(TaskLimits(), {}, wrapper=wrapper)
    done = isolation.run(["/bin/cat", "/proc/self/status"], timeout_s=20, max_output=1 << 14)
    lines = dict(line.split(":\t", 1) for line in done.out.decode().splitlines())
    assert lines["Uid"].split()[0] == "0"
    assert {int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapBnd")} == {0}


def test_the_same_program_reaches_everything_without_isolation(prey: Prey) -> None:
    """The control."""
    code = ATTACK.replace("turn(os", "print(os")  # there is no gateway
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code, *prey.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ) | {"OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b'{"messages": [], "secret": ""}')
        process.stdin.close()
        found = next(set(json.loads(line)) for line in process.stdout if line.startswith(b"["))
        os.killpg(process.pid, 9)
    rights = {"root", "capabilities"} if os.getuid() == 0 else set()
    assert found >= rights | {
        "a file of ours", "a token of its own", "environments of processes", "another listener",
        "processes",
    }  # fmt: skip


def test_a_worker_in_a_box_plays_many_episodes(tmp_path: Path) -> None:
    code = (
        TURN
        + """
for line in sys.stdin:
    asked = json.loads(line)
    turn(asked["base_url"], asked["api_key"], asked["messages"])
    own = {name: asked[name] for name in ("episode", "secret")}
    print(json.dumps(own | {"reward": os.getpid()}), flush=True)
"""
    )

    async def body() -> list[FinishedEpisode]:
        engine = ScriptedEngine()
        engine.say(*[[SIZE - 1] * 4 for _ in range(3)])
        task = task_of("python", "-c", code, workers=1, isolation="bwrap", wall_s=60.0)
        agents = program_runner(tmp_path, task)
        await agents.start()
        try:
            prompt = Prompt(8, (1,), "p", None, {})
            first = [play(agents, engine, f"8.{i}", prompt) for i in range(2)]
            return [*await asyncio.gather(*first), await play(agents, engine, "9.0", prompt)]
        finally:
            await agents.close()

    done = asyncio.run(body())
    assert [episode.failure for episode in done] == [""] * 3
    assert done[0].own_score == done[1].own_score == done[2].own_score, "one process"
    assert not left_children()


def test_a_client_of_openai_streams_in_a_box(tmp_path: Path) -> None:
    """And files that the command names are there, in a folder that the box does not show."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, sys, openai\n"
        "task = json.load(sys.stdin)\n"
        "assert os.listdir(os.path.dirname(sys.argv[0])) == ['agent.py']\n"
        "client = openai.OpenAI()\n"
        "asked = dict(model='policy', messages=task['messages'], stream=True)\n"
        "parts = [part for part in client.chat.completions.create(**asked)]\n"
        "print('parts', len(parts) > 1)\n"
        "os.kill(os.getpid(), 0)  # its own signals are not refused\n"
        "print(json.dumps({'reward': 0.5, 'secret': task['secret']}))\n"
    )
    task = task_of("python", str(program), isolation="bwrap", wall_s=60.0)
    episode = played(tmp_path, task)
    assert (episode.failure, episode.own_score) == ("", Score(0.5)), episode.detail
    assert "parts True" in (tmp_path / "agents.log").read_text()


@pytest.mark.parametrize(("code", "exits"), [("sys.exit(3)", 3), ("os.abort()", 128 + 6)])
def test_the_exit_code_of_a_boxed_program_is_passed_on(
    tmp_path: Path, code: str, exits: int
) -> None:
    task = task_of("python", "-c", f"import os, sys; {code}", isolation="bwrap", wall_s=60.0)
    assert f"exit code {exits}" in played(tmp_path, task, 0).detail


# --- rewards -------------------------------------------------------------------------------------
# It plays, and runs the code of the policy with its environment and its standard output.
RUNS_CODE = (
    TURN
    + """
import subprocess
task = json.load(sys.stdin)
turn(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], task["messages"])
subprocess.run([sys.executable, "-c", sys.argv[1]])
print(json.dumps({"reward": 0.25, "secret": task["secret"]}), flush=True)
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""
)
FORGES = """
import json, os
found = json.loads(os.environ["MOERL_PROMPT"])
texts = {"", "x", *(str(found.get("secret")),), *os.environ.values()}
for secret in texts:
    print(json.dumps({"reward": 1.0, "secret": secret}))
print('{"reward": 1.0}')
print('[' * 5000)
"""


def test_text_on_the_output_of_a_program_is_no_reward(tmp_path: Path) -> None:
    episode = played(tmp_path, task_of("python", "-c", RUNS_CODE, FORGES, wall_s=60.0))
    assert (episode.failure, episode.own_score) == ("", Score(0.25)), episode.detail


def test_without_the_secret_there_is_no_reward(tmp_path: Path) -> None:
    code = RUNS_CODE.replace('task["secret"]', '"other"')
    episode = played(tmp_path, task_of("python", "-c", code, FORGES, wall_s=60.0))
    assert (episode.failure, episode.own_score) == ("no_reward", None)


def test_text_on_the_output_of_a_worker_is_no_reward(tmp_path: Path) -> None:
    """It names an open episode; the worker is lost, and no reward is counted."""
    code = (
        TURN
        + """
for line in sys.stdin:
    asked = json.loads(line)
    turn(asked["base_url"], asked["api_key"], asked["messages"])
    print(json.dumps({"episode": asked["episode"], "secret": sys.argv[1], "reward": 1}), flush=True)
"""
    )
    task = task_of("python", "-c", code, "guess", workers=1, wall_s=60.0)
    episode = played(tmp_path, task)
    assert (episode.failure, episode.own_score) == ("lost", None)
    assert "the secret is not the episode's" in episode.detail
