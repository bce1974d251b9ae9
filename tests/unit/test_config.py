"""Every bad setting is one sentence that names the field, the value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import Config, load_config, resolve, save_config
from moerl.config.checks import _AT_LEAST, _CHOICES, _POSITIVE, check, check_divides, get
from moerl.config.load import load_saved
from moerl.config.schema import ParallelConfig
from moerl.errors import ConfigError

BAD = [
    ("run.stepz=3", "run.stepz = 3", "unknown key; run has name, root, seed, steps, console"),
    ("run.steps=many", "run.steps = 'many'", "int is needed"),
    ("run.steps=0", "run.steps = 0", "at least 1"),
    ("sampling.top_p=1.5", "sampling.top_p = 1.5", "in (0, 1]"),
    ("sampling.top_p=high", "sampling.top_p = 'high'", "float is needed"),
    ("sampling.top_k=1", "sampling.top_k = 1", "greedy sampling has no gradient"),
    ("sampling.top_k=100000", "sampling.top_k = 100000", "2..4096"),
    ("sampling.temperature=0", "sampling.temperature = 0.0", "above 0"),
    ("trainer.parallel.ep=3", "trainer.parallel.ep = 3", "must divide tp x cp x dp = 2"),
    ("trainer.parallel.vpp=2", "trainer.parallel.vpp = 2", "interleaved over stages"),
    ("trainer.dtype=fp8", "trainer.dtype = 'fp8'", "fp32 or bf16"),
    ("task.name=poetry", "task.name = 'poetry'", "sort_digits, reasoning_gym or jsonl"),
    ("trainer.megatron.moe_router_fusion=true", "moe_router_fusion = True", "before replay"),
    ("rollout.max_lag=0", "rollout.max_lag = 0", "buffer_depth=0"),
    ("trainer.minibatches=3", "trainer.minibatches = 3", "divide rollout.groups_per_step = 32"),
    ("replay.rows=latest", "replay.rows = 'latest'", "newest segment"),
    ("rollout.in_flight_mode=pause", "in_flight_mode = 'pause'", "in_place or retract"),
    ("replay.probe=-1", "replay.probe = -1", "at least 0"),
    ("replay.routing=R9", "replay.routing = 'R9'", "R3, R2 or off"),
    ("bogus.key=1", "bogus", "unknown key"),
    ("steps", "override = 'steps'", "key=value"),
]


@pytest.mark.parametrize(("override", "names", "allows"), BAD, ids=[b[0] for b in BAD])
def test_bad_override(override: str, names: str, allows: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(resolve(load_config("quickstart", [override])))
    text = str(error.value)
    assert names in text
    assert allows in text
    assert "\n" not in text


def test_tp_without_expert_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="silently wrong"):
        check(
            load_config(
                "quickstart",
                ["trainer.parallel.tp=2", "trainer.parallel.ep=1", "trainer.parallel.etp=1"],
            )
        )


def test_broadcast_interrupts_requests() -> None:
    bad = ["sync.transport=broadcast", "rollout.in_flight_mode=in_place"]
    with pytest.raises(ConfigError, match=r"in_flight_mode = 'in_place' .*another sync.transport"):
        check(load_config("quickstart", bad))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "none without rollout.group_quorum"),
        (["rollout.selection=strict"], "strict would wait"),
        (["rollout.fixed_lag=1"], "lag is not fixed"),
        (["algorithm.advantage=online_dpo", "algorithm.objective=dpo"], "pairs siblings"),
    ],
)
def test_late_siblings_cannot_be_carried_everywhere(overrides: list[str], says: str) -> None:
    quorum = ["rollout.group_quorum=4", "rollout.slice_tokens=2"] if overrides else []
    carry = ["rollout.late_siblings=carry", *quorum, *overrides]
    with pytest.raises(ConfigError, match=says):
        check(load_config("quickstart", carry), starts=False)


def test_a_quorum_needs_slices() -> None:
    with pytest.raises(ConfigError, match="only close between calls"):
        check(load_config("quickstart", ["rollout.group_quorum=4"]))
    with pytest.raises(ConfigError, match=r"group_quorum = 9 .*group_size = 8"):
        check(load_config("quickstart", ["rollout.group_quorum=9", "rollout.slice_tokens=2"]))


def test_ranks_must_divide_the_model() -> None:
    hf = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_experts": 16}
    check_divides(ParallelConfig(tp=2, ep=4, dp=4), 2, hf)
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.ep = 3 .* num_experts, 16"):
        check_divides(ParallelConfig(ep=3, dp=3), 1, hf)
    with pytest.raises(ConfigError, match=r"engine\.tp = 3 .* num_attention_heads, 8"):
        check_divides(ParallelConfig(), 3, hf)


def test_stages_must_divide_the_layers() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.pp = 3 .* num_hidden_layers, 8"):
        check_divides(ParallelConfig(pp=3), 1, {"num_hidden_layers": 8})
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.vpp = 6 "):
        check_divides(ParallelConfig(pp=2, vpp=3), 1, {"num_hidden_layers": 8})


def test_every_check_names_a_field_that_exists() -> None:
    for name in (*_CHOICES, *_AT_LEAST, *_POSITIVE):
        get(Config(), name)


def test_defaults_are_their_own_choices() -> None:
    check(Config())


def test_a_truncating_recipe_gets_the_bound() -> None:
    config = resolve(load_config("quickstart", ["sampling.top_k=-1", "sampling.mask_top_k=77"]))
    assert config.sampling.top_k == 77
    free = resolve(load_config("quickstart", ["sampling.top_k=-1", "sampling.top_p=1.0"]))
    assert free.sampling.top_k == -1


def test_saved_configuration_comes_back_equal(tmp_path: Path) -> None:
    config = resolve(load_config("quickstart", ["engine.args.log_level=info", "run.seed=9"]))
    save_config(config, tmp_path / "config.yaml")
    assert load_saved(tmp_path / "config.yaml") == config


def test_every_field_is_described_in_the_schema_by_a_type() -> None:
    def walk(section: object) -> None:
        for item in fields(section):  # type: ignore[arg-type]
            value = getattr(section, item.name)
            assert item.type, item.name
            if is_dataclass(value):
                walk(value)

    walk(Config())


# --- through the command line --------------------------------------------------------------------
def fails(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert isinstance(result.exception, ConfigError), result.exception
    return str(result.exception)


def test_missing_model_folder() -> None:
    text = fails("train", "quickstart", "model.tiny.enabled=false", "model.path=/no/such")
    assert text.startswith("model.path = '/no/such' is not usable: a Hugging Face model folder")


def test_a_model_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    assert "no *.safetensors" in fails("train", "quickstart", f"model.path={tmp_path}")


def test_unreadable_prompt_file(tmp_path: Path) -> None:
    text = fails("train", "quickstart", "task.name=jsonl", f"task.path={tmp_path}/none.jsonl")
    assert text.startswith("task.path = ")
    assert "JSONL" in text


def test_unknown_recipe_lists_the_known_ones() -> None:
    assert "quickstart" in fails("train", "no-such-recipe")


def test_resume_of_nothing() -> None:
    assert fails("train", "--resume", "no-such-run").startswith("--resume = 'no-such-run'")


def test_dry_run_starts_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["train", "quickstart", f"run.root={tmp_path}", "--dry-run", "--run", "x"]
    )
    assert result.exit_code == 0, result.output
    assert "torch.distributed.run" in result.output
    assert "trainer rank" in result.output
    assert not list(tmp_path.iterdir())


def test_help_shows_examples() -> None:
    text = CliRunner().invoke(app, ["train", "--help"]).output
    assert "--resume" in text
    assert "moerl train quickstart" in text
