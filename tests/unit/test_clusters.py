"""Clusters: placement, refusals, and the dry run of every shipped recipe."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement
from moerl.core.errors import ConfigError
from moerl.planning.dry_run import _processes, describe, process_rows, process_table
from moerl.records.blob_copies import seal
from moerl.records.blob_store import Found
from moerl.records.remote_blobs import cluster_reader
from moerl.runtime.run_dir import RunDir
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs/recipes").glob("*.yaml"))
HOSTS = (
    "cluster=hosts",
    "cluster.nodes.engine.hosts=[10.9.0.1]",
    "cluster.nodes.trainer.hosts=[10.9.0.2,10.9.0.3]",
)


def test_every_released_model_of_the_readme_has_a_recipe() -> None:
    assert {"qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "glm-4.5-air"} < set(RECIPES)
    assert "gpt-oss-120b" in RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_placed_whole(recipe: str) -> None:
    """Each engine, its parts, and each rank are processes of one node."""
    config = resolve(load_config(recipe))
    check(config, starts=False)
    placed, count = placement(config), Counter[str]()
    for node in placed.nodes:
        for process, _, number, *_ in _processes(config, placed, node.name):
            count[process] += int(number) if number.isdecimal() else 0
    assert count["engine (Ray)"] == config.engine.count
    assert count["part (Ray)"] == config.engine.count * (config.engine.nodes - 1)
    assert count["trainer rank"] == config.trainer.parallel.world_size
    separate = config.ref_models.placement == "separate"
    assert count["reference rank"] == separate * config.ref_models.parallel.world_size
    assert count["root"] == count["controller (Ray)"] == count["scorer (Ray)"] == 1


ROOT_ROWS = [
    ("moerl train", "", "1", "", "ends whatever is left when the root is gone"),
    ("root", "", "1", "", "starts and watches everything, writes the report"),
    ("controller (Ray)", "", "1", "", "produce, score and learn loops; headers only"),
]
PLACED = {
    "quickstart": [
        ("all", "scorer (Ray)", "", "1", "", "rewards in 1 worker(s)"),
        ("all", "engine (Ray)", "0", "1", "", "tp 1, float32, host and SGLang server"),
        ("all", "trainer rank", "0,1", "2", "", "tp 1 pp 1 cp 1 dp 2 ep 2 etp 1, fp32"),
    ],
    "qwen3-30b-a3b-node8": [
        ("all", "scorer (Ray)", "", "1", "", "rewards in 16 worker(s)"),
        ("all", "engine (Ray)", "0,1", "2", "0-3", "tp 2, bfloat16, host and SGLang server"),
        ("all", "trainer rank", "0-3", "4", "4-7", "tp 4 pp 1 cp 1 dp 1 ep 4 etp 1, bf16"),
    ],
    "kimi-k2": [
        ("engine-0", "scorer (Ray)", "", "1", "", "rewards in 16 worker(s)"),
        ("engine-0", "records (Ray)", "", "1", "", "serves sealed records by byte range"),
        ("engine-0", "engine (Ray)", "0", "1", "0-7", "tp 8, bfloat16, host and SGLang server"),
        (
            "engine-1 .. engine-7",
            "records (Ray)",
            "",
            "1",
            "",
            "serves sealed records by byte range",
        ),
        (
            "engine-1 .. engine-7",
            "engine (Ray)",
            "1 ..",
            "1",
            "0-7",
            "tp 8, bfloat16, host and SGLang server",
        ),
        (
            "trainer-0 .. trainer-63",
            "trainer rank",
            "0-7 ..",
            "8",
            "0-7",
            "tp 4 pp 8 cp 1 dp 16 ep 64 etp 1, bf16",
        ),
    ],
    "digits-by-agent": [
        ("all", "scorer (Ray)", "", "1", "", "rewards in 1 worker(s)"),
        (
            "all",
            "agents",
            "",
            "<= 16",
            "",
            "python examples/tool_agent.py; at most 3 turns, 65536 tokens, 120 s each; "
            "reward: its own",
        ),
        ("all", "engine (Ray)", "0", "1", "", "tp 1, float32, host and SGLang server"),
        ("all", "trainer rank", "0,1", "2", "", "tp 1 pp 1 cp 1 dp 2 ep 2 etp 1, fp32"),
    ],
}


@pytest.mark.parametrize("recipe", PLACED)
def test_the_rows_of_a_dry_run(recipe: str) -> None:
    config = resolve(load_config(recipe))
    placed = placement(config)
    rows = process_rows(config, placed)
    assert rows == [(placed.controller.name, *row) for row in ROOT_ROWS] + PLACED[recipe]
    table = str(process_table(config, placed))
    assert all(row[1] in table for row in rows)


DRY_RUN = """
import builtins, sys, time
HEAVY = {"torch", "ray", "sglang", "megatron", "transformers", "matplotlib"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"{name} is not installed on this login node")
sys.meta_path.insert(0, Blocker())
from typer.testing import CliRunner
from moerl.cli import app
if sys.argv[1] == "import":
    import torch
for recipe in sys.argv[1:]:
    begin = time.perf_counter()
    done = CliRunner().invoke(app, ["train", recipe, "--dry-run", "--run", "dry"])
    if done.exit_code:
        raise SystemExit(f"{recipe}: {done.output} {done.exception!r}")
    for part in ("processes of", "commands", "ports", "trainer rank", "host memory", "a publish"):
        assert part in done.output, (recipe, part)
    assert "DOES NOT FIT" not in done.output, (recipe, done.output)
    print(f"{recipe}: {time.perf_counter() - begin:.2f} s")
