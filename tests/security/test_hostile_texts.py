"""Texts of a hostile policy through the real scorer, whose reward runs each of them as Python.

A text has won when it touched a file, read a secret, reached a listener or another process, changed
the score of another text, or outlived its deadline.  The scorer must serve afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from moerl.config.schema import TaskConfig
from moerl.config.task_programs import TaskLimits
from moerl.config.task_tables import EVALUATING
from moerl.core.errors import ConfigError, ScoreError
from moerl.core.types import Prompt, Score
from moerl.scoring import ProcessScorer
from tests.helpers.episode_views import asked, view
from tests.helpers.patience import Patience, patience

ROOT = Path(__file__).parents[2]
MARK = "MOERL_HOSTILE_TEST"  # every process of a scorer here has it, with our pid
SECRETS = ("RAY_AUTH_TOKEN", "MOERL_TOKEN", "WANDB_API_KEY", "HF_TOKEN")
SECRET = "c0ffee" * 6
TIMEOUT_S = 1.0
ABSTRACT = f"moerl-hostile-texts-{os.getpid()}"  # a name of the whole machine

# Common to texts that look for the secret, or for a way to the outside.
_SEEK = """
import os, sys, ctypes, signal, socket, subprocess, time
secret = extra["secret"][::-1]
def holds(path):
    try:
        return secret.encode() in open(path, "rb").read(1 << 20)
    except OSError:
        return False
