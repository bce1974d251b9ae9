"""Start, watch and end real `moerl train` runs from a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from moerl.config.load import load_saved
from moerl.core.serialization import decode_value
from moerl.core.types import EpisodeGroup
from moerl.launch.run_context import RunContext
from moerl.launch.train import outside_folder
from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import Patience, patience

START_S = 600.0  # a machine that many share
_HOOK = Path(__file__).parent / "trained_records"
TWO_STEPS = [
    "run.steps=2",
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "rollout.buffer_depth=0",  # what was published is what was gathered
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
    "evaluation.every=0",
    "trainer.optimizer.warmup_steps=0",
]
PACKED = "trainer.packing=true"
STAGES = [  # two pipeline stages, for tests of PPO
    "trainer.parallel={dp: 1, ep: 1, pp: 2}",
    PACKED,
    "trainer.megatron={recompute_granularity: full, recompute_method: uniform, "
    "recompute_num_layers: 1}",
]
# A random model earns some: its weights move.
SOME_REWARD = "task.reward=tests.helpers.run_rewards:digit_share"
FRESH = "mismatch/abs_dlogp_max/lag_0"
ENOUGH = ["rollout.groups_per_step=8", "rollout.group_size=16"]  # for some reward by chance
SMALL = [
    "run.steps=3",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "observe.engine_alone_s=0",
    "checkpoint.every=0",
]


@dataclass
class Run:
    """One `moerl train` process and its run directory."""

    dir: RunDir
    process: subprocess.Popen[str]
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def rows(self) -> list[dict]:
        return read_rows(self.dir.metrics)

    @property
    def trained(self) -> TrainedRecords:
        """Copies of what was trained; needs `copies`."""
        return TrainedRecords(self.dir.root.parent / "trained" / self.dir.root.name)

    def plan(self) -> RunContext:
        """Enough of the run's plan to score the copies of its records."""
        config = load_saved(self.dir.config)
        return RunContext(
            config=config,
            run=self.dir,
            model_path=Path(config.model.path),
            hf_config={},
            token="",
            incarnation=0,
            node="local",
            blob_dir=self.trained.folder / "blobs",
            checkpoint=None,
        )

    def pids(self) -> dict[str, int]:
        return json.loads((self.dir.root / "pids.json").read_text())

    def members(self) -> list[psutil.Process]:
        """Every process of the run, the front included."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def wait_for(self, what: Callable[[], bool], seconds: float = START_S) -> None:
        limit = Patience(seconds)
        while not what():
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            assert not limit.over(), f"nothing after {seconds} s:\n{self.text()}"
            time.sleep(0.05)

    def finish(self, seconds: float = 400.0) -> int:
        try:
            return self.process.wait(patience(seconds))
        finally:
            self.end()

    def end(self) -> None:
        """Only for a test that failed: end what this run still has."""
        if self.process.poll() is None:
            for member in self.members():
                member.kill()
            self.process.wait()


@dataclass(frozen=True, slots=True)
class TrainedRecords:
    """Copies of trained groups and their blobs, made before the controller deleted them."""

    folder: Path

    def groups(self, rows: list[dict]) -> list[tuple[int, EpisodeGroup]]:
        """(step, group) of the surviving history.

        The last evaluation has a row of its own, which trained nothing.
        """
        found = []
        for row in (row for row in rows if "async/buffer_depth" in row):
            incarnation = row["version"].split(".")[0]
            path = self.folder / incarnation / f"step-{row['step']:06d}.msgpack"
            groups = decode_value(path.read_bytes(), list[EpisodeGroup])
            found += [(int(row["step"]), group) for group in groups]
        return found

    def unnamed(self) -> list[str]:
        """Blobs of the store that no group referred to when the last step was trained."""
        last = (self.folder / "unnamed.jsonl").read_text().splitlines()[-1]
        names: list[str] = json.loads(last)["unnamed"]
        return names


def copying_records(root: Path) -> dict[str, str]:
    """Environment of a run below `root` that copies what it trains (`TrainedRecords`)."""
    folders = [str(_HOOK), str(_HOOK.parents[2]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return {"PYTHONPATH": path, "MOERL_TEST_TRAINED": str(root / "trained")}


def check_deletion(run: Run, in_flight: int) -> None:
    """No group lost its records, and nothing stays: in the store, or after the run.

    in_flight: most blobs that engines may have sealed and not yet returned.
    """
    rows = run.rows()
    assert sum(row["async/dropped_lost_groups"] for row in rows) == 0, "a live blob was deleted"
    assert sum(row["journal/lost_groups"] for row in rows) == 0, "a live blob was deleted"
    assert len(run.trained.unnamed()) <= in_flight, run.trained.unnamed()
    folder = outside_folder(load_saved(run.dir.config).cluster.blob_dir, run.dir)
    assert not folder.exists() or not list(folder.iterdir()), list(folder.iterdir())


def start(root: Path, *args: str, name: str = "", copies: bool = False) -> Run:
    """`moerl train ARGS` in a new process; `root` holds its run directory and output.

    copies: what it trains is copied (`Run.trained`).
    """
    root.mkdir(parents=True, exist_ok=True)
    output = root / f"output-{len(list(root.glob('output-*')))}.txt"
    command = [sys.executable, "-m", "moerl", "train", *args]
    if "--resume" not in args:
        command += [f"run.root={root}", "--run", name]
    else:
        name = Path(args[args.index("--resume") + 1]).name
    environment = os.environ | (copying_records(root) if copies else {})
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, text=True, env=environment
        )
    return Run(RunDir(root / name), process, output)


def _runs(member: psutil.Process) -> bool:
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def survivors(members: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Members that still run when the time is up, which a busy machine makes longer."""
    limit = Patience(within_s)
    while True:
        left = [member for member in members if _runs(member)]
        if not left or limit.over():
            return left
        time.sleep(0.05)


