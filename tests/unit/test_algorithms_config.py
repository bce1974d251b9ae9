"""The table of algorithms: every line loads, every refusal names its field, nothing is silent."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moerl.algorithms.objectives import TokenLoss
from moerl.algorithms.registry import choose
from moerl.algorithms.tokens import Tokens
from moerl.config.algorithms import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KLS,
    OBJECTIVES,
    check_algorithm,
    needed,
    ref_models_of,
)
from moerl.config.schema import AlgorithmConfig, Config, SamplingConfig, TeacherConfig
from moerl.config.validate import validate
from moerl.core.errors import ConfigError
from tests.helpers.rank_server import run_code

TEACHERS = [TeacherConfig(path="somewhere")]
TABLES = {
    "advantage": ADVANTAGES,
    "objective": OBJECTIVES,
    "corrections": CORRECTIONS,
    "kl": KLS,
    "aggregation": AGGREGATIONS,
}


def config(**algorithm: object) -> Config:
    return Config(algorithm=AlgorithmConfig(**algorithm))


def test_every_line_names_a_documented_function_and_existing_settings() -> None:
    settings = {field.name for field in fields(AlgorithmConfig)}
    document = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    for table_name, table in TABLES.items():
        for name, line in table.items():
            function = choose(f"algorithm.{table_name}", name, table)
            assert function.__doc__, name
            assert set(line.reads) <= settings, name
            assert f"`{name}`" in document, f"{name} is missing in docs/algorithms.md"
    for setting in settings:
        assert f"`{setting}" in document or f"{setting}:" in document, setting


@pytest.mark.parametrize("table", TABLES)
def test_an_unknown_name_lists_the_known_ones(table: str) -> None:
    wrong = ["nothing"] if table == "corrections" else "nothing"
    with pytest.raises(ConfigError, match=f"algorithm.{table} .*known names are ") as caught:
        check_algorithm(config(**{table: wrong}))
    assert all(name in str(caught.value) for name in TABLES[table])


@pytest.mark.parametrize(
    ("field", "algorithm"),
    [
        ("tis_cap", {"tis_cap": 3.0}),
        ("lag_decay_base", {"lag_decay_base": 0.5}),
        ("clip_low", {"objective": "reinforce", "clip_low": 0.1}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("off_policy_delta", {"off_policy_delta": 0.1}),
        ("teachers", {"teachers": TEACHERS}),
        ("reference", {"reference": "somewhere"}),
        ("constant_tokens", {"constant_tokens": 8}),
        ("centering_top_k", {"centering_top_k": 8}),
        ("distill_over", {"distill_over": "support"}),
        ("distill_kl", {"distill_kl": "forward"}),
        ("distill_top_k", {"distill_top_k": 8}),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(field: str, algorithm: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{field} .*nothing that is configured reads"):
        check_algorithm(config(**algorithm))


@pytest.mark.parametrize(
    ("field", "algorithm"),
    [
        ("off_policy_delta", {"corrections": ["opsm"]}),
        ("corrections", {"corrections": ["tis_token"]}),  # the ratio holds prox / mu already
        ("corrections", {"corrections": ["tis_token", "icepop"], "ratio": "proximal"}),
        ("corrections", {"corrections": ["lag", "lag"]}),
        ("lag_decay_base", {"corrections": ["lag_decay"], "lag_decay_base": 0.0}),
        ("lag_decay_base", {"corrections": ["lag_decay"], "lag_decay_base": 1.5}),
        ("m2_limit", {"corrections": ["m2"], "m2_limit": 0.0}),
        ("dpo_beta", {"advantage": "online_dpo", "dpo_beta": 0.0}),
        ("tis_cap", {"corrections": ["tis_token"], "ratio": "proximal", "tis_cap": 0.0}),
        ("ratio", {"ratio": "old"}),
        ("ratio", {"objective": "dppo_tv", "ratio": "proximal"}),
        ("constant_tokens", {"aggregation": "constant"}),
        ("dual_clip", {"objective": "ppo_dual_clip", "dual_clip": 1.0}),
        ("icepop_low", {"corrections": ["icepop"], "ratio": "proximal", "icepop_low": 9.0}),
        ("kl_coef", {"kl": "unbiased"}),
        ("teachers", {"distill_coef": 1.0}),
        ("reference", {"kl": "k3", "kl_coef": 0.1, "reference": "nowhere"}),
        ("overlong_buffer", {"overlong_buffer": 10**6}),
    ],
)
def test_what_does_not_fit_is_refused(field: str, algorithm: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{field} "):
        both(config(**algorithm))


CENTERED = (
    {"objective": "reinforce"},
    {"objective": "reinforce", "corrections": ["tis_token"]},
    {"ratio": "proximal", "corrections": ["icepop", "lag"], "lag_cap": 1},
    {"objective": "cispo"},
    {"objective": "ppo_clip", "corrections": ["lag_decay"]},
    {"objective": "ppo_dual_clip"},
)


@pytest.mark.parametrize("algorithm", CENTERED)
def test_score_centering_takes_what_exact_sums_show(algorithm: dict[str, Any]) -> None:
    both(config(centering=True, **algorithm))


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ({"objective": "gspo"}, "term is known for"),
        ({"objective": "dppo_tv"}, "term is known for"),
        ({"objective": "reinforce", "corrections": ["mis_token"]}, "term is known for"),
        ({"corrections": ["opsm"], "off_policy_delta": 0.1}, "term is known for"),
        ({"distill_coef": 1.0}, "term is known for"),
        ({"objective": "importance"}, "without bounds is 0"),
        ({"objective": "reinforce", "corrections": ["importance"]}, "without bounds is 0"),
    ],
)
def test_score_centering_refuses_the_others(algorithm: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.centering .*{why}"):
        check_algorithm(config(centering=True, **algorithm), folders=False)


def test_score_centering_around_prox_takes_one_optimizer_step_per_batch() -> None:
    several = replace(Config().trainer, minibatches=4)
    for algorithm in CENTERED:
        found = replace(config(centering=True, **algorithm), trainer=several)
        if algorithm.get("ratio") == "proximal" or "tis_token" in str(algorithm):
            with pytest.raises(ConfigError, match=r"algorithm.centering "):
                check_algorithm(found)
        else:
            check_algorithm(found)


def test_score_centering_needs_the_masks_of_truncated_sampling() -> None:
    base = replace(config(centering=True), sampling=SamplingConfig(top_p=0.9))
    check_algorithm(base)
    off = replace(base, replay=replace(base.replay, sampling_mask=False))
    with pytest.raises(ConfigError, match=r"algorithm.centering .*replay.sampling_mask=true"):
        check_algorithm(off)


@pytest.mark.parametrize("top_p", [0.9, 1.0])
@pytest.mark.parametrize("over", ["support", "teacher_top_k"])
def test_the_kl_to_a_teacher_is_over_what_the_trainer_scores(over: str, top_p: float) -> None:
    base = replace(
        config(distill_coef=1.0, distill_over=over, distill_kl="forward", teachers=TEACHERS),
        sampling=SamplingConfig(top_p=top_p),
    )
    if (over == "support") == (top_p < 1):
        check_algorithm(base, folders=False)
        apart = replace(base, ref_models=replace(base.ref_models, placement="separate"))
        with pytest.raises(ConfigError, match=r"algorithm.distill_over .*placement=trainer"):
            check_algorithm(apart, folders=False)
        return
    with pytest.raises(ConfigError, match=r"algorithm.distill_over .*use support where sampling"):
        check_algorithm(base, folders=False)


def both(found: Config) -> None:
    validate(found)
    check_algorithm(found)


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"corrections": ["tis_token", "opsm", "lag"], "ratio": "proximal", "off_policy_delta": 0.1},
        {"corrections": ["tis_token"], "objective": "reinforce"},
        {"corrections": ["lag_decay", "lag"], "lag_cap": 2, "lag_decay_base": 0.5},
        {"corrections": ["lag_decay", "tis_token"], "ratio": "proximal"},
        {"corrections": ["mis_geometric", "opsm"], "off_policy_delta": 0.1},
        {"kl": "unbiased", "kl_coef": 0.01},
        {"aggregation": "constant", "constant_tokens": 8},
    ],
)
def test_control_what_fits_is_accepted(algorithm: dict[str, object]) -> None:
    both(config(**algorithm))


def own_objective(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-clip_high A theta."""
    off = torch.zeros_like(old, dtype=torch.bool)
    return TokenLoss(-s.clip_high * t.advantage * t.logprob, off, off, off)


