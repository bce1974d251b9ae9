"""A random model of smollm2-moe's shape: 401 million parameters, made without a network.

A Mixtral with four experts in each layer, two for each token.  Its tokenizer has a symbol for each
entry of the vocabulary, so that every sampled token is some text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from moerl.config.schema import TinyModel
from moerl.data.tiny_model import VOCAB_SIZE, make_model
from tests.helpers.tiny_families import family_config

VOCAB = 49152
SHAPE = TinyModel(
    enabled=True,
    hidden_size=576,
    moe_ffn=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    num_experts=4,
    experts_per_token=2,
)
SMALL = replace(SHAPE, hidden_size=192, moe_ffn=128, num_layers=2, num_heads=3, num_kv_heads=1)


def large_model(folder: Path, shape: TinyModel = SHAPE, vocab: int = VOCAB) -> Path:
    """The folder, made if it is not there."""
    if not folder.exists():
        make_model(folder, family_config("mixtral", shape, vocab) | {"head_dim": 64}, seed=0)
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        more = {f"<{number}>": number for number in range(VOCAB_SIZE, vocab)}
        tokenizer["model"]["vocab"] |= more
        file.write_text(json.dumps(tokenizer))
    return folder
