"""`trainer.megatron`: any TransformerConfig field, and one sentence for what cannot be set.

Megatron is imported in a process of its own: on the CPU it needs torch patched, which other tests
must not see.
"""

from __future__ import annotations

import json

import pytest

from tests.helpers.rank_server import run_code

PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
from moerl.trainer.model.platform import Platform, prepare
place = prepare("cpu")
from moerl.config.schema import TinyModel, TrainerConfig
from moerl.core.errors import ConfigError
from moerl.layout import model_spec
from moerl.trainer.model.transformer import transformer_config
from tests.helpers.tiny_families import family_config
hf = dict(model_type="qwen3_moe", vocab_size=64, hidden_size=32, num_hidden_layers=2,
          num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
          num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=64,
          norm_topk_prob=True)
answers = []
te = Platform("cuda", place.device, "nccl", "te")  # its fusions are refused where TE is missing
for fields, replay, name, fused in json.loads(sys.argv[1]):
    try:
        config = transformer_config(
            model_spec(hf if name == "qwen" else family_config(name, TinyModel(), 128)),
            TrainerConfig(megatron=fields), te if fused else place, with_replay=replay)
        answers.append({name: str(getattr(config, name)) for name in fields})
    except ConfigError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""
REFUSED = [
    ({"hidden_dropuot": 0.1}, True, "did you mean hidden_dropout"),
    ({"hidden_size": 64}, True, "it follows from the model"),
    ({"moe_router_fusion": True}, True, "platform"),
    ({"moe_enable_routing_replay": True}, True, "attaches its own replay"),
    ({"moe_aux_loss_coeff": 0.01}, True, "seq_aux_loss"),
    ({"moe_router_load_balancing_type": "aux_loss"}, True, "another split"),
    ({"moe_expert_capacity_factor": 1.0}, True, "drops tokens"),
    ({"recompute_granularity": "partial"}, False, "megatron-core says"),
    ({"hidden_dropout": "a bit"}, False, "float is needed"),
    ({"moe_z_loss_coeff": 0.1}, False, "with replayed routes"),
    ({"cuda_graph_impl": "local"}, True, "a captured router is replayed without asking"),
    ({"enable_cuda_graph": True}, True, "not with routing replay"),
    ({"defer_embedding_wgrad_compute": True}, False, "the head computes its own gradient"),
    ({"fp8_output_proj": True}, False, "the head's products are in the trainer's dtype"),
]
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ACCEPTED = [
    ({"moe_router_dtype": "fp64"}, True),
    ({"hidden_size": 32}, True),
    (RECOMPUTE, True),
    ({"moe_expert_capacity_factor": 1.0}, False),
    ({"cuda_graph_impl": "none", "enable_cuda_graph": False}, True),
]
UNFUSED = {"apply_rope_fusion": False, "moe_permute_fusion": False}
ON_CUDA = [  # fields, family, answer
    ({"moe_permute_fusion": False}, "qwen", "apply_rope_fusion is not available"),
    ({"apply_rope_fusion": False}, "qwen", "fused permutation is not available"),
    (UNFUSED | {"bias_dropout_fusion": False}, "qwen", ""),
    # the kernel for packed rows knows nothing of YaRN's factor
    ({"apply_rope_fusion": True}, "gpt_oss", "it follows from the model"),
    ({"moe_permute_fusion": False}, "gpt_oss", ""),
    # megatron-core refuses it when it makes experts with biases
    ({"bias_dropout_fusion": True}, "gpt_oss", "it follows from the model"),
    ({"bias_dropout_fusion": False, "moe_permute_fusion": False}, "gpt_oss", ""),
    ({"moe_permute_fusion": False}, "deepseek_v3", ""),
]


@pytest.fixture(scope="module")
def answers() -> list[object]:
    cases = [(*case[:2], "qwen", False) for case in [*REFUSED, *ACCEPTED]]
    cases += [(fields, True, family, True) for fields, family, _ in ON_CUDA]
    done = run_code(PROGRAM, json.dumps(cases))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refused_in_one_sentence(index: int, answers: list[object]) -> None:
    fields, _, expected = REFUSED[index]
    answer = answers[index]
    assert isinstance(answer, str), f"{fields} was accepted"
    assert expected in answer
    assert "trainer.megatron" in answer


def test_accepted(answers: list[object]) -> None:
    found = answers[len(REFUSED) : len(REFUSED) + len(ACCEPTED)]
    for (fields, _), answer in zip(ACCEPTED, found, strict=True):
        assert answer == {name: str(value) for name, value in fields.items()}


def test_fusions_are_on_with_transformer_engine_and_each_can_be_set(answers: list[object]) -> None:
    """Where it is missing megatron-core refuses the fusions that need it, one by one."""
    for (fields, family, expected), answer in zip(ON_CUDA, answers[-len(ON_CUDA) :], strict=True):
        if expected:
            assert isinstance(answer, str), f"{family} {fields} was accepted"
            assert expected in answer
        else:
            assert answer == {name: str(value) for name, value in fields.items()}, family
