"""`trainer.megatron` and `lora.start` are judged before a start, by the code of a rank."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from moerl.config import load_config
from moerl.core.errors import ConfigError
from moerl.launch import trainer_check
from moerl.launch.trainer_check import check_trainer
from moerl.planning.estimates import model_shapes
from moerl.trainer.start_check import Job
from tests.helpers.rank_server import run_code

PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from moerl.config.validate import read_section
from moerl.core.errors import ConfigError
from moerl.trainer.start_check import Job, try_settings
answers = []
for job in json.load(sys.stdin):
    try:
        answers.append("said: " + try_settings(read_section(Job, job)))
    except ConfigError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
ON_CPU, ON_GPUS = "quickstart", "qwen3-30b-a3b"
CASES = [  # recipe, setting, part of the answer
    (ON_CPU, "", "said: $"),
    (ON_GPUS, "", "said: $"),
    (
        ON_CPU,
        "hidden_dropuot=0.1",
        "hidden_dropuot = 0.1 .*did you mean hidden_dropout",
    ),
    (ON_GPUS, "hidden_dropout=a bit", "hidden_dropout = 'a bit' is not usable: a float is needed"),
    (ON_CPU, "hidden_dropout=0.1", "said: $"),
    (ON_GPUS, "moe_enable_deepep=true", "megatron-core says: DeepEP backend is only"),
    (ON_CPU, "fp8=e4m3", "megatron-core says: .*transformer-engine"),
    (ON_GPUS, "fp8=e4m3", "said: .*(tried without Transformer Engine|$)"),
    (ON_GPUS, "moe_expert_capacity_factor=1.0", "drops tokens after the replayed choice"),
    (ON_GPUS, "mtp_num_layers=1", "multi-token prediction is not supported"),
    (ON_GPUS, "moe_router_load_balancing_type=aux_loss", "use seq_aux_loss or none"),
    (ON_GPUS, "moe_router_load_balancing_type=seq_aux_loss", "said: $"),
    (ON_GPUS, "recompute_method=sometimes", "megatron-core says: recompute_method"),
    (
        ON_CPU,
        "attention_dropout=0.1",
        "attention_dropout = 0.1 .*must be 0 with local layers",
    ),
    (ON_GPUS, "attention_dropout=0.1", "said: $"),
    (ON_GPUS, "hidden_size=64", "it follows from the model"),
    (ON_GPUS, "moe_permute_fusion=false", "said: $"),
]


def job(recipe: str, setting: str) -> dict[str, object]:
    config = load_config(recipe, [f"trainer.megatron.{setting}"] if setting else [])
    hf = model_shapes(config)
    return asdict(Job(config.trainer, hf, replays=True, gpu=recipe == ON_GPUS))


@pytest.fixture(scope="module")
def answers() -> list[str]:
    done = run_code(PROGRAM, input=json.dumps([job(*case[:2]) for case in CASES]))
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("index", range(len(CASES)))
def test_a_field_is_refused_or_taken_as_by_a_rank(answers: list[str], index: int) -> None:
    assert re.search(CASES[index][2], answers[index]), answers[index]


def test_the_command_asks_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_trainer(load_config("quickstart"), {}) == [], "nothing is set: no process"
    config = load_config("quickstart", ["trainer.megatron.mtp_num_layers=1"])
    with pytest.raises(ConfigError, match=r"trainer\.megatron\.mtp_num_layers = 1"):
        check_trainer(config, model_shapes(config))
    monkeypatch.setattr(trainer_check.importlib.util, "find_spec", lambda _: None)
    (said,) = check_trainer(config, model_shapes(config))
    assert "was not checked: megatron-core is not installed" in said
