"""Engine and trainer on one GPU: places, shares, what a dry run prints and refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import VISIBLE, engine_of, placement, trainer_share
from moerl.core.errors import ConfigError
from moerl.launch import own_gpu
from moerl.launch.own_gpu import use_own_gpu
from moerl.launch.run_context import rank_environment
from moerl.launch.supervision.actors import EngineGpus
from moerl.planning import publish_forecast
from moerl.planning.dry_run import describe
from moerl.planning.estimates import check_colocated

ONE_GPU = {"quickstart": ["cluster=gpu1"], "smollm2-moe": ["cluster=gpu1"], "olmoe-1gpu": []}
PURPOSES = {"weights", "KV cache", "gradients", "optimizer", "a publish", "CUDA, graphs, waste"}


def text_of(recipe: str, *overrides: str) -> str:
    return describe(resolve(load_config(recipe, [*ONE_GPU[recipe], *overrides])), [])


def by_purpose(text: str) -> dict[str, list[float]]:
    """GB of engine and trainer, from the printed table."""
    rows = re.findall(r"^│ (\w[\w ,0]*?) +│ +([\d.]*) +│ +([\d.]*) +│$", text, re.M)
    return {name: [float(cell or 0) for cell in cells] for name, *cells in rows}


# --- the plan -------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ONE_GPU)
def test_both_shares_fit_by_purpose(recipe: str) -> None:
    text = text_of(recipe)
    assert "DOES NOT FIT" not in text
    rows = by_purpose(text)
    engine, trainer = rows.pop("all")
    assert set(rows) >= PURPOSES
    for side, whole in enumerate((engine, trainer)):
        assert sum(row[side] for row in rows.values()) == pytest.approx(whole, rel=0.01)
    config = load_config(recipe, ONE_GPU[recipe])
    room = config.cluster.nodes["all"].device_gb
    assert engine + trainer < room
    assert rows["weights"][0] + rows["KV cache"][0] < room * config.engine.mem_fraction_static
    assert trainer < room * trainer_share(config)
    names = [config.engine.dtype, config.trainer.dtype, config.engine.platform]
    assert names == ["bfloat16", "bf16", "cuda"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("engine.max_total_tokens=262144", r"hold 7[\d.]+ GB: .*cache 48[\d.]* of 32"),
        ("lora.rank=0", r"a GPU of 80 GB would hold 16\d GB: .*trainer 13\d of 40; .*lora\.rank"),
        ("cluster.nodes.all.device_gb=40", r"a GPU of 40 GB would hold 5[\d.]+ GB"),
    ],
)
def test_more_than_the_gpu_has_is_refused_with_numbers(setting: str, says: str) -> None:
    config = resolve(load_config("olmoe-1gpu", [setting]))
    check(config, starts=False)
    with pytest.raises(ConfigError, match=rf"cluster\.colocated = 'shared' .*{says}"):
        describe(config, [])
    with pytest.raises(ConfigError, match="would hold"):
        check_colocated(config)  # a start asks it
    unknown = resolve(load_config("olmoe-1gpu", [setting, "cluster.nodes.all.device_gb=0"]))
    describe(unknown, [])


def test_the_forecast_of_a_publish_counts_the_share() -> None:
    config = resolve(load_config("olmoe-1gpu"))
    (layouts,) = publish_forecast.planned_layouts(config)
    line = publish_forecast._fit_line(config, layouts, 13.8e9)
    assert re.search(r"an engine rank fits: 31 of 32 GB; a trainer rank fits: 2\d.* of 40 GB", line)


# --- places and shares ----------------------------------------------------------------------------
def test_both_are_on_the_first_gpu() -> None:
    config = load_config("quickstart", ["cluster=gpu1", "sync.transport=cuda_ipc"])
    placed = placement(config)
    assert placed.engines[0].devices == placed.trainers[0].devices == (0,)
    assert rank_environment(config, placed.trainers[0])[VISIBLE] == "0", "its engine's is its own"
    gpus = EngineGpus(config)
    assert gpus.take(0, 1) == (0,)
    with pytest.raises(ConfigError, match="0 GPUs of this machine are free"):
        gpus.take(1, 1)
    gpus.give_back(0)
    assert gpus.take(2, 1) == (0,)


def test_reference_ranks_come_after_the_shared_gpus() -> None:
    four = ["cluster=gpu1", "cluster.nodes.all.devices=4", "engine.count=2", "engine.tp=1"]
    four += ["trainer.parallel={dp: 2, ep: 2}", "ref_models.placement=separate"]
    placed = placement(load_config("on-policy-distillation", four))
    assert [slot.devices for slot in placed.engines] == [(0,), (1,)]
    assert placed.trainers[0].devices == (0, 1)
    assert placed.ref_models[0].devices == (2,)


@pytest.mark.parametrize("taken", [0.0, 0.1, 0.3, 0.5])
def test_an_engine_finds_its_share_beside_any_trainer(taken: float) -> None:
    """By SGLang's formula (kv_cache_configurator.py): the cache gets what is free after the
    weights, less (1 - fraction) of what was free before them.  Control: the share as fraction.
    """
    config = load_config("olmoe-1gpu")
    room, weights = 80.0, 13.8
    assert taken <= trainer_share(config), "the trainer's limit"
    free = room * (1 - taken)

    def cache(fraction: float) -> float:
        return free - weights - free * (1 - fraction)

    share = config.engine.mem_fraction_static
    wanted = room * share - weights
    assert cache(engine_of(config, 1).mem_fraction_static) >= wanted - 0.01
    assert taken < 0.1 or cache(share) < wanted - 0.01
    alone = replace(config, cluster=replace(config.cluster, colocated="none"))
    assert engine_of(alone, 2).mem_fraction_static == share
    assert trainer_share(alone) == 1.0


def test_a_run_on_the_cpu_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs torch would choose them."""
    monkeypatch.setenv(VISIBLE, "0,1")
    config = load_config("quickstart")
    assert rank_environment(config, placement(config).trainers[0])[VISIBLE] == ""


