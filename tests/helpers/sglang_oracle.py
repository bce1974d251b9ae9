"""What SGLang itself puts into every parameter of every rank: the oracle of the engine's layout.

Run as a program it writes, per model, a random checkpoint made from a transformers config, and per
layout and rank the parameters of SGLang's own model class after its own `load_weights` and
post-load hooks.  Every parameter is NaN before loading, so what the loader leaves alone shows.

One process plays all ranks, one after another: torch's fake process group answers for the others,
which is enough because loading never communicates.  Rejected: gloo processes (20 s of imports for
each rank; a rank takes 20 ms here).

    FOLDER/MODEL/                           config.json, model.safetensors
    FOLDER/FP8_MODEL.plain/                 of FP8_MODELS, before they were quantised
    FOLDER/loaded/CASE.RANK.safetensors     of CASES
    FOLDER/loaded/VARIANT.0.safetensors     of VARIANTS, one rank
    FOLDER/reports.json                     of each case and runner: its resolved arguments
    FOLDER/refused.json                     of REFUSED_CASES: the error of each
    FOLDER/failed.json                      why a case, runner or variant did not load

An entry that fails (its config lacks a field that SGLang's class reads, say) is reported by the
tests of that entry alone.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moerl.config.schema import TinyModel
from tests.helpers.tiny_families import FAMILY_FIELDS, family_config

_BASE: dict[str, Any] = {
    "vocab_size": 130,  # padded to 192: the last rank of tp 4 holds padding only
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # fewer than tp 4
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_MOE = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "rope_parameters": {
        "rope_type": "yarn",  # SGLang has no other rotary embedding for this family on a CPU
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_V2 = _MLA | {"n_shared_experts": 2, "scoring_func": "softmax"}
_GLM: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", _MOE | {"head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", _MOE | {"shared_expert_intermediate_size": 24}),
    "mixtral": (
        "MixtralConfig",
        {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmoe": (
        "OlmoeConfig",
        {
            "num_key_value_heads": 8,
            "intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "eos_token_id": 1,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        _V2 | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        _V2 | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _MLA
        | {
            "num_nextn_predict_layers": 0,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "deepseek_v3_mtp": ("DeepseekV3Config", {}),  # set below
    "glm4_moe": ("Glm4MoeConfig", _GLM | {"use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "glm4_moe_air": ("Glm4MoeConfig", _GLM | {"use_qk_norm": False, "num_nextn_predict_layers": 0}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            "head_dim": 8,
            "intermediate_size": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rotary_dim": 4,
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 8,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 2,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _MOE
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 24,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "full_attention_interval": 4,
        },
    ),
    "llama4": (
        "Llama4Config",
        {
            "text_config": _BASE
            | {
                "head_dim": 8,
                "intermediate_size": 8,
                "intermediate_size_mlp": 48,
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "pad_token_id": 0,
            },
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 1},
        },
    ),
    "qwen3": ("Qwen3Config", {"intermediate_size": 48, "head_dim": 8}),
    "llama": ("LlamaConfig", {"intermediate_size": 48}),
    "llama_thirds": (
        "LlamaConfig",
        {
            "intermediate_size": 48,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 60,  # 64 rows do not divide by 3, so tp 3 pads to 192
        },
    ),
}
MODELS["deepseek_v32"] = (
    "DeepseekV32Config",
    MODELS["deepseek_v3"][1] | {"index_topk": 4, "index_n_heads": 3, "index_head_dim": 10},
)
MODELS["deepseek_v3_mtp"] = (
    "DeepseekV3Config",
    MODELS["deepseek_v3"][1] | {"num_nextn_predict_layers": 1},
)

_SHAPE = TinyModel(
    hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, num_experts=4, moe_ffn=8
)
for _family in FAMILY_FIELDS:  # a family without an entry above: its tiny model at these sizes
    _fields = family_config(_family, _SHAPE, _BASE["vocab_size"]) | {"dtype": "bfloat16"}
    if _fields.pop("model_type") == _family and _family not in MODELS:
        _class = _fields["architectures"][0].removesuffix("ForCausalLM")
        MODELS[_family] = (f"{_class}Config", _fields)

# Whole blocks of 128 x 128 on every rank of tp 2, and a kv_a of 192 rows that ends in half a block.
_BLOCKS = {"hidden_size": 256, "num_attention_heads": 4, "moe_intermediate_size": 256}
FP8_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe_fp8": (
        "Qwen3MoeConfig",
        _MOE | _BLOCKS | {"head_dim": 128, "num_key_value_heads": 2},
    ),
    "deepseek_v3_fp8": (
        "DeepseekV3Config",
        MODELS["deepseek_v3"][1]
        | _BLOCKS
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
}
"""Checkpoints in fp8 blocks, which engines serve as they are."""

_DENSE = _MOE | {"intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe_dense_layer": ("Qwen3MoeConfig", _DENSE | {"mlp_only_layers": [0]}),
    "qwen2_moe_sparse_step": ("Qwen2MoeConfig", _DENSE | {"decoder_sparse_step": 2}),
    **{
        f"{name}.tied": (config, change | {"tie_word_embeddings": True})
        for name, (config, change) in MODELS.items()
        # refused by moerl.layout: a prediction layer repeats the head
        if not change.get("num_nextn_predict_layers") and "text_config" not in change
    },
    "llama4.tied": (
        "Llama4Config",
        MODELS["llama4"][1]
        | {"text_config": MODELS["llama4"][1]["text_config"] | {"tie_word_embeddings": True}},
    ),
}
"""Models that load without an error; for some of them SGLang leaves parameters unfilled."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe_gqa": ("OlmoeConfig", MODELS["olmoe"][1] | {"num_key_value_heads": 2}),
    "deepseek_v3_plain_rope": (
        "DeepseekV3Config",
        {key: value for key, value in MODELS["deepseek_v3"][1].items() if key[:4] != "rope"},
    ),
}
"""Variants that SGLang 0.5.23 does not load on a CPU; REFUSED_CASES adds layouts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model under one engine layout."""

    model: str
    tp: int
    ep: int = 1
    dp: int = 1  # data-parallel attention: attention is cut over tp / dp
    dtype: str = "bfloat16"  # of the engine; checkpoints are bfloat16

    def __str__(self) -> str:
        more = [f"{axis}{size}" for axis, size in (("ep", self.ep), ("dp", self.dp)) if size > 1]
        more += [self.dtype] if self.dtype != "bfloat16" else []
        return "-".join([self.model, f"tp{self.tp}", *more])

    @property
    def server_args(self) -> dict[str, Any]:
        # gpt-oss is refused under torch_native attention before any module exists; no attention
        # runs here, so naming another backend changes nothing but that refusal.
        attention = "triton" if self.model == "gpt_oss" else "torch_native"
        return {
            "dtype": self.dtype,
            "tp_size": self.tp,
            "ep_size": self.ep,
            "dp_size": self.dp,
            "enable_dp_attention": self.dp > 1,
            "attention_backend": attention,
            **_ARGUMENTS.get(self.model, {}),
        }


