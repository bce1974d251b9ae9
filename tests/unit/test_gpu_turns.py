"""Turns on GPUs: settings, environments, engines that never sleep, and the start of a run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moerl import cli
from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement, sleeping_engines
from moerl.config.schema import Config, EngineConfig
from moerl.core.errors import ConfigError
from moerl.engine.host.server_args import SLEEPS, check_args
from moerl.engine.host.sglang_server import EngineServer, saver_environment
from moerl.launch.run_context import rank_environment
from moerl.planning.dry_run import describe
from moerl.planning.estimates import check_colocated

NODE8 = "qwen3-30b-a3b-node8-colocated"
ON_GPU = ("quickstart-colocated", "cluster=gpu1")
ROOT = Path(__file__).resolve().parents[2]
EXPANDABLE = "expandable_segments:True"


def configured(recipe: str, *overrides: str) -> Config:
    config = resolve(load_config(recipe, overrides))
    check(config, starts=False)
    return config


def server(folder: Path) -> EngineServer:
    return EngineServer(
        EngineConfig(), folder, routing=True, version="0.0", token="", log=folder / "log"
    )


# --- environments ---------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_server_that_sleeps_has_no_expandable_segments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other options of the variable stay.  Control: a server that never sleeps keeps them all."""
    monkeypatch.setenv(name, f"max_split_size_mb:64, {EXPANDABLE}")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    one = server(tmp_path)
    assert EXPANDABLE in one._environment()[name]
    assert one._environment()["NCCL_GRAPH_REGISTER"] == "1"
    one.args |= SLEEPS
    found = one._environment()
    assert found[name] == "max_split_size_mb:64"
    assert found["NCCL_GRAPH_REGISTER"] == found["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"
    assert saver_environment({name: EXPANDABLE})[name] == ""
    assert name not in saver_environment({})


def test_a_parked_rank_gives_back_all_free_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user names stays; a rank that never parks, or has no GPU, gets nothing."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def allocator(*words: str) -> set[tuple[str, str]]:
        config = configured(*words)
        env = rank_environment(config, placement(config).trainers[0])
        return {(name, value) for name, value in env.items() if "ALLOC_CONF" in name}

    assert allocator(*ON_GPU) == {("PYTORCH_ALLOC_CONF", EXPANDABLE)}
    assert allocator("quickstart-colocated") == allocator("quickstart", "cluster=gpu1") == set()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert allocator(*ON_GPU) == {("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")}


def test_the_saver_that_was_read_is_installed() -> None:
    lock = (ROOT / "requirements/gpu.lock").read_text()
    (version,) = re.findall(r"^torch-memory-saver==(\S+) ", lock, re.M)
    about = saver_environment.__doc__
    assert about is not None
    assert f"torch_memory_saver {version}" in about


# --- settings -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine.max_total_tokens=0", "SGLang would fill what is free"),
        ("sync.transport=cuda_ipc", "use shm"),
        ("sync.transport=nccl", "use shm"),
        ("rollout.in_flight_mode=in_place", "use abort_resume or retract"),
    ],
)
def test_what_turns_on_gpus_cannot_do_is_refused(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(*ON_GPU, setting)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("enable_weights_cpu_backup", "a publish writes the weights"),
        ("enable_memory_saver", r"set cluster\.colocated"),
    ],
)
def test_arguments_that_turns_decide(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_args({name: True}, replay=True)


def test_max_total_tokens_alone_bounds_an_engine() -> None:
    """It may start beside a parked trainer, and mem_fraction_static is of what is free then."""
    text = describe(configured(*ON_GPU), [])
    assert '"mem_fraction_static": 0.95' in text
    assert '"enable_memory_saver": true' in text
    assert "sync.transport: shm" in text
    assert '"enable_memory_saver"' not in describe(configured("quickstart", "cluster=gpu1"), [])


# --- plan -----------------------------------------------------------------------------------------
def test_qwen3_30b_takes_turns_on_one_node_by_adapters() -> None:
    """With 10 GB of NCCL in each rank; a larger cache asks for more, the largest fits nowhere."""
    text = describe(configured(NODE8), [])
    assert "gives way: gradients, kv_cache (the smallest set" in text
    rows = re.findall(r"^│ (train|hand over|generate) .*│ +([\d.]+) │$", text, re.M)
    assert [name for name, _ in rows] == ["train", "hand over", "generate"]
    assert all(float(both) <= 0.97 * 80 for _, both in rows)
    assert "never sleep" not in text
    more = describe(configured(NODE8, "engine.max_total_tokens=524288"), [])
    assert "gives way: gradients, kv_cache, optimizer, trainer_weights (" in more
    with pytest.raises(ConfigError, match="would hold"):
        describe(configured(NODE8, "engine.max_total_tokens=786432"), [])


def test_a_parked_optimizer_is_counted_in_host_memory() -> None:
    words = (*ON_GPU, "turn.moves=[gradients,kv_cache,engine_weights,optimizer]")
    assert re.search(
        r"trainer: weight snapshot .*, parked parts \d", describe(configured(*words), [])
    )
    assert "parked parts" not in describe(configured(*ON_GPU), [])


HYBRID = (NODE8, "trainer.parallel={tp: 4, dp: 1, ep: 4}")


def test_engines_on_gpus_that_the_trainer_lacks_never_sleep() -> None:
    assert sleeping_engines(configured(NODE8)) == {0, 1, 2, 3}
    assert sleeping_engines(configured("quickstart-colocated")) == {0}
    assert sleeping_engines(configured(*HYBRID)) == {0, 1}
    three = configured(NODE8, "trainer.parallel={tp: 1, dp: 3, ep: 1}")
    assert sleeping_engines(three) == {0, 1}, "one of its GPUs is enough"
    assert "; engines [2, 3] never sleep" in describe(configured(*HYBRID), [])


# --- start ----------------------------------------------------------------------------------------
@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of packages that are found beside those that are."""
    names, find = {"torch_memory_saver"}, importlib.util.find_spec

    def found(name: str, *rest: Any) -> importlib.machinery.ModuleSpec | None:
        if name == "torch_memory_saver":
            return importlib.machinery.ModuleSpec(name, None) if name in names else None
        return find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    return names


def test_a_start_takes_what_the_plan_says(
    installed: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run reads no shapes: its settings have it.  Without the saver nothing starts."""
    started: list[list[str]] = []
    for name in ("_check_fields", "_check_gpus"):
        monkeypatch.setattr(cli, name, lambda _config: None)
    monkeypatch.setattr(cli, "_guarded", lambda arguments: started.append(arguments["overrides"]))

    def start(*words: str) -> str:
        command = ["train", *words, f"run.root={tmp_path}"]
        return str(CliRunner().invoke(cli.app, command).exception or "")

    start(*ON_GPU)
    assert "turn.moves=[gradients,kv_cache]" in started[-1]
    start(*ON_GPU, "turn.moves=[kv_cache,optimizer]")
    assert started[-1][-1] == "turn.moves=[kv_cache,optimizer]"
    assert "would hold" in start(*ON_GPU, "cluster.nodes.all.device_gb=8")
    start("quickstart-colocated")
    assert not any("turn.moves" in word for word in started[-1]), "no GPU, no plan"
    installed.clear()
    assert "torch-memory-saver is missing" in start(*ON_GPU)
    assert len(started) == 3
    with pytest.raises(ConfigError, match=r"tools/setup\.sh --gpu"):
        check_colocated(configured(*ON_GPU))
