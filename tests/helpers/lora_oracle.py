"""LoRA outside of moerl: tiny models, random factors, and transformers with W0 + s B A for weights.

A factor has its Hugging Face name, `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank].
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.core.types import BatchPlan, Prompt
from moerl.data.demonstrations import demonstration_plan
from moerl.layout import ModelSpec, hf_shapes, model_spec
from moerl.layout.adapters import adapter_shapes
from moerl.layout.shards import stacked_forms
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT

LORA = LoraConfig(rank=4, alpha=8, ranks={"*.experts.*": 3, "*.down_proj": 2})
SHARED = replace(LORA, experts="shared")
SERVED = replace(
    LORA,
    targets=["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"],
    ranks={"*.v_proj": 2},
    delivery="adapter",
)
WIDE = replace(LORA, targets=[*LORA.targets, "*.mlp.gate", "lm_head"])
FAMILIES = ("qwen3_moe", "deepseek_v3")
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "tp2-etp2": {"tp": 2, "etp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2-tp2-ep2": {"pp": 2, "tp": 2, "ep": 2},
    "cp2-ep2-tp2": {"cp": 2, "ep": 2, "tp": 2},
    "dp2-ep4-tp2": {"dp": 2, "ep": 4, "tp": 2},
}
BATCH, EOS = 8, 2
LIMIT = 1e-5  # of the loss, of the norm, and of the largest gradient
Found = dict[str, Any]
_LAYER = re.compile(r"\.experts\.\D")  # not one expert's


def write_model(folder: Path, family: str, vocab: int = 0, seed: int = 0) -> Path:
    """A random model of the family whose layers are dense and with experts.

    vocab: entries of the vocabulary; 0 = as the family's.
    """
    config = json.loads((ROOT / "tests/data/layout_families.json").read_text())[family]
    config["vocab_size"] = vocab or config["vocab_size"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(model_spec(config))
    save_file(
        {
            name: 0.15 * torch.randn(shape, generator=chance) + ("norm" in name)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def read_spec(folder: Path) -> ModelSpec:
    return model_spec(json.loads((folder / "config.json").read_text()))


def random_factors(folder: Path, lora: LoraConfig = LORA) -> dict[str, Tensor]:
    """No factor is 0, so that a lost one shows."""
    chance = torch.Generator().manual_seed(1)
    shapes = hf_shapes(read_spec(folder))
    return {
        name: 0.2 * torch.randn(shape, generator=chance)
        for name, shape in adapter_shapes(shapes, lora.rank_of, shared=lora.shares).items()
    }


def _demonstration(index: int) -> Prompt:
    answer = " ".join(str((index * 7 + i * i) % 67) for i in range(5 + index % 4))
    return Prompt(index, tuple((index * 11 + 3 * i) % 67 for i in range(6)), "p", answer, {})


def demonstrations(dp: int, *, step: int = 0) -> BatchPlan:
    """Prompts and answers of several lengths."""
    return demonstration_plan(
        step,
        list(map(_demonstration, range(step * BATCH, (step + 1) * BATCH))),
        lambda text: [int(word) for word in text.split()],
        lambda prompt: [EOS],
        dp_size=dp,
        max_tokens_per_microbatch=48,
    )


def open_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """transformers' model without kernels of its own."""
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()  # transformers imports torchvision
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


def mean_nll(model: torch.nn.Module, changed: dict[str, Tensor] | None = None) -> Tensor:
    """Mean negative log-likelihood of all answers; changed: parameters in place of the model's."""
    values, total = [], 0
    for group in demonstrations(1).groups:
        (episode,) = group.episodes
        rollout = episode.turns[0].rollout
        tokens = torch.as_tensor(rollout.token_ids, dtype=torch.long)[None]
        logits = torch.func.functional_call(model, changed or {}, (tokens,)).logits[0, :-1]
        mask = torch.as_tensor(rollout.loss_mask)[1:]
        values.append(
            torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")[mask].sum()
        )
        total += int(mask.sum())
    return torch.stack(values).sum() / total