# What a family needs to load without CUDA.
_ARGUMENTS: dict[str, dict[str, object]] = {
    "llama4": {"enable_multimodal": False},
    "qwen3_next": {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True},
}

CASES = (
    *(Case(model, tp) for model in MODELS for tp in (1, 2, 4) if model != "llama_thirds"),
    Case("llama_thirds", 3),
    Case("llama", 8),
    Case("qwen3_moe", 2, ep=2),
    Case("qwen3_moe", 4, ep=2),
    Case("qwen3_moe", 4, dp=2),
    Case("qwen3_moe", 4, ep=4, dp=4),
    Case("deepseek_v3", 4, ep=4),
    Case("deepseek_v3", 4, ep=2, dp=2),
    Case("qwen3_moe", 2, dtype="float16"),
    Case("glm4_moe", 2, dtype="float32"),
)

FP8_CASES = tuple(
    Case(model, tp, ep=ep) for model in FP8_MODELS for tp, ep in ((1, 1), (2, 1), (2, 2))
)

# Runners that keep experts in another form, the first one without changing a shape.
RUNNERS = ("flashinfer_cutlass", "triton_kernel")

EVERY_MODEL = MODELS | VARIANTS | REFUSED | FP8_MODELS
REFUSED_CASES = {
    **{name: Case(name, 1).server_args for name in REFUSED},
    "gpt_oss_ep": Case("gpt_oss", 2, ep=2).server_args,
    "gpt_oss_torch_native": Case("gpt_oss", 1).server_args | {"attention_backend": "torch_native"},
}