"""


def dry_run(*recipes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRY_RUN, *recipes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(280),
    )


def test_every_recipe_is_described_on_a_login_node() -> None:
    """In one process that cannot import torch, ray or sglang; seconds per recipe are printed.

    The issue's limit is 5 s for a recipe on a quiet machine; here others share the cores.
    """
    before = {path.name for path in (ROOT / "runs").glob("*")} if (ROOT / "runs").exists() else ()
    done = dry_run(*RECIPES)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(RECIPES)
    assert "dry" not in before
    assert not (ROOT / "runs" / "dry").exists(), "a dry run leaves nothing"


def test_a_dry_run_refuses_what_a_start_would_refuse() -> None:
    """The control of every recipe above: with routing recorded, and without."""
    cache = ("engine.args.enable_hierarchical_cache=true",)
    with pytest.raises(ConfigError, match=r"enable_hierarchical_cache = True .* with replay"):
        describe(resolve(load_config("qwen3-30b-a3b", cache)), [])
    assert "enable_hierarchical_cache" in describe(
        resolve(load_config("qwen3-30b-a3b", (*cache, "replay.routing=off"))), []
    )


def test_the_blocker_blocks() -> None:
    """Negative control of the test above."""
    done = dry_run("import")
    assert done.returncode != 0
    assert "not installed on this login node" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("cluster.launcher=pbs",), "cluster.launcher"),
        (("cluster.nodes.all.roles=[trainer]",), "cluster.nodes"),
        (("cluster.nodes.all.roles=[trainer,cook]",), "cluster.nodes.all.roles"),
        (("cluster.nodes.all.count=2",), "cluster.launcher"),
        (("cluster=hosts",), "cluster.nodes.engine.hosts"),
        ((*HOSTS, "sync.transport=shm"), "sync.transport"),
        ((*HOSTS, "cluster.address=10.9.0.1"), "cluster.address"),
        ((*HOSTS, "cluster.interface=lo"), "cluster.interface"),
        ((*HOSTS, "cluster.ports.ray=17100"), "cluster.ports"),
        ((*HOSTS, "cluster.ports.blobs=80"), "cluster.ports.blobs"),
        ((*HOSTS, "cluster.ports.blobs=17101", "engine.count=2"), "cluster.ports.ray"),
        ((*HOSTS, "trainer.parallel.dp=3", "trainer.parallel.ep=1"), "trainer.parallel"),
        (("cluster=node8", "engine.count=3"), "trainer.parallel"),
        (("cluster=node8", "engine.count=5"), "engine.count"),
        (("cluster=node9",), "cluster"),
    ],
)
def test_what_cannot_run_is_refused(overrides: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        check(resolve(load_config("quickstart", overrides)))


def test_readers_on_several_nodes_know_the_copies_of_shared_runs(tmp_path: Path) -> None:
    run, lost = RunDir(tmp_path), "blob://127.0.0.1:9/a"
    seal(run.segments / "6.group", [(lost, b"123")])
    for durability, expected in (("shared", Found(set(), {lost})), ("node", Found({lost}, set()))):
        config = resolve(load_config("quickstart", (*HOSTS, f"rollout.durability={durability}")))
        check(config, starts=False)
        assert cluster_reader(config, run, "t").find({lost: 3}) == expected


def test_any_part_of_a_recipe_is_replaced_on_the_command_line() -> None:
    plain = load_config("gspo")
    moved = load_config("gspo", ("cluster=node8", "algorithm=cispo", "engine.tp=1"))
    assert plain.cluster.name == "laptop"
    assert (moved.cluster.name, moved.engine.dtype, moved.engine.tp) == ("node8", "bfloat16", 1)
    assert moved.algorithm.objective == "cispo"
    assert moved.algorithm.clip_low == 1.0, "nothing of the replaced part is left"
    assert moved.task == plain.task
    assert load_config("quickstart", ("algorithm=gspo",)).algorithm == plain.algorithm
    assert load_config("quickstart", ("model=kimi-k2",)).model.path == "models/kimi-k2"


def test_an_engine_stays_on_one_node_and_trainer_ranks_are_even() -> None:
    config = resolve(load_config("qwen3-30b-a3b", ("engine.tp=3", "engine.args={}")))
    placed = placement(config)
    assert [(slot.node.name, slot.devices) for slot in placed.engines] == [
        ("engine-0", (0, 1, 2)),
        ("engine-0", (3, 4, 5)),
        ("engine-1", (0, 1, 2)),
        ("engine-1", (3, 4, 5)),
    ]
    assert [len(slot.ranks) for slot in placed.trainers] == [8, 8]
    bare = placement(load_config("quickstart", (*HOSTS, "engine.count=3")))
    assert [slot.node.address for slot in bare.engines] == ["10.9.0.1"] * 3
    assert [slot.ranks for slot in bare.trainers] == [(0,), (1,)]


def test_one_node_is_divided() -> None:
    """Engines and trainer ranks never share a GPU."""
    placed = placement(load_config("quickstart", ("cluster=node8",)))
    used = [d for slot in (*placed.engines, *placed.trainers) for d in slot.devices]
    assert sorted(used) == list(range(8))
    assert replace(placed.controller, name="all") == placed.nodes[0]