"""
_FORGED = "bytes.fromhex(extra['forged'])"

# Neither kind of isolation lets these win.
CONTAINED = {
    "environment": "won = any(extra['secret'][::-1] in v for v in os.environ.values())",
    "environment of the interpreter": "won = holds('/proc/self/environ')",
    "subprocess left behind": "subprocess.Popen(['/bin/sleep', '600'])",
    "subprocess in another session": (
        "subprocess.Popen(['/bin/sleep', '600'], start_new_session=True)"
    ),
    "daemon by double fork": (
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        time.sleep(600)\n"
        "    os._exit(0)\n"
        "os.wait()"
    ),
    "daemon, then a hang": (
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(600)"
    ),
    "processes that ignore signals": (
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0: time.sleep(600)\n"
        "time.sleep(600)"
    ),
    "fork bomb": ("while True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)"),
    "more processes than allowed": (
        "made = 0\n"
        "while made < 500:\n"
        "    try: pid = os.fork()\n"
        "    except OSError: break\n"
        "    if pid == 0: time.sleep(600)\n"
        "    made += 1\n"
        "won = made > 100"
    ),
    "endless loop": "while True: pass",
    "endless loop that catches everything": (
        "while True:\n    try: time.sleep(600)\n    except BaseException: pass"
    ),
    "endless output": "while True: print('x' * 100_000)",
    "endless errors": "while True: sys.stderr.write('x' * 100_000)",
    "memory": "won = len(bytearray(64 << 30)) > 0",
    "memory in pieces": "held = []\nwhile True: held.append(bytearray(256 << 20))",
    "huge file": (
        "folder = extra['free'] if os.path.isdir(extra['free']) else '.'\n"
        "open(folder + '/big', 'wb').write(bytes(80 << 20))\n"
        "won = True"
    ),
    "huge integer": "won = float(10 ** 10 ** 9 > 0 and 1)",
    "huge integer as score": "won = 10 ** 5000",
    "infinite score": "won = float('inf')",
    "score of another type": "won = 'one'",
    "score that lies about itself": (
        "class Lies(float):\n    def __float__(self): raise KeyboardInterrupt\nwon = Lies(1)"
    ),
    "recursion": "def again(): again()\nagain()",
    "recursion in C": "nest = ()\nfor _ in range(10 ** 6): nest = (nest,)\nrepr(nest)",
    "recursion without a limit": (
        "sys.setrecursionlimit(2 ** 31 - 1)\ndef again(n): return again(n + 1) + 1\nagain(0)"
    ),
    "a million steps": "won = {'steps': [(0, 1.0)] * 1_000_000}",
    "steps beyond the text": "won = {'steps': [(10 ** 9, 1.0)]}",
    "an error of 1 GiB": "raise ValueError('x' * (1 << 30))",
    "an error that raises": (
        "class Bad(Exception):\n    def __str__(self): raise SystemExit(1)\nraise Bad"
    ),
    "exit": "os._exit(0)",
    "exit by exception": "raise SystemExit(0)",
    "interrupt": "raise KeyboardInterrupt",
    "crash": "ctypes.string_at(1)",
    "abort": "os.abort()",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "closes all descriptors": "os.closerange(0, 4096)",
    "closes all and hangs": "os.closerange(0, 4096)\ntime.sleep(600)",
    "signals the group": "os.killpg(0, signal.SIGKILL)",
    "garbage on every descriptor": (
        "for fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 4096)\n    except OSError: pass"
    ),
    "length of 2^60 on every descriptor": (
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, (1 << 60).to_bytes(8, 'big'))\n"
        "    except OSError: pass\n"
        "time.sleep(600)"
    ),
}

# These need the box.
BOXED = {
    "touches a file": "open(extra['canary'], 'w').close()\nwon = True",
    "touches a file by a shell": "won = os.system('touch ' + extra['canary']) == 0",
    "reads the run's token": "won = holds(extra['token'])",
    "reads by a link": "os.symlink(extra['token'], 'link')\nwon = holds('link')",
    "changes this package": "open(extra['package'], 'a').write('')\nwon = True",
    "changes the interpreter": "open(sys.prefix + '/hostile.pth', 'w').close()\nwon = True",
    "reads passwords": "won = os.path.exists('/etc/passwd') or os.path.exists('/etc/shadow')",
    "reads the home": "won = bool([f for f in os.listdir('/root') if f != '.pyenv'])",
    "environments of all processes": (
        "won = any(holds(f'/proc/{p}/environ') for p in os.listdir('/proc') if p.isdigit())"
    ),
    "sees other processes": "won = sum(p.isdigit() for p in os.listdir('/proc')) > 8",
    "connects to a listener": (
        "socket.create_connection(('127.0.0.1', extra['port']), 1)\nwon = True"
    ),
    "connects to an abstract socket": (
        "s = socket.socket(socket.AF_UNIX)\ns.connect(chr(0) + extra['abstract'])\nwon = True"
    ),
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(600)",
    "stops its parent": "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)",
    "kills everything": "os.kill(-1, signal.SIGKILL)\ntime.sleep(600)",
    "kills the scorer": "os.kill(extra['scorer'], signal.SIGKILL)\nwon = True",
    "memory of its parent": "open(f'/proc/{os.getppid()}/mem', 'r+b')\nwon = True",
    "descriptors of its parent": (
        "won = any(os.open(f'/proc/{os.getppid()}/fd/{fd}', os.O_RDWR) for fd in range(3, 16))"
    ),
    "traces its parent": "won = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "becomes root": "os.setuid(0)\nwon = open('/proc/self/status').read().count('0000001ff') > 0",
    "mounts": "won = ctypes.CDLL(None).mount(b'x', b'/scratch', b'tmpfs', 0, None) == 0",
    "makes a device": "os.mknod('disk', 0o60666, os.makedev(8, 0))\nwon = True",
    "fills the scratch folder": (
        "for n in range(1000): open(f'f{n}', 'wb').write(bytes(8 << 20))\nwon = True"
    ),
    "starves its parent": (
        "import resource\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (0, 0))\n"
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))"
    ),
}

# Each leaves something behind that would give the next text a score of 1.
LASTING = {
    "replaces the worker's functions": (
        "import moerl.scoring.worker as w\n"
        "w.Worker._evaluate = lambda self, r: w.WorkerAnswer(r.serial, w.Score(1.0))"
    ),
    "replaces the reward": (
        "import tests.helpers.hostile_rewards as h\nh.run_text.__code__ = (lambda *_: 1.0).__code__"
    ),
    "answers for the next text": (
        "import moerl.scoring.worker as w\n"
        "import gc\n"
        "(now,) = [o.serial for o in gc.get_objects() if isinstance(o, w.WorkerRequest)]\n"
        "data = w.encode(w.WorkerAnswer(now + 1, w.Score(1.0)))\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, w.framed(data))\n"
        "    except OSError: pass"
    ),
    "leaves modules for the next text": (
        "for name in ('msgspec', 'math', 'numpy'):\n"
        "    for folder in ('.', *sys.path):\n"
        "        try: open(f'{folder}/{name}.py', 'w').write('raise SystemExit')\n"
        "        except OSError: pass"
    ),
}


@dataclass(frozen=True)
class Scene:
    """What texts try to reach, and whether one of them did."""

    folder: Path
    listener: socket.socket
    reached: list[object]

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    def prompt(self, **more: object) -> Prompt:
        extra: dict[str, Any] = {
            "secret": SECRET[::-1],  # turned round: the request itself does not hold it
            "canary": str(self.canary),
            "token": str(self.folder / "token"),
            "free": str(self.folder),
            "package": str(ROOT / "moerl" / "types.py"),
            "port": self.listener.getsockname()[1],
            "abstract": ABSTRACT,
            "scorer": os.getpid(),
        }
        return Prompt(7, (1,), "text", None, extra | more)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "token").write_text(SECRET)
    reached: list[object] = []
    tcp, abstract = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0{ABSTRACT}")
    abstract.listen()

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                reached.append(listener.accept()[0])

    for listener in (tcp, abstract):
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        for name in SECRETS:
            patch.setenv(name, SECRET)
        yield Scene(folder, tcp, reached)
    for listener in (tcp, abstract):
        listener.close()


def task(isolation: str, mark: str = MARK, **more: Any) -> TaskConfig:
    return TaskConfig(
        name="jsonl",
        reward="tests.helpers.hostile_rewards:run_text",
        isolation=isolation,  # type: ignore[arg-type]
        pass_environment=[mark],
        limits=TaskLimits(file_mb=32, memory_mb=2048),
        **more,
    )


@contextlib.contextmanager
def scorer_of(
    config: TaskConfig, workers: int = 1, timeout_s: float = TIMEOUT_S
) -> Iterator[ProcessScorer]:
    scorer = ProcessScorer(config, workers, timeout_s)
    try:
        yield scorer
    finally:
        scorer.close()
    assert not marked(), "processes outlive the scorer"


def score(scorer: ProcessScorer, prompt: Prompt, *texts: str) -> list[Score | ScoreError]:
    return asyncio.run(scorer.score(asked(prompt, [view(text) for text in texts])))


def marked() -> dict[int, list[str]]:
    """Processes with the mark in their environment, this one excepted."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == str(os.getpid()):
                found[process.pid] = process.cmdline()
    return found


