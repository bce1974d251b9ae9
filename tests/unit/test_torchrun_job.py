"""A torchrun with its ranks: what they inherit, why they ended, and that all of them end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moerl.config import load_config
from moerl.config.clusters import placement
from moerl.launch.run_context import rank_environment

SECRETS = {
    "RAY_AUTH_TOKEN": "ray",
    "WANDB_API_KEY": "wandb",
    "HF_TOKEN": "hf",
    "AWS_SECRET_ACCESS_KEY": "aws",
    "SLURM_JWT": "jwt",
    "MOERL_TOKEN": "another run's",
    "SSH_AUTH_SOCK": "/agent",
    "SOMETHING": "else",
}
# torchrun dies at once; its "rank" has a session of its own and does not hear SIGTERM
TORCHRUN = """
import signal, subprocess, sys, time
if sys.argv[1:] == ["rank"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(flush=True)
    time.sleep(60)
rank = subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True,
                        stdout=subprocess.PIPE)
rank.stdout.readline()
print("Traceback", "ValueError: the reason", "last line", sep=chr(10), file=sys.stderr)
sys.exit(3)
"""
ROOT_PROCESS = """
import os, sys, psutil
from pathlib import Path
from moerl.runtime.process_tree import become_subreaper
from moerl.distributed.torchrun import TorchrunJob

become_subreaper()
folder = Path(sys.argv[1])
job = TorchrunJob([sys.executable, str(folder / "torchrun.py")],
                  {**os.environ, "MOERL_TRAINER_JOB": "7"}, folder / "log")
code = job.wait(60)
before = len(psutil.Process().children(recursive=True))
job.end(grace_s=0.2)
alive = [p for p in psutil.Process().children(recursive=True) if p.status() != "zombie"]
print(code, before, len(alive), job.ending(code), job.cause(), sep="|")
"""


def test_ranks_inherit_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/x", "HF_HOME": "/y"}
    for name, value in (SECRETS | kept).items():
        monkeypatch.setenv(name, value)
    config = load_config("quickstart", ["cluster.environment.SOMETHING_ELSE=given"])
    found = rank_environment(config, placement(config).trainers[0])
    assert not SECRETS.keys() & found.keys()
    assert kept.items() <= found.items()
    assert found["SOMETHING_ELSE"] == "given"
    assert {"PATH", "HOME"} <= found.keys()
    assert "TORCHDYNAMO_DISABLE" not in found, "ranks on GPUs compile; the platform decides"


def test_a_job_whose_torchrun_is_dead_ends_whole(tmp_path: Path) -> None:
    """Its ranks belong to no process group of ours: the mark in their environment finds them."""
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    command = [sys.executable, "-c", ROOT_PROCESS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    cause = "ValueError: the reason"
    assert done.stdout.strip() == f"3|1|0|exit status 3: {cause}|{cause}"
