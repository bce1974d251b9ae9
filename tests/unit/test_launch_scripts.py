"""The launch scripts: shellcheck finds nothing, and what they ask Python comes out right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moerl.core.errors import ConfigError
from moerl.doctor.node import FIRST_PORT, LAST_PORT
from moerl.launch.cluster import slurm_job
from moerl.launch.cluster.slurm_job import options, plan

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "tools/launch").iterdir())
RECIPE = ["qwen3-30b-a3b", "engine.count=2"]


def shellcheck(*files: Path) -> subprocess.CompletedProcess[str]:
    binary = Path(sys.executable).with_name("shellcheck")  # of requirements/cpu.lock
    return subprocess.run(
        [str(binary), *map(str, files)], capture_output=True, text=True, timeout=60, check=False
    )


def test_shellcheck_finds_nothing() -> None:
    assert len(SCRIPTS) >= 3
    done = shellcheck(*SCRIPTS)
    assert done.returncode == 0, done.stdout


def test_shellcheck_would_find_something(tmp_path: Path) -> None:
    """Negative control."""
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm -r $1\n")
    assert "SC2086" in shellcheck(tmp_path / "bad.sh").stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_end_nothing_by_name(script: Path) -> None:
    text = script.read_text()
    assert "set -euo pipefail" in text
    for word in ("pkill", "killall", "ray stop", "scancel"):
        assert word not in text


def test_the_firewall_names_the_nodes_and_prints_only_addresses() -> None:
    script = str(ROOT / "tools/launch/firewall.sh")

    def printed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([script, *words], capture_output=True, text=True, check=False)

    rules = printed("--allow", "10.0.0.9", "10.9.0.1", "10.9.0.0/24").stdout
    assert "elements = { 10.9.0.1,10.9.0.0/24 }" in rules
    assert "ip saddr { 10.0.0.9 } accept" in rules
    own = rules.index(f"@nodes tcp dport {FIRST_PORT}-{LAST_PORT} drop")
    assert own < rules.index("@nodes accept") < rules.index("tcp dport 1024-65535 drop")
    for wrong in ((), ("10.9.0.1; flush ruleset",), ("--allow",), ("--all", "10.9.0.1")):
        done = printed(*wrong)
        assert done.returncode != 0, wrong
        assert not done.stdout


def test_sbatch_is_asked_for_the_recipes_nodes() -> None:
    asked = options([*RECIPE, "cluster.slurm.partition=gpu", "--run", "a"])
    for option in ("--nodes=4", "--gpus-per-node=8", "--requeue", "--signal=B:TERM@120"):
        assert option in asked
    assert "--partition=gpu" in asked
    assert "--job-name=moerl-a" in asked
    with pytest.raises(ConfigError, match="a requeued job finds its run by this name"):
        options(RECIPE)
    with pytest.raises(ConfigError, match="add cluster=slurm"):
        options(["quickstart", "--run", "a"])


def test_nodes_of_the_allocation_get_their_roles(tmp_path: Path) -> None:
    lines = plan("n1,n2,n3,n4", [*RECIPE, f"run.root={tmp_path}", "--run", "a"])
    assert [line for line in lines if line.startswith(("engine=", "trainer="))] == [
        "engine=n1",
        "engine=n2",
        "trainer=n3",
        "trainer=n4",
    ]
    assert [line.removeprefix("setting=") for line in lines if "setting=" in line] == [
        "qwen3-30b-a3b",
        "cluster.nodes.engine.hosts=[n1,n2]",
        "cluster.nodes.trainer.hosts=[n3,n4]",
        "engine.count=2",
        f"run.root={tmp_path}",
        "--run",
        "a",
    ]
    with pytest.raises(ConfigError, match="the allocation has 2 nodes"):
        plan("n1,n2", [*RECIPE, "--run", "a"])


def test_a_setting_cannot_add_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The script reads lines: `engine=HOST` inside a setting would be a node."""
    words = ["plan", "--hosts", "n1", "--", *RECIPE, "run.root=a\nengine=n9", "--run", "a"]
    assert slurm_job.main(words) == 2
    assert "a line break cannot be passed on" in capsys.readouterr().err


def test_a_requeued_job_resumes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text("{}")
    lines = plan("n1,n2,n3,n4", [*RECIPE, f"run.root={tmp_path}", "--run", "a"])
    settings = [line.removeprefix("setting=") for line in lines if "setting=" in line]
    assert settings[:2] == ["--resume", f"{tmp_path}/a"]
    assert "cluster.nodes.engine.hosts=[n1,n2]" in settings, "the nodes may be others now"