def left_behind(workers: int) -> dict[int, list[str]]:
    """Marked processes but those of idle workers; two seconds for the kernel to remove them."""
    limit = Patience(2)
    while True:
        found = marked()
        own = ("reaper.py", "moerl.scoring.worker", "bwrap")
        others = {p: line for p, line in found.items() if not any(o in " ".join(line) for o in own)}
        most = 4 * workers  # reaper, two of bwrap, worker
        if (not others and len(found) <= most) or limit.over():
            return others or (found if len(found) > most else {})
        time.sleep(0.05)


def check_scene(scene: Scene) -> None:
    assert not scene.canary.exists()
    assert not scene.reached
    assert not (Path(sys.prefix) / "hostile.pth").exists()


def check_texts(scorer: ProcessScorer, scene: Scene, texts: dict[str, str], workers: int) -> None:
    results = score(scorer, scene.prompt(), *(_SEEK + text for text in texts.values()))
    won = {
        name: result
        for name, result in zip(texts, results, strict=True)
        if isinstance(result, Score) and result.reward != 0.0
    }
    assert not won, won
    assert not left_behind(workers)
    check_scene(scene)
    for number in (0.25, 0.5):
        check_service(scorer, scene.prompt(), number, workers)


def check_service(scorer: ProcessScorer, prompt: Prompt, number: float, workers: int) -> None:
    """Honest texts get their number; on a busy machine a worker's time may be over before."""
    limit = Patience(20)
    while True:
        results = score(scorer, prompt, *[f"won = {number}"] * workers)
        late = [r for r in results if isinstance(r, ScoreError) and "took longer" in str(r)]
        if not late or limit.over():
            break
    assert results == [Score(number)] * workers, "the scorer does not serve any more"


# Enough of them to see each mechanism of a worker process; the others run with --full.
_FEW = (
    *("environment", "environment of the interpreter", "subprocess in another session"),
    *("daemon by double fork", "daemon, then a hang", "more processes than allowed", "memory"),
    *("a million steps", "exit", "length of 2^60 on every descriptor"),
)


