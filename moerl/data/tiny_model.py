"""A random-weight model folder with its own tokenizer, made without any download.

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
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from moerl.config.schema import TinyModel
from moerl.config.tiny_config import MAX_POSITIONS, tiny_config
from moerl.core.errors import ModelError
from moerl.layout import ModelSpec, hf_shapes, model_spec, stacked_forms, transposed_stacks

if TYPE_CHECKING:
    from torch import Tensor

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = string.digits + "=+-*/ \n\t" + string.ascii_letters + string.punctuation
_SYMBOLS = tuple(dict.fromkeys((*_SPECIAL, *_CHARACTERS)))
VOCAB_SIZE = len(_SYMBOLS)
_CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}tool: {{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tiny_model(folder: Path, shape: TinyModel, seed: int) -> None:
    """Write a random Qwen3-MoE.  Raises ModelError when the folder exists."""
    pad, eos = (_SPECIAL.index(symbol) for symbol in ("<pad>", "<eos>"))
    make_model(folder, tiny_config(shape, VOCAB_SIZE, pad=pad, eos=eos), seed)


def make_model(folder: Path, hf_config: dict[str, Any], seed: int) -> None:
    """Write a config, random weights (fp32 safetensors) and the tokenizer.

    hf_config: of any known family, with `vocab_size` VOCAB_SIZE.  `folder` appears at the end.
    The files are as transformers writes them.  It is not imported, because that takes longer
    than all the rest and every run of a tiny recipe would wait for it.

    Raises ModelError when the folder exists.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise ModelError(f"{folder} exists already; a tiny model is made in a new folder only")
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        _write_json(temporary / "config.json", hf_config)
        write_tokenizer(temporary)
        weights = dict(_weights(hf_config, seed))
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_tokenizer(folder: Path) -> None:
    """The files of the tokenizer alone, without torch."""
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """One token per character, no merges, no added start token."""
    vocabulary = {symbol: i for i, symbol in enumerate(_SYMBOLS)}
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
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }


def _weights(hf_config: dict[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Norms scale by one; everything else is normal with `initializer_range`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    spec = model_spec(hf_config)
    for name, shape in _file_shapes(spec).items():
        if name.endswith("norm.weight"):
            # the norm inside a delta net scales by its weight, where others add one to it
            around_one = spec.zero_centred_norm and "linear_attn" not in name
            yield name, torch.zeros(shape) if around_one else torch.ones(shape)
        else:
            yield name, torch.randn(shape, generator=generator) * hf_config["initializer_range"]


def _file_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of its files: some families store all experts in one tensor."""
    shapes = hf_shapes(spec)
    if transposed_stacks(spec):
        for stack, (shape, parts) in stacked_forms(spec).items():
            shapes = {n: s for n, s in shapes.items() if n not in parts} | {stack: shape}
    return shapes
