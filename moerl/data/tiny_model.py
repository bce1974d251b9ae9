"""A random-weight Qwen3-MoE folder with its own tokenizer, made without any download.

The tokenizer is character level: printable ASCII, newline and tab, one token each, so that it
covers every built-in task and a random policy has few symbols to rule out.  Any other character
becomes <unk>.  (A byte-level vocabulary would have no <unk>; it is twice as large and learns more
slowly.)  Weights are written tensor by tensor under their Hugging Face names, in a fixed order from
one generator, so that a seed gives the same bytes under any transformers version.
"""

from __future__ import annotations

import os
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moerl.config.schema import TinyModel
from moerl.errors import ModelError
from moerl.layout import hf_shapes, model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = string.digits + "=+-*/ \n\t" + string.ascii_letters + string.punctuation
_MAX_POSITIONS = 4096
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_model(folder: Path, shape: TinyModel, seed: int) -> None:
    """Write config, weights (fp32 safetensors) and tokenizer; `folder` gets its name at the end.

    Raises ModelError when the folder exists.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise ModelError(f"{folder} exists already; a tiny model is made in a new folder only")
    tokenizer = make_tokenizer()
    config = _config(shape, len(tokenizer), tokenizer)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        config.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        weights = dict(_weights(config, seed))
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_tokenizer() -> PreTrainedTokenizerBase:
    """One token per character, no merges, no added start token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos, unk = _SPECIAL
    symbols = dict.fromkeys((*_SPECIAL, *_CHARACTERS))
    core = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        model_max_length=_MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _config(
    shape: TinyModel, vocab_size: int, tokenizer: PreTrainedTokenizerBase
) -> Qwen3MoeConfig:
    from transformers import Qwen3MoeConfig

    settings: dict[str, Any] = {  # fields of a dataclass that mypy does not see
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.moe_ffn * shape.experts_per_token,  # no layer is dense: unused
        "moe_intermediate_size": shape.moe_ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "max_position_embeddings": _MAX_POSITIONS,
        "initializer_range": shape.initializer_range,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }
    return Qwen3MoeConfig(**settings)


def _weights(config: Qwen3MoeConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms are one; everything else is normal with `initializer_range`."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_shapes(model_spec(config.to_dict())).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * config.initializer_range
