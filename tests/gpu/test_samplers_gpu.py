"""Kept sets of SGLang's two samplers on CUDA: the recorded one, and flashinfer's.

SGLang's `Sampler` rebuilds flashinfer's set after the draw, from separate kernels; these are the
same calls.  Until both tests have passed on a GPU `engine.args.sampling_backend` stays `pytorch`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.helpers.device_figures import Figure

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
ROWS, VOCAB, TOP_K, TOP_P, DRAWS = 64, 151_936, 64, 0.9, 200


def probabilities(*, ties: bool) -> Tensor:
    """[ROWS, VOCAB] fp32; ties: of logits in bf16, many of which are equal."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(ROWS, VOCAB, device="cuda")
    return (logits.bfloat16().float() if ties else logits).softmax(-1)


def limits() -> tuple[Tensor, Tensor]:
    top_k = torch.full((ROWS,), TOP_K, dtype=torch.int32, device="cuda")
    return top_k, torch.full((ROWS,), TOP_P, device="cuda")


def kept_by_pytorch(probs: Tensor) -> Tensor:
    """[ROWS, VOCAB] bool, by the sampler that is recorded."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    top_k, top_p = limits()
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_k, top_p, torch.zeros_like(top_p), False, None,
        torch.zeros(ROWS, dtype=torch.long, device="cuda"), return_filtered_probs=True,
    )  # fmt: skip
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(1, ids.long(), weights > 0)


def kept_by_flashinfer(probs: Tensor) -> Tensor:
    """[ROWS, VOCAB] bool, rebuilt as SGLang rebuilds it."""
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob

    top_k, top_p = limits()
    kept: Tensor = (top_k_renorm_prob(probs, top_k) > 0) & (top_p_renorm_prob(probs, top_p) > 0)
    return kept


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_kept_sets_are_equal(ties: bool, figure: Figure) -> None:
    probs = probabilities(ties=ties)
    differ = (kept_by_pytorch(probs) != kept_by_flashinfer(probs)).any(-1)
    figure(f"rows of other sets, {'ties' if ties else 'distinct'}", float(differ.sum()), "of 64")
    assert not differ.any()


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_draws_are_kept(ties: bool, figure: Figure) -> None:
    """What flashinfer draws is in its own set, and in the recorded one; control: it varies."""
    from flashinfer.sampling import top_k_top_p_sampling_from_probs

    probs, (top_k, top_p) = probabilities(ties=ties), limits()
    draws = torch.stack(
        [
            top_k_top_p_sampling_from_probs(probs, top_k, top_p, filter_apply_order="joint").long()
            for _ in range(DRAWS)
        ],
        dim=1,
    )
    for name, kept in (("own", kept_by_flashinfer(probs)), ("pytorch's", kept_by_pytorch(probs))):
        outside = ~kept.gather(1, draws)
        figure(f"draws outside of the {name} set", float(outside.sum()), f"of {draws.numel()}")
        assert not outside.any(), name
    assert draws.unique().numel() > ROWS
