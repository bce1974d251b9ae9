"""Log-probabilities of the trainer with adapters, and of transformers with what it writes.

In fp32 the merged folder and the unmerged adapter (W0 x + s B (A x)) both give them.  In bf16 both
do up to the noise of other kernels, which hides that the unmerged sum is another one: only with
equal kernels (transformers twice) is that seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moerl.data.packing import rollout_at
from moerl.layout import ModelSpec
from moerl.layout.shards import stacked_forms
from moerl.trainer.hf_io.adapter_files import save_adapter
from moerl.trainer.hf_io.merge_adapter import merge_adapter
from tests.helpers.lora_oracle import (
    FAMILIES,
    LORA,
    Trained,
    demonstrations,
    open_transformers,
    read_spec,
)

pytestmark = pytest.mark.full

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT = 1e-5  # nats, in fp32
NOISE = 2e-3  # k3 of two implementations in bf16, on random weights; 2.6e-4 to 6.6e-4 measured
Parts = dict[int, list[tuple[int, Tensor, Tensor]]]
"""Address of a weight -> (first row, A, B) of its factors."""


def _k3(one: Tensor, other: Tensor) -> float:
    gap = (other - one).double()
    return float((gap.exp() - 1 - gap).mean())


def _scores(model: torch.nn.Module) -> Tensor:
    """Log-probabilities of all answers, in fp32 from the model's logits."""
    plan, found = demonstrations(1), []
    for row in range(len(plan.rows)):
        rollout = rollout_at(plan, row)
        tokens = torch.as_tensor(rollout.token_ids, dtype=torch.long)[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].float()
        mask = torch.as_tensor(rollout.loss_mask)[1:]
        every = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        found.append(every[mask])
    return torch.cat(found)


@contextmanager
def _unmerged(model: torch.nn.Module, spec: ModelSpec, factors: dict[str, Tensor]) -> Iterator[int]:
    """Each product with an adapted weight has s B (A x) added; yields how many weights have."""
    parts: Parts = {}
    named = dict(model.named_parameters())
    for name, param in named.items():
        if f"{(module := name.removesuffix('.weight'))}.lora_A" in factors:
            own = (0, factors[f"{module}.lora_A"], factors[f"{module}.lora_B"])
            parts[param.data_ptr()] = [own]
    for name, (_, places) in stacked_forms(spec).items():
        for weight, (expert, rows, _) in places.items():
            module = weight.removesuffix(".weight")
            own = (rows.start, factors[f"{module}.lora_A"], factors[f"{module}.lora_B"])
            parts.setdefault(named[name][expert.start].data_ptr(), []).append(own)
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = plain(x, weight, bias)
        for first, a, b in parts.get(weight.data_ptr(), []):
            y[..., first : first + len(b)] += LORA.scale * plain(plain(x, a), b)
        return y

    setattr(torch.nn.functional, "linear", linear)  # noqa: B010
    try:
        yield len(parts)
    finally:
        setattr(torch.nn.functional, "linear", plain)  # noqa: B010


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_scores_as_the_trainer_does(family: str, tmp_path: Path) -> None:
    """Control: the model without its adapter."""
    case, found = Trained(tmp_path, family), dict[str, dict[str, float]]()
    spec = read_spec(case.model)
    for name, dtype in DTYPES.items():
        factors = {key: (0.3 * value).to(dtype) for key, value in case.factors.items()}
        save_file(factors, tmp_path / f"{name}.safetensors")
        save_adapter(tmp_path / f"adapter-{name}", factors, spec, LORA, str(case.model))
        merged = tmp_path / f"merged-{name}"
        merge_adapter(case.model, tmp_path / f"adapter-{name}", LORA, merged, dtype)
        ran = case.run("one", dtype=name, factors=f"{name}.safetensors", scores=True)
        trainer, base = ran["scores"], open_transformers(case.model, dtype)
        plain = _scores(base)
        with _unmerged(base, spec, factors) as adapted, torch.no_grad():
            assert adapted > spec.layers
            apart = _scores(base)
        whole = _scores(open_transformers(merged, dtype))
        found[name] = {
            "merged": _k3(trainer, whole),
            "unmerged": _k3(trainer, apart),
            "merged to unmerged": _k3(whole, apart),
            "without": _k3(trainer, plain),
        }
        print(name, {key: f"{value:.1e}" for key, value in found[name].items()})
        if name == "fp32":
            for scores in (whole, apart):
                print(f"largest |d log p| {float((scores - trainer).abs().max()):.1e}")
                assert (scores - trainer).abs().max() <= EXACT
    half = found["bf16"]
    assert max(half["merged"], half["unmerged"]) < NOISE < half["without"] / 10
    assert half["merged to unmerged"] > 1e-5, "0 if both were merged"