def write_model(folder: Path, transformers_config: str, change: dict[str, Any]) -> None:
    """A random checkpoint in the form that transformers writes, every tensor drawn anew.

    The expert bias is fp32 as in released files; transformers keeps that for some families only.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = getattr(transformers, transformers_config)(**_BASE | change)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())  # without what SGLang alone reads
    (folder / "config.json").write_text(json.dumps(change | written))
    generator = torch.Generator().manual_seed(len(folder.name))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if "text_config" in change:  # transformers saves the language model alone
        config.architectures = ["Llama4ForConditionalGeneration"]
        config.save_pretrained(folder)
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    if change.get("num_nextn_predict_layers"):
        tensors |= _prediction_layer(tensors)
    for name, tensor in tensors.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else tensor.dtype
        tensors[name] = torch.randn(tensor.shape, generator=generator).to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})


def _prediction_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """What released files add for one prediction layer; transformers has no such module."""
    import torch

    last, new = (f"model.layers.{_BASE['num_hidden_layers'] + i}." for i in (-1, 0))
    embed, norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    layer = {new + n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    return layer | {
        f"{new}enorm.weight": norm,
        f"{new}hnorm.weight": norm,
        f"{new}eh_proj.weight": torch.cat([embed[:32], embed[:32]], dim=1),
        f"{new}shared_head.norm.weight": norm,
        f"{new}shared_head.head.weight": embed,
        f"{new}embed_tokens.weight": embed,
    }


@dataclass(frozen=True, slots=True)
class Loaded:
    parameters: dict[str, Any]
    server_args: dict[str, Any]  # resolved
    refusal: str  # of `check_modules`, empty when the modules are canonical


def load(folder: Path, args: dict[str, Any], rank: int) -> Loaded:
    """SGLang's model on one rank, after its loader and its post-load hooks."""
    from moerl.engine.plugin.update_hooks import weights

    with opened(folder, args, rank) as engine:
        parameters = {name: value.detach().clone() for name, value in weights(engine.model).items()}
        return Loaded(parameters, engine.server_args.resolved_dict(), _refusal(engine.model))


@dataclass(frozen=True, slots=True)
class Engine:
    """SGLang's own objects of one rank."""

    model: Any
    config: Any
    server_args: Any


@contextmanager
def opened(folder: Path, args: dict[str, Any], rank: int) -> Iterator[Engine]:
    """SGLang's model on one rank, as long as its process groups are there."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_layer_runtime
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader.loader import (
        DefaultModelLoader,
        _get_quantization_config,
        _initialize_model,
    )
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    from moerl.engine.plugin.update_hooks import weights

    server_args = ServerArgs(
        model_path=str(folder),
        device="cpu",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        max_total_tokens=64,
        mem_fraction_static=0.2,
        **args,
    )
    server_args.resolve_once()
    world_rank = spawn_world_rank(server_args, tp_rank=rank, pp_rank=0)
    try:
        publish(
            server_args,
            role="scheduler",
            ranks=SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=0),
        )
        model_config = ModelConfig.from_server_args(server_args)
        initialize_moe_config()
        _fake_groups(rank, server_args.tp_size)
        initialize_dp_attention(server_args)
        init_layer_runtime(model_config=model_config)
        torch.set_default_dtype(model_config.dtype)
        form = _get_quantization_config(model_config, LoadConfig())
        model = _initialize_model(model_config, LoadConfig(), form)
        torch.set_default_dtype(torch.float32)
        with torch.no_grad():
            for parameter in weights(model).values():
                parameter.fill_(float("nan"))
        tensors = load_file(folder / "model.safetensors")
        DefaultModelLoader.load_weights_and_postprocess(
            model, iter(tensors.items()), torch.device("cpu")
        )
        yield Engine(model, model_config, server_args)
    finally:
        torch.set_default_dtype(torch.float32)
        _close_groups()
        reset_context()


def _refusal(model: Any) -> str:
    from moerl.core.errors import LayoutError
    from moerl.engine.plugin.loaded_weights import check_modules

    try:
        check_modules(model.named_modules())
    except LayoutError as error:
        return str(error)
    return ""


def _fake_groups(rank: int, size: int) -> None:
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    sys.excepthook = hook  # torch wraps it anew for every rank, and a traceback becomes unreadable
    real = dist.new_group

    def fake(ranks: list[int], **_options: object) -> Any:
        return real(ranks, backend="fake")

    dist.new_group = fake  # SGLang asks for gloo groups too, and those would wait for their peers
    try:
        parallel_state.init_distributed_environment(
            backend="fake", world_size=size, rank=rank, local_rank=0
        )
        parallel_state.initialize_model_parallel()
    finally:
        dist.new_group = real


def _close_groups() -> None:
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _tell_of_sparse_attention() -> None:
    """Only the hook without which SGLang asks for CUDA: the others change no weight."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moerl_cpu_sglang import registry

    for hook in registry.hooks_of("deepseek_v32"):
        if hook.symbol.endswith("is_deepseek_dsa"):
            HookRegistry.register(hook.symbol, hook.ours, HookType(hook.kind))