def test_a_box_holds_whatever_a_text_does(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    texts = CONTAINED | BOXED
    assert len(texts) >= 40
    with scorer_of(task("bwrap"), workers=3) as scorer:
        check_texts(scorer, scene, texts, workers=3)
    printed = capfd.readouterr()
    most = task("bwrap").limits.output_kb * 1024  # of each worker; few texts end theirs
    assert len(printed.err) + len(printed.out) < 12 * most


def test_a_worker_process_contains_mistakes(scene: Scene) -> None:
    with scorer_of(task("process"), workers=2) as scorer:
        check_texts(scorer, scene, {name: CONTAINED[name] for name in _FEW}, workers=2)


@pytest.mark.full
def test_a_worker_process_contains_all_that_needs_no_box(scene: Scene) -> None:
    with scorer_of(task("process"), workers=3) as scorer:
        check_texts(scorer, scene, CONTAINED, workers=3)


def test_control_without_isolation_the_texts_win(scene: Scene, tmp_path: Path) -> None:
    """The texts do what their names say: run in a plain process, they reach their aims."""
    prompt = scene.prompt(canary=str(tmp_path / "canary"), free=str(tmp_path))
    names = (
        *("environment", "environment of the interpreter", "more processes than allowed"),
        *("huge file", "touches a file", "touches a file by a shell", "reads the run's token"),
        *("reads passwords", "environments of all processes", "sees other processes"),
        *("connects to a listener", "connects to an abstract socket"),
    )
    code = (
        "import json, os, sys\n"
        "from tests.helpers.hostile_rewards import run_text\n"
        "extra, texts = json.load(sys.stdin)\n"
        "os.chdir(extra['free'])\n"
        "for text in texts: print(float(run_text('', None, text, extra)), flush=True)\n"
        "os.killpg(0, 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(
            [prompt.extra, [_SEEK + CONTAINED.get(n, BOXED.get(n, "")) for n in names]]
        ),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert dict(zip(names, done.stdout.split(), strict=True)) == dict.fromkeys(names, "1.0")
    assert (tmp_path / "canary").exists()
    limit = Patience(TIMEOUT_S)
    while len(scene.reached) < 2:  # both connections; a thread takes them
        assert not limit.over()
        time.sleep(0.01)
    while scene.reached:
        scene.reached.pop().close()


@pytest.mark.parametrize("name", LASTING)
def test_a_text_does_not_change_the_score_of_the_next(
    scene: Scene, boxed: ProcessScorer, name: str
) -> None:
    score(boxed, scene.prompt(), _SEEK + LASTING[name])
    assert score(boxed, scene.prompt(), "won = 0.25", "won = 0.5") == [Score(0.25), Score(0.5)]


def test_control_in_one_process_a_text_changes_the_score_of_the_next(scene: Scene) -> None:
    with scorer_of(task("process"), timeout_s=patience(3.0)) as scorer:
        score(scorer, scene.prompt(), _SEEK + LASTING["replaces the reward"])
        assert score(scorer, scene.prompt(), "won = 0.25") == [Score(1.0)]


def test_an_environment_cannot_reply_without_end(scene: Scene, boxed: ProcessScorer) -> None:
    for text in ("reply = 'x' * (1 << 30)", "reply = chr(0xd800)", "reply = b'x'"):
        with pytest.raises(ScoreError, match=r"environment tests\.helpers\.hostile_rewards"):
            asyncio.run(boxed.reply(scene.prompt(), [text]))
    assert asyncio.run(boxed.reply(scene.prompt(), ["reply = 'yes'"])) == "yes"


@pytest.fixture(scope="module")
def boxed(scene: Scene) -> Iterator[ProcessScorer]:
    environment = "tests.helpers.hostile_rewards:reply_text"
    config = task("bwrap", "", environment=environment, max_turns=2)
    scorer = ProcessScorer(config, 1, patience(3.0))
    yield scorer
    scorer.close()


def gym(dataset: str, isolation: str = "bwrap") -> TaskConfig:
    return TaskConfig(
        name="reasoning_gym",
        dataset=dataset,
        dataset_args={"size": 20},
        isolation=isolation,  # type: ignore[arg-type]
        pass_environment=[MARK],
    )


def gym_texts(scene: Scene) -> dict[str, str]:
    """Answers to a reasoning-gym question that its scorer evaluates."""
    touch = f"open({str(scene.canary)!r}, 'w')"
    texts = {
        "import": f"__import__('os').system('touch {scene.canary}')",
        "exec": f"exec({touch!r})",
        "hang": "__import__('time').sleep(600)",
        "daemon": "__import__('subprocess').Popen(['/bin/sleep', '600'], start_new_session=True)",
        "power tower": "9**9**9**9",
        "factorial": "factorial(10**9)",
    }
    return {name: f"<answer>{text}</answer>" for name, text in texts.items()}


def check_gym(scene: Scene, dataset: str, *names: str) -> None:
    """names: of the texts; none: all."""
    texts = gym_texts(scene)
    with scorer_of(gym(dataset), timeout_s=deadline_s()) as scorer:
        prompt = replace(scene.prompt(), extra={"seed": 1, "item": 0})
        score(scorer, prompt, *(texts[name] for name in names or texts))
        assert not left_behind(1)
        check_scene(scene)
        assert isinstance(score(scorer, prompt, "1")[0], Score)


@lru_cache
def deadline_s() -> float:
    """1.5 s, or twice what a worker takes here to import the data sets: it is killed at a deadline,
    and the next one must serve within another.
    """
    with scorer_of(gym("countdown"), timeout_s=60.0) as scorer:
        begin = time.monotonic()
        found = score(scorer, Prompt(7, (1,), "text", None, {"seed": 1, "item": 0}), "1")
        assert isinstance(found[0], Score), found
        return max(1.5, 2 * (time.monotonic() - begin))


def test_a_scorer_that_evaluates_answers_does_it_in_a_box(scene: Scene) -> None:
    check_gym(scene, "countdown", "import", "exec", "daemon", "power tower")


@pytest.mark.full
@pytest.mark.parametrize("dataset", sorted(EVALUATING - {"composite"}))
def test_each_scorer_that_evaluates_answers_does_it_in_a_box(scene: Scene, dataset: str) -> None:
    check_gym(scene, dataset)


@pytest.mark.full
def test_control_each_of_these_scorers_runs_the_answer(tmp_path: Path) -> None:
    names = sorted(EVALUATING - {"composite"})
    code = (
        "import sys\n"
        "from moerl.config.schema import TaskConfig\n"
        "from moerl.data.rewards import make_reward\n"
        "from moerl.core.types import Prompt\n"
        "from tests.helpers.episode_views import asked, view\n"
        "prompt = Prompt(0, (1,), '', None, {'seed': 1, 'item': 0})\n"
        "for name in sys.argv[2:]:\n"
        "    task = TaskConfig(name='reasoning_gym', dataset=name, dataset_args={'size': 20})\n"
        "    text = f\"__import__('os').system('touch {sys.argv[1]}/{name}')\"\n"
        "    make_reward(task)(prompt, view(f'<answer>{text}</answer>'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), *names], check=True, cwd=ROOT)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_such_a_data_set_is_refused_without_a_box() -> None:
    with pytest.raises(ConfigError, match=r"task\.isolation = 'process' .*use bwrap"):
        ProcessScorer(gym("countdown", "process"), 1, TIMEOUT_S)


@pytest.mark.parametrize("isolation", ["process", pytest.param("bwrap", marks=pytest.mark.full)])
def test_nothing_outlives_a_killed_scorer(scene: Scene, isolation: str) -> None:
    hang = _SEEK + "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(600)"
    code = (
        "import asyncio, sys\n"
        "from moerl.core.types import Prompt\n"
        "from tests.helpers.episode_views import asked, view\n"
        "from tests.security.test_hostile_texts import ProcessScorer, task\n"
        "if __name__ == '__main__':\n"
        "    scorer = ProcessScorer(task(sys.argv[1]), 1, 60.0)\n"
        "    prompt = Prompt(7, (1,), '', None, {'secret': ''})\n"
        "    ask = lambda text: scorer.score(asked(prompt, [view(text)]))\n"
        "    print(asyncio.run(ask('won = 1')), flush=True)\n"
        "    asyncio.run(ask(sys.argv[2]))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, isolation, hang], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        assert "reward=1.0" in parent.stdout.readline()
        limit = Patience(60)  # for the scorer to start
        most = {"process": 4, "bwrap": 7}[isolation]  # the scorer, its worker, and two of the text
        while len(marked()) < most:
            assert not limit.over(), marked()
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
    limit = Patience(5)
    while marked() and not limit.over():
        time.sleep(0.05)
    assert not marked()
