"""Audit another stack: write its rollouts as a dump, check it, score it with moerl's trainer.

    python examples/audit_dump.py runs/mine/hf

The other stack is transformers here: it samples from a Qwen3-MoE folder (the quickstart leaves one
in runs/NAME/hf) and keeps, for every token, the log-probability at which it was sampled and the
experts that served it.  Replace `sample` by a reader of what your stack logs; docs/formats.md has
the fields.  `moerl check-dump FILE MODEL` is the check alone and needs no torch; `moerl mismatch
RECIPE --records FILE` adds a page that says where the gap comes from.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moerl.audit.mismatch_command import measure
from moerl.config import load_config, resolve
from moerl.engine import torchvision_fix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def sample(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> dict[str, object]:
    """One rollout of a dump: routing row t belongs to the token that was fed in at t."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_tokens):
        out = model(torch.tensor([tokens]), output_router_logits=True)
        scores = out.logits[0, -1].float().log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1))
        tokens.append(token)
        logprobs.append(float(scores[token]))
    top_k = model.config.num_experts_per_tok
    layers = [layer.topk(top_k, dim=-1).indices for layer in out.router_logits]  # each [T - 1, K]
    return {
        "token_ids": tokens,
        "prompt_len": len(prompt),
        "logprobs": logprobs,
        "routing": torch.stack(layers, 1).tolist(),
    }


def write_dump(folder: Path, dump: Path, num_rollouts: int = 8, num_tokens: int = 8) -> None:
    """Rollouts of the model in `folder`, one JSON object a line."""
    torchvision_fix.arm()  # transformers imports torchvision, which expects CUDA in the CPU profile
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [sample(model, [3 + index, 5, 7], num_tokens) for index in range(num_rollouts)]
    dump.write_text("\n".join(map(json.dumps, rows)))


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        dump = Path(scratch) / "dump.jsonl"
        write_dump(folder, dump)
        config = resolve(load_config("quickstart", [f"model.path={folder}"]))
        found = measure(config, Path(scratch) / "audit", dump=dump, dtypes=["fp32"])
    for variant, gaps in found["results"]["fp32"].items():
        print(f"replayed: {variant:8} k3 {gaps['k3']:.1e}  max|dlogp| {gaps['abs_dlogp_max']:.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
