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
from moerl.config.schema import AlgorithmConfig, Config
from moerl.core.errors import ConfigError
from tests.helpers.rank_server import run_code

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


def own_objective(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    """-clip_high A theta."""
    off = torch.zeros_like(old, dtype=torch.bool)
    return TokenLoss(-s.clip_high * t.advantage * t.logprob, off, off, off)


OWN = f"{__name__}:own_objective"


def test_an_objective_may_be_a_users_own() -> None:
    assert choose("algorithm.objective", OWN, OBJECTIVES) is own_objective


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


def test_a_kl_inside_the_reward_needs_a_reference_and_a_pass_before_the_step() -> None:
    assert needed(AlgorithmConfig(advantage="reinforce_pp")) == set()
    inside = AlgorithmConfig(advantage="reinforce_pp", reward_kl_coef=0.1)
    assert needed(inside) == {"reference", "proximal_pass"}
    assert ref_models_of(replace(config(), algorithm=inside)) == {"reference": ""}
    check_algorithm(replace(config(), algorithm=inside))


@pytest.mark.parametrize(
    "algorithm", [{"advantage": "gae"}, {"kl": "k3", "kl_coef": 0.1}], ids=["critic", "reference"]
)
def test_a_second_model_takes_any_layout(algorithm: dict[str, Any]) -> None:
    base = config(**algorithm)
    parallel = replace(base.trainer.parallel, tp=2, etp=2, pp=2, cp=2, vpp=2)
    check_algorithm(replace(base, trainer=replace(base.trainer, parallel=parallel)))
