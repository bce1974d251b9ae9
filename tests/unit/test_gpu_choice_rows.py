"""The table of what SGLang and Transformer Engine choose on a GPU, and what the dry run refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config, resolve
from moerl.config.clusters import placement
from moerl.core.errors import ConfigError
from moerl.planning import gpu_choices
from moerl.planning.dry_run import describe
from moerl.planning.estimates import model_shapes
from tools.gpu_choices import PAGE, page, planned

ROOT = Path(__file__).resolve().parents[2]
TABLE = json.loads(gpu_choices.FILE.read_text(encoding="utf-8"))


def printed(recipe: str, *overrides: str) -> str:
    return describe(resolve(load_config(recipe, overrides)), [])


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(TABLE), "run tools/gpu_choices.py"


def test_every_recipe_on_gpus_has_its_rows_and_no_row_is_left_over() -> None:
    """By what a choice follows from: a recipe that changed is not found."""
    engines: dict[str, list[str]] = {}
    trainers: dict[str, list[str]] = {}
    for name, config, placed, shapes in planned():
        for tp in set(config.engine.sizes.values()):
            card = gpu_choices.card_of(placed.engines[0].node.group)
            args = gpu_choices.engine_arguments(config, placed, tp, Path(), shapes)
            engines.setdefault(gpu_choices.engine_key(card, args, shapes), []).append(name)
        card = gpu_choices.card_of(placed.trainers[0].node.group)
        trainers.setdefault(gpu_choices.trainer_key(card, config, shapes), []).append(name)
    for found, rows in ((engines, TABLE["engines"]), (trainers, TABLE["trainers"])):
        known = {key: row["recipes"] for key, row in rows.items()}
        assert known == found, "run tools/gpu_choices.py"
    assert {"olmoe-1b-7b", "deepseek-v3", "gpt-oss-120b"} <= {
        n for e in engines.values() for n in e
    }


def test_the_dry_run_reads_the_table_and_says_so() -> None:
    text = printed("gpt-oss-120b")
    assert "an engine of tp 8 on H100: prefill fa3, decode fa3, experts triton" in text
    assert "attention of a trainer rank on H100: FusedAttention (cuDNN)" in text
    assert "docs/evidence/gpu-choices.md; made without a GPU, not resolved here" in text
    other = printed("gpt-oss-120b", "engine.args.page_size=16", "trainer.packing=false")
    assert other.count("not in the table of shipped recipes") == 2
    assert "gpu-choices" not in printed("quickstart"), "on a CPU"


def test_trainers_on_one_card_have_a_backend_of_attention() -> None:
    """Transformer Engine's answer for their rows, packed or padded.

    Where a card has none, the trainer's error names local layers (test_trainer_remedies.py).
    """
    rows = [row for row in TABLE["trainers"].values() if "gpu1" in str(row["recipes"])]
    named = {recipe for row in rows for recipe in row["recipes"]}
    assert {"quickstart cluster=gpu1", "quickstart-lora cluster=gpu1", "olmoe-1gpu"} <= named
    assert {row["backend"] for row in rows} == {"FusedAttention (cuDNN)"}


def test_where_a_model_lies_changes_no_choice() -> None:
    config = resolve(load_config("olmoe-1b-7b"))
    placed, shapes = placement(config), model_shapes(config)

    def key(folder: str, **more: Any) -> str:
        args = gpu_choices.engine_arguments(config, placed, 1, Path(folder), shapes)
        return gpu_choices.engine_key("H100", args | more, shapes)

    assert key("/a") == key("/b", port=1)
    assert key("/a") != key("/a", page_size=16)


@pytest.mark.parametrize(
    ("overrides", "phase", "backend"),
    [
        ((), "prefill", "fa3 on Hopper"),
        (("engine.args.attention_backend=flashinfer",), "prefill", "flashinfer"),
        (("engine.args.prefill_attention_backend=triton",), "decode", "fa3 on Hopper"),
    ],
)
def test_a_float32_engine_without_float32_attention_is_refused(
    overrides: tuple[str, ...], phase: str, backend: str
) -> None:
    fp32 = ("cluster=node8", "engine.dtype=float32")
    with pytest.raises(ConfigError) as caught:
        printed("quickstart", *fp32, *overrides)
    assert caught.value.field == "engine.dtype"
    assert f"attention of {phase} would be {backend}, without float32: set" in str(caught.value)
    assert "engine.dtype=bfloat16" in str(caught.value)
    printed("quickstart", *fp32, "engine.args.attention_backend=triton")
    printed("quickstart", *fp32, "engine.platform=cpu")
    printed("quickstart", "cluster=node8")


def test_heads_that_no_rotary_kernel_has_are_refused() -> None:
    """SGLang's own assertion: tools/engine_kernels.py plays a start to its first forward pass."""
    heads = "model.tiny.head_dim=32"
    for cluster in ("gpu1", "node8"):
        with pytest.raises(
            ConfigError, match=r"model\.tiny\.head_dim = 32 .* heads of 64, 128, 256"
        ):
            printed("quickstart", f"cluster={cluster}", heads)
        printed("quickstart", f"cluster={cluster}")
    for cluster in ("slurm", "kuberay"):
        assert load_config("quickstart", (f"cluster={cluster}",)).model.tiny.head_dim == 64
    fp32 = ("engine.dtype=float32", "engine.args.attention_backend=triton")
    printed("quickstart", "cluster=gpu1", heads, *fp32)
    printed("quickstart", heads)


def test_sinks_and_windows_over_context_parallel_ranks_are_refused() -> None:
    """Transformer Engine's own answer: tests/multi/test_gpu_choices.py."""
    layout = ("trainer.parallel.cp=2", "trainer.parallel.dp=4")
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.cp = 2 .* set it to 1"):
        printed("gpt-oss-120b", *layout)
    printed("qwen3-235b-a22b")  # control: cp 2