def main(folder: Path, names: Collection[str]) -> None:
    """names: of the cases to load; none for everything above."""
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from sglang.srt.plugins import load_plugins

    _tell_of_sparse_attention()
    load_plugins()
    (folder / "loaded").mkdir()
    cases = [case for case in (*CASES, *FP8_CASES) if not names or str(case) in names]
    models = {case.model for case in cases}
    failed = _write_models(folder, models if names else EVERY_MODEL)
    reports: dict[str, object] = {}
    for case in cases:
        ranks = range(case.tp)
        if report := _keep(folder, str(case), case.model, case.server_args, ranks, failed):
            reports[str(case)] = report
    for runner in RUNNERS if not names else ():
        args = Case("qwen3_moe", 1).server_args | {"moe_runner_backend": runner}
        if report := _keep(folder, runner, "qwen3_moe", args, range(1), failed):
            reports[runner] = report
    for name in VARIANTS if not names else ():
        args = Case(name.removesuffix(".tied"), 1).server_args
        _keep(folder, name, name, args, range(1), failed)
    refused = {
        name: error(folder / (name if name in REFUSED else "gpt_oss"), args)
        for name, args in REFUSED_CASES.items()
        if not names
    }
    for file, found in (("reports", reports), ("refused", refused), ("failed", failed)):
        (folder / f"{file}.json").write_text(json.dumps(found, default=str))


def _write_models(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Write checkpoints; returns why those that transformers cannot make failed."""
    from tests.helpers.fp8_folder import quantise

    failed: dict[str, str] = {}
    for name in names:
        config, change = EVERY_MODEL[name]
        try:
            write_model(folder / name, config, change)
        except Exception as problem:
            failed[name] = _sentence(problem)
    for name in (FP8_MODELS.keys() & names) - failed.keys():
        quantise((folder / name).rename(folder / f"{name}.plain"), folder / name)
    return failed


def _keep(
    folder: Path,
    name: str,
    model: str,
    args: dict[str, Any],
    ranks: Iterable[int],
    failed: dict[str, str],
) -> dict[str, object]:
    """Load a model and write its parameters; returns its report, {} where `failed` has a reason."""
    from safetensors.torch import save_file

    if model in failed:
        failed[name] = failed[model]
        return {}
    try:
        for rank in ranks:
            loaded = load(folder / model, args, rank)
            save_file(loaded.parameters, folder / "loaded" / f"{name}.{rank}.safetensors")
    except Exception as problem:
        failed[name] = _sentence(problem)
        return {}
    return {"args": loaded.server_args, "refusal": loaded.refusal}


def error(model: Path, args: dict[str, Any]) -> str:
    """Why SGLang does not load a model; empty when it does."""
    try:
        load(model, args, 0)
    except Exception as problem:
        return _sentence(problem)
    return ""


def _sentence(problem: Exception) -> str:
    where = traceback.extract_tb(problem.__traceback__)[-1].name
    return f"{type(problem).__name__} in {where}: {problem}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
