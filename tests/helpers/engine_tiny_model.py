"""A tiny random Qwen3-MoE for engine tests, and what transformers says about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moerl.core.types import ModelShape
from moerl.engine import torchvision_fix

torchvision_fix.arm()  # transformers imports torchvision

VOCAB, LAYERS, EXPERTS, TOP_K, EOS = 256, 3, 8, 2, 2
SHAPE = ModelShape(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    moe_layers=tuple(range(LAYERS)),
    num_experts=EXPERTS,
    top_k=TOP_K,
    eos_token_ids=(EOS,),
)


# Widths that two ranks can cut between blocks of 128 x 128; Megatron cuts between heads, too.
BLOCKS = {"hidden_size": 128, "head_dim": 128}


def save(folder: Path, seed: int, moe_ffn: int = 32, **change: float) -> Path:
    """Random weights with peaked routing and sampling distributions, in HF form.

    With tp > 1 on a CPU, SGLang pads the experts unless moe_ffn is a multiple of 32 * tp.
    change: fields of its config.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": moe_ffn,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "initializer_range": 0.15,
    }
    config = Qwen3MoeConfig(**fields | change)
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def forward(model: torch.nn.Module, ids: list[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Logits [T, V] and the experts of every fed-in token, [L, T, K], most probable first."""
    where = next(model.parameters()).device
    out = model(torch.tensor([ids], device=where), output_router_logits=True)
    routes = [r.view(-1, EXPERTS).topk(TOP_K).indices for r in out.router_logits]
    return out.logits[0].float().cpu(), torch.stack(routes).cpu().numpy()