def last_step(run: Run) -> int:
    rows = run.rows()
    return rows[-1]["step"] if rows else 0


def check_history(
    run: Run, trained: list[tuple[int, EpisodeGroup]], dropped: frozenset[int] = frozenset()
) -> None:
    """Each prompt group at most once, no token of weights that were given up.

    dropped: the only groups that were skipped.
    """
    begins: dict[int, int] = {}
    for row in reversed(run.rows()):
        begins[int(row["version"].split(".")[0])] = row["step"]
    for step, group in trained:
        for span in (span for r in group.rollouts() for span in r.versions):
            later = [s for i, s in begins.items() if i > span.version.incarnation]
            assert all(span.version.step <= first for first in later), (step, span)
            assert 0 <= step - span.version.step <= 4
    ids = [group.group_id for _, group in trained]
    assert len(ids) == len(set(ids)), "a group was trained twice"
    line = range(max(ids) + 1)
    assert set(line) - set(ids) - dropped <= set(line[-12:]), "a group was lost"
    assert not dropped & set(ids), "a dropped group was trained"


def trained_rows(run: Run) -> list[dict]:
    """Rows of the two steps of a run of TWO_STEPS, each of which has trained what was recorded."""
    assert run.finish() == 0, run.text()
    rows = [row for row in run.rows() if "loss/total" in row]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(FRESH in row for row in rows), "step 1 has the published weights"
    check_trained(rows)
    return rows


def check_trained(rows: list[dict]) -> None:
    """Each step has trained what was recorded, and no record was refused."""
    assert any(FRESH in row for row in rows)
    for row in rows:
        assert row["routing/replay_cover_frac"] == row["keep/cover_frac"] == 1.0
        assert row.get(FRESH, 0.0) <= 5e-5
        assert row["loss/grad_norm"] > 0
        assert not [key for key in row if key.startswith("refused/")]
