"""One node of 8 GPUs: recipes that fit it, and settings that a dry run refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config, resolve
from moerl.config.load import CONFIG_ROOT
from moerl.core.errors import ConfigError
from moerl.engine.host.server_args import check_planned_layout
from moerl.launch import trainer_check
from moerl.planning import estimates
from moerl.planning.dry_run import describe
from moerl.planning.estimates import model_shapes
from tests.helpers import trainer_checks

NODE8 = "cluster=node8"
# Recipe -> what its message names of the cluster that would do
OTHERS = (
    "glm-4.5-air",
    "gpt-oss-120b",
    "qwen3-235b-a22b",
    "deepseek-v3",
    "deepseek-v3-80gb",
    "kimi-k2",
    "kimi-k2-80gb",
)


@pytest.fixture(autouse=True)
def _trainer_checks_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_check, "ask", trainer_checks.ask)


def dry_run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["train", *words, "--dry-run"])
    return done.exit_code, f"{done.output}{done.exception}"


def test_olmoe_fits_one_node() -> None:
    code, text = dry_run("olmoe-1b-7b", NODE8)
    assert code == 0, text
    assert "DOES NOT FIT" not in text
    devices = text.split("devices, as CUDA_VISIBLE_DEVICES:\n")[1].splitlines()[:5]
    assert [line.rpartition(": ")[2].partition(";")[0] for line in devices] == [
        *("0", "1", "2", "3"),
        "4,5,6,7",
    ]
    for part in ("weights", "gradients", "optimizer", "KV cache", "moerl.trainer.main"):
        assert part in text


def test_qwen3_30b_fits_one_node_by_adapters() -> None:
    """All states on the GPUs, with room; control: all weights trained by the same layout."""
    code, text = dry_run("qwen3-30b-a3b-lora", NODE8)
    assert code == 0, text
    assert "DOES NOT FIT" not in text
    row = next(line for line in text.splitlines() if line.startswith("│    0│"))
    cells = row.strip("│").split("│")
    parameters, weights, gradients, optimizer = cells[1:5]
    assert (parameters.strip(), weights.strip()) == ("7.71e9", "15.4")
    assert float(gradients) + float(optimizer) < 1.1
    assert float(cells[-1]) < 80 / 2
    assert re.search(r"copy of a checkpoint 3\.\d+, W0 of adapters 59\.8$", text, re.M), text
    assert "DOES NOT FIT" in dry_run("qwen3-30b-a3b-lora", NODE8, "lora.rank=0")[1]


def test_qwen3_30b_fits_one_node_with_its_optimizer_on_the_host() -> None:
    recipe = "qwen3-30b-a3b-node8"
    code, text = dry_run(recipe, NODE8)
    assert code == 0, text
    assert "DOES NOT FIT" not in text
    host = r"weight snapshot of a publish 6\d.*, optimizer 4\d\d, copy of a checkpoint 6\d"
    assert re.search(host, text, re.M), text
    (need,) = re.findall(r"^  all: (\d+)$", text, re.M)
    about = (CONFIG_ROOT / f"recipes/{recipe}.yaml").read_text()
    assert f"Host memory: {need} GB" in about, "the recipe says what it needs"
    assert load_config(recipe).cluster.nodes["all"].memory_gb == 1000 > int(need)
    devices = text.split("devices, as CUDA_VISIBLE_DEVICES:\n")[1].splitlines()[:3]
    assert [line.rpartition(": ")[2].partition(";")[0] for line in devices] == [
        "0,1",
        "2,3",
        "4,5,6,7",
    ]
    on_device = dry_run(recipe, NODE8, "trainer.optimizer_args.optimizer_cpu_offload=false")[1]
    assert "a trainer rank DOES NOT FIT" in on_device


def test_host_memory_that_a_node_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the cluster names, or on the node itself what it has."""
    recipe, small = "qwen3-30b-a3b-node8", "cluster.nodes.all.memory_gb=500"
    text = describe(resolve(load_config(recipe, (small,))), [])
    assert re.search(r"host memory of \S+ DOES NOT FIT: 7\d\d GB of 500 GB", text), text
    monkeypatch.setattr(estimates, "host_memory", lambda: 600 * 10**9)
    for gpus, fits in ((0, True), (8, False)):
        monkeypatch.setattr(estimates, "visible_gpus", lambda gpus=gpus: [80] * gpus)
        text = describe(resolve(load_config(recipe)), [])
        assert ("this machine has 600 GB" not in text) is fits
        assert ("host memory of all DOES NOT FIT: 759 GB of 600 GB" not in text) is fits
    slurm = describe(resolve(load_config("qwen3-30b-a3b")), [])
    assert "this machine" not in slurm, "its nodes are others"