# --- a start on a machine with a GPU --------------------------------------------------------------
class Asked:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: Sequence[int], cuda: str) -> None:
        monkeypatch.setattr(own_gpu, "visible_gpus", lambda: list(gpus))
        monkeypatch.setattr(own_gpu, "torch_cuda", lambda: cuda)

    def cluster(self, *overrides: str, recipe: str = "quickstart") -> tuple[str, float, str]:
        settings, sentence = use_own_gpu(recipe, overrides)
        config = load_config(recipe, settings)
        check(resolve(config), starts=False)
        group = next(iter(config.cluster.nodes.values()))
        return config.cluster.name, group.device_gb, sentence


H100, SMALL = 81559 * 2**20, 24564 * 2**20


def test_the_first_command_uses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name, room, sentence = Asked(monkeypatch, [H100], "13.0").cluster("run.steps=3")
    assert (name, room) == ("gpu1", 85.5)
    assert sentence.startswith("this machine has a GPU: the run uses it (cluster=gpu1)")
    several = Asked(monkeypatch, [SMALL] * 8, "13.0").cluster(recipe="smollm2-moe")
    assert several[:2] == ("gpu1", 25.8)
    assert several[2].startswith("this machine has 8 GPUs: the run uses one")


@pytest.mark.parametrize(
    "own", ["cluster=laptop", "engine.platform=cpu", "trainer.platform=cpu", "cluster.interface=lo"]
)
def test_what_the_user_names_is_kept(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    assert Asked(monkeypatch, [H100], "13.0").cluster(own) == ("laptop", 0.0, "")


def test_a_machine_without_a_gpu_or_without_cuda_uses_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Asked(monkeypatch, [], "13.0").cluster() == ("laptop", 0.0, "")
    name, _, sentence = Asked(monkeypatch, [H100], "").cluster()
    assert (name, "torch is installed for CPUs" in sentence) == ("laptop", True)
    assert Asked(monkeypatch, [H100], "13.0").cluster(recipe="olmoe-1b-7b")[0] == "node8"


def test_the_command_says_so_and_plans_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through nvidia-smi, by the command of the README."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(own_gpu, "torch_cuda", lambda: "13.0")
    done = CliRunner().invoke(app, ["train", "quickstart", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "moerl: this machine has a GPU: the run uses it" in done.output
    assert "memory of a shared GPU, GB of 85.5" in done.output
    assert "DOES NOT FIT" not in done.output
    monkeypatch.setenv(VISIBLE, "")
    hidden = CliRunner().invoke(app, ["train", "quickstart", "--dry-run"])
    assert "shared GPU" not in hidden.output