def by_autograd(
    folder: Path, factors: dict[str, Tensor], scale: float, dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the factors, by torch alone."""
    model = open_transformers(folder, dtype)
    leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in factors.items()}
    loss = mean_nll(model, _changed(model, folder, leaves, scale))
    loss.backward()
    return float(loss.detach()), {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }


def _of(leaves: dict[str, Tensor], module: str, which: str) -> Tensor:
    """A factor of a module, or the one that it shares with the other experts of its layer."""
    own = f"{module}.lora_{which}"
    return leaves[own if own in leaves else re.sub(r"\.experts\.\d+\.", ".experts.", own)]


def _changed(
    model: torch.nn.Module, folder: Path, leaves: dict[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """Parameters of transformers' model with their products added; stacked experts too."""
    modules = {name.rpartition(".")[0] for name in leaves}
    modules = {module for module in modules if not _LAYER.search(module)}
    product = {m: scale * (_of(leaves, m, "B") @ _of(leaves, m, "A")) for m in modules}
    changed = {}
    forms = stacked_forms(read_spec(folder))
    for name, param in model.named_parameters():
        whole = param.detach()
        if name.removesuffix(".weight") in product:
            changed[name] = whole + product[name.removesuffix(".weight")]
        elif name in forms:
            delta = torch.zeros_like(whole)
            for part, (expert, rows, _) in forms[name][1].items():
                if (module := part.removesuffix(".weight")) in product:
                    place = torch.zeros_like(whole)
                    place[expert.start, rows.start : rows.stop] = 1
                    padded = torch.nn.functional.pad(
                        product[module], (0, 0, rows.start, whole.shape[1] - rows.stop)
                    )
                    delta = delta + place * padded
            changed[name] = whole + delta
    return changed


class Trained:
    """A tiny model, its factors, the oracle's answer, and runs of the trainer."""

    def __init__(self, folder: Path, family: str, lora: LoraConfig = LORA) -> None:
        vocab = 68 if lora is WIDE else 0
        self.folder, self.lora = folder, lora
        self.model = write_model(folder / "model", family, vocab)
        self.factors = random_factors(self.model, lora)
        save_file(self.factors, folder / "factors.safetensors")
        self.loss, self.grads = by_autograd(self.model, self.factors, lora.scale)

    def run(self, layout: str, **settings: Any) -> Found:
        sizes = LAYOUTS[layout]
        out = self.folder / "found.pt"
        script = str(ROOT / "tests/helpers/lora_ranks.py")
        if self.lora is WIDE:  # a head that tp cuts has no padding
            sizes = sizes | {"vocab_divisible_by": 1}
        lora = asdict(self.lora) | {"start": settings.pop("start", "")}
        model = settings.pop("model", self.model)
        factors = self.folder / settings.pop("factors", "factors.safetensors")
        on = settings.pop("on", "cpu")  # as `run_ranks` takes it
        settings |= {"parallel": sizes, "lora": lora}
        arguments = ["--model", str(model), "--out", str(out), "--factors", str(factors)]
        arguments += ["--settings", json.dumps(settings)]
        world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
        run_ranks(world, [script, *arguments], on=on)
        return torch.load(out, weights_only=True)

    def gaps(self, found: Found) -> dict[str, float]:
        """Of loss, norm and each kind of factor, relative."""
        largest = max(float(value.abs().max()) for value in self.grads.values())
        norm = float(sum(value.double().square().sum() for value in self.grads.values())) ** 0.5
        gaps = {
            "loss": abs(found["loss"] - self.loss) / self.loss,
            "norm": abs(found["norm"] - norm) / norm,
        }
        assert found["grads"].keys() == self.grads.keys()
        return gaps | {
            name: float((found["grads"][name] - want).abs().max()) / largest
            for name, want in self.grads.items()
        }
