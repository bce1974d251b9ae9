"""A random-weight Qwen3-MoE folder with its own tokenizer, made without any download.

The tokenizer is character level: printable ASCII, newline and tab, one token each, so that it
covers every built-in task and a random policy has few symbols to rule out.  Any other character
becomes <unk>.  (A byte-level vocabulary would have no <unk>; it is twice as large and learns more
slowly.)  Weights are written tensor by tensor under their Hugging Face names, in a fixed order from
one generator, so that a seed gives the same bytes under any transformers version.
"""

from __future__ import annotations

import json
import os
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from moerl.config.schema import TinyModel
from moerl.errors import ModelError
from moerl.layout import hf_shapes, model_spec

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = string.digits + "=+-*/ \n\t" + string.ascii_letters + string.punctuation
_MAX_POSITIONS = 4096
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_model(folder: Path, shape: TinyModel, seed: int) -> None:
    """Write config, weights (fp32 safetensors) and tokenizer; `folder` gets its name at the end.

    The files are those that transformers writes.  It is not imported, because that takes longer
    than all the rest and every run of a tiny recipe would wait for it.

    Raises ModelError when the folder exists.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise ModelError(f"{folder} exists already; a tiny model is made in a new folder only")
    tokenizer = _tokenizer()
    config = _config(shape, tokenizer.get_vocab_size())
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        _write_json(temporary / "config.json", config)
        _write_json(temporary / "tokenizer_config.json", _tokenizer_config())
        tokenizer.save(str(temporary / "tokenizer.json"))
        (temporary / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
        weights = dict(_weights(config, seed))
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """One token per character, no merges, no added start token."""
    symbols = dict.fromkeys((*_SPECIAL, *_CHARACTERS))
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, _SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(symbol, special=True, normalized=False) for symbol in _SPECIAL]
    tokenizer.add_special_tokens(special)
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    pad, eos, unk = _SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": eos,
        "unk_token": unk,
        "model_max_length": _MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }


def _config(shape: TinyModel, vocab_size: int) -> dict[str, Any]:
    """The config.json of Qwen3MoeForCausalLM; what is absent has transformers' default."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
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
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": _MAX_POSITIONS,
        "initializer_range": shape.initializer_range,
        "pad_token_id": _SPECIAL.index("<pad>"),
        "eos_token_id": _SPECIAL.index("<eos>"),
        "bos_token_id": None,
        "dtype": "float32",
    }


def _weights(config: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms are one; everything else is normal with `initializer_range`."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in hf_shapes(model_spec(config)).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * config["initializer_range"]