@pytest.mark.parametrize("recipe", OTHERS)
def test_the_others_do_not_fit_the_node(recipe: str) -> None:
    code, text = dry_run(recipe, NODE8)
    assert code != 0
    assert re.search(r"engine\.(count|nodes) = \d+ is not usable: ", text), text


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("olmoe-1b-7b", "engine.tp=2", r"engine\.tp = 2 .* use 1"),
        ("qwen3-30b-a3b", "engine.args.quantization=fp8", r"quant_method is None"),
        ("qwen3-30b-a3b", "engine.args.moe_runner_backend=flashinfer_cutlass", r"\[up; gate\]"),
        ("qwen3-30b-a3b", "engine.args.cpu_offload_gb=8", "not where a plan writes"),
        ("glm-4.5-air", "engine.args.disable_shared_experts_fusion=false", "would join"),
    ],
)
def test_what_an_engine_would_refuse_after_its_start_a_dry_run_refuses(
    recipe: str, setting: str, message: str
) -> None:
    settings = (setting, "replay.routing=off", "engine.count=2")
    with pytest.raises(ConfigError, match=message):
        describe(resolve(load_config(recipe, settings)), [])
    describe(resolve(load_config(recipe, settings[1:])), [])


def test_a_cache_that_sglang_sizes_is_estimated() -> None:
    """24 GB of 80 for weights and cache, bf16: what OLMoE's 13.8 GB leave, and no more."""
    asked = ("engine.max_total_tokens=0", "engine.mem_fraction_static=0.3")
    config = resolve(load_config("olmoe-1b-7b", asked))
    lines = describe(config, []).splitlines()
    (line,) = [line for line in lines if line.startswith("memory of an engine rank")]
    found = re.search(r"weights ([\d.]+) GB, KV cache ([\d.]+) GB \(SGLang decides: about", line)
    assert found, line
    weights, cache = (float(number) for number in found.groups())
    assert weights == pytest.approx(13.8, abs=0.1)
    assert weights + cache == pytest.approx(24, abs=0.1)
    assert "an engine rank DOES NOT FIT" not in "\n".join(lines)
    small = replace(config, engine=replace(config.engine, mem_fraction_static=0.1))
    assert "an engine rank DOES NOT FIT" in describe(small, [])


def refused(model: dict[str, Any], **fields: Any) -> str:
    config = load_config("quickstart", (NODE8,)).engine
    with pytest.raises(ConfigError) as found:
        check_planned_layout(replace(config, **fields), model, cuda=True, routing=True)
    return str(found.value)


def test_checkpoints_that_an_engine_would_refuse() -> None:
    shapes = model_shapes(load_config("qwen3-30b-a3b"))
    assert "tie_word_embeddings" in refused(shapes | {"tie_word_embeddings": True})
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    assert "mxfp4" in refused(shapes | stored)
    fp16 = check_planned_layout(
        replace(load_config("quickstart", (NODE8,)).engine, tp=4), shapes, cuda=True, routing=True
    )
    assert (fp16.tp, fp16.moe_runner, fp16.kernel_flags) == (4, "triton", ())


def test_a_recipe_brings_its_own_groups_of_nodes_to_its_own_cluster_only() -> None:
    own = load_config("qwen3-30b-a3b")
    assert set(own.cluster.nodes) == {"engine", "trainer"}
    assert set(load_config("qwen3-30b-a3b", (NODE8,)).cluster.nodes) == {"all"}
    again = load_config("qwen3-30b-a3b", ("cluster=kuberay",))
    assert again.cluster.nodes["trainer"].count == own.cluster.nodes["trainer"].count