OWN = f"{__name__}:own_objective"


def test_an_objective_may_be_a_users_own() -> None:
    assert choose("algorithm.objective", OWN, OBJECTIVES) is own_objective
    check_algorithm(config(objective=OWN, clip_high=0.5))
    check_algorithm(config(objective=OWN, corrections=["tis_token"], ratio="proximal"))
    with pytest.raises(ConfigError, match=r"algorithm.corrections .*already contains"):
        check_algorithm(config(objective=OWN, corrections=["tis_token"]))


@pytest.mark.parametrize("name", ["mine", "mine:", ":mine"])
def test_another_objective_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cispo, .*; or give package.module:function"):
        check_algorithm(config(objective=name))


@pytest.mark.parametrize(
    ("name", "why"), [("none.such:f", "No module named"), (f"{__name__}:none", "no attribute")]
)
def test_an_own_objective_that_is_not_there_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm.objective .*{why}.*use cispo, "):
        choose("algorithm.objective", name, OBJECTIVES)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.such:f", "have no module none.such"),
        ("heavy.none:loss", "have no module heavy.none"),
        ("heavy.objectives:lost", "objectives.py defines no lost"),
    ],
)
def test_an_own_objective_is_looked_for_before_a_run_without_an_import(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "heavy"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "objectives.py").write_text(
        "raise SystemExit('imported')\nfrom somewhere import given\ndef loss(): ...\nalias = loss\n"
    )
    (package / "open.py").write_text("from somewhere import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    for good in ("heavy.objectives:loss", "heavy.objectives:alias", "heavy.objectives:given"):
        check_algorithm(config(objective=good))
    check_algorithm(config(objective="heavy.open:anything"))
    with pytest.raises(ConfigError, match=rf"algorithm.objective .*{why}"):
        check_algorithm(config(objective=name))
    check_algorithm(config(objective=name), folders=False)  # a manifest: its image may have it


def test_a_trainer_does_not_start_without_its_objective() -> None:
    """Before the model is touched; in a process of its own, because megatron-core is patched."""
    start = (
        "from moerl.trainer.model import platform\n"
        "platform.prepare('cpu')\n"
        "from moerl.config.schema import AlgorithmConfig, Config\n"
        "from moerl.trainer.learner.step import Learner\n"
        "Learner(None, None, Config(algorithm=AlgorithmConfig(objective='os:none')), None)\n"
    )
    done = run_code(start)
    assert "algorithm.objective = 'os:none' is not usable" in done.stderr


def test_only_objectives_may_be_a_users_own() -> None:
    with pytest.raises(ConfigError, match=r"algorithm.advantage .*known names are gae, "):
        check_algorithm(config(advantage=OWN))


def test_process_rewards_need_a_reward_that_gives_them() -> None:
    base = config(advantage="process_mean")
    with pytest.raises(ConfigError, match=r"task.reward .*process_mean needs a reward per step"):
        check_algorithm(base)
    for reward in ("position_steps", "mine:reward"):
        check_algorithm(replace(base, task=replace(base.task, reward=reward)))


def test_a_group_of_one_is_refused_where_siblings_are_needed() -> None:
    alone = replace(config(), rollout=replace(Config().rollout, group_size=1))
    with pytest.raises(ConfigError, match=r"rollout.group_size .*no siblings"):
        check_algorithm(alone)
    check_algorithm(replace(alone, algorithm=AlgorithmConfig(advantage="reinforce_pp")))
    steps = replace(
        alone,
        algorithm=AlgorithmConfig(advantage="process_mean"),
        task=replace(alone.task, reward="position_steps"),
    )
    with pytest.raises(ConfigError, match=r"rollout.group_size .*no siblings"):
        check_algorithm(steps)  # its steps all right or all wrong: the same advantages


PAIRS = {
    "advantage": "online_dpo",
    "objective": "reinforce",
    "aggregation": "seq_mean_token_sum",
}


def test_online_dpo_is_refused_where_its_gradient_would_be_another() -> None:
    check_algorithm(config(**PAIRS))
    for other in ({"objective": "ppo_clip"}, {"aggregation": "token_mean"}):
        with pytest.raises(ConfigError, match=f"algorithm.{next(iter(other))} .*online_dpo"):
            check_algorithm(config(**(PAIRS | other)))
    several = replace(config(**PAIRS), trainer=replace(Config().trainer, minibatches=2))
    with pytest.raises(ConfigError, match=r"trainer.minibatches .*online_dpo"):
        check_algorithm(several)


def test_a_kl_inside_the_reward_needs_a_reference_and_a_pass_before_the_step() -> None:
    assert needed(AlgorithmConfig(advantage="reinforce_pp")) == set()
    inside = AlgorithmConfig(advantage="reinforce_pp", reward_kl_coef=0.1)
    assert needed(inside) == {"reference", "proximal_pass"}
    assert ref_models_of(replace(config(), algorithm=inside)) == {"reference": ""}
    check_algorithm(replace(config(), algorithm=inside))
    with pytest.raises(ConfigError, match=r"reward_kl_coef .*gae, reinforce_pp would"):
        check_algorithm(config(advantage="grpo_mean", reward_kl_coef=0.1))


@pytest.mark.parametrize(
    "algorithm", [{"advantage": "gae"}, {"kl": "k3", "kl_coef": 0.1}], ids=["critic", "reference"]
)
def test_a_second_model_takes_any_layout(algorithm: dict[str, Any]) -> None:
    base = config(**algorithm)
    parallel = replace(base.trainer.parallel, tp=2, etp=2, pp=2, cp=2, vpp=2)
    check_algorithm(replace(base, trainer=replace(base.trainer, parallel=parallel)))
