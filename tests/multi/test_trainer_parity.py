"""Every layout trains like one rank, one rank computes what transformers computes.

Routes come from random valid records, so replay is exercised against choices the routers would not
make.  Controls: shifted routes, live routes and dropped masks must move the log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import EXPERTS, ROOT, UNUSED_EXPERT, VOCAB, make_model

LAYOUTS = {
    "dp2": ["--dp", "2"],
    "ep2": ["--dp", "2", "--ep", "2"],
    "tp2-etp2": ["--tp", "2", "--etp", "2"],
    "tp2-etp1": ["--tp", "2"],
    "tp2-ep2": ["--tp", "2", "--ep", "2"],
    "ep2-distributed-optimizer": ["--dp", "2", "--ep", "2", "--distributed-optimizer"],
    "dp2-overlapped": ["--dp", "2", "--distributed-optimizer", "--overlap"],
}
LIMIT = 1e-5
Found = dict[str, Any]


def _run(model: Path, work: Path, ranks: int, arguments: list[str]) -> Found:
    out = work / "found.pt"
    script = str(ROOT / "tests" / "helpers" / "trainer_parity_ranks.py")
    run_ranks(
        ranks,
        [script, "--model", str(model), "--work", str(work), "--out", str(out), *arguments],
    )
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("parity") / "model")


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _run(model, tmp_path_factory.mktemp("one"), 1, [])


def _gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_like_one_rank(
    layout: str, model: Path, one_rank: Found, tmp_path: Path
) -> None:
    found = _run(model, tmp_path, 2, LAYOUTS[layout])
    for name in ("replay", "live", "no_mask"):
        assert _gap(found[name], one_rank[name]) <= LIMIT
    assert abs(found["loss"] - one_rank["loss"]) <= LIMIT * abs(one_rank["loss"])
    assert abs(found["grad_norm"] - one_rank["grad_norm"]) <= LIMIT * one_rank["grad_norm"]
    for name, want in one_rank["weights"].items():
        torch.testing.assert_close(found["weights"][name], want, rtol=LIMIT, atol=1e-7)
    for name, want in one_rank["gradients"].items():
        if "gradients" in found:
            scale = float(want.abs().max())
            torch.testing.assert_close(
                found["gradients"][name], want, rtol=LIMIT, atol=LIMIT * scale
            )
    if "--overlap" in LAYOUTS[layout]:  # control: before the gather a rank has its own shard only
        assert _gap(found["early"], one_rank["weights"]) > 100 * LIMIT


def test_logits_are_those_of_transformers(model: Path, one_rank: Found) -> None:
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()  # transformers imports torchvision
    from transformers import Qwen3MoeForCausalLM

    reference = Qwen3MoeForCausalLM.from_pretrained(
        model, experts_implementation="eager", dtype=torch.float32
    )
    tokens = torch.arange(60).view(3, 20) % VOCAB
    with torch.no_grad():
        want = reference(tokens).logits
    assert float((one_rank["logits"] - want).abs().max()) <= LIMIT
    # control: the same gate sees another position
    assert float((one_rank["logits"].roll(1, 1) - want).abs().max()) > 1e-2


def test_controls_move_the_logprobs(one_rank: Found) -> None:
    for name in ("shifted", "live", "no_mask"):
        assert _gap(one_rank[name], one_rank["replay"]) > 100 * LIMIT, name


def test_gradient_reaches_the_router_and_only_named_experts(one_rank: Found) -> None:
    gradients = one_rank["gradients"]
    for layer in range(3):
        router = gradients[f"model.layers.{layer}.mlp.gate.weight"]
        used = [expert for expert in range(EXPERTS) if expert != UNUSED_EXPERT]
        assert not router[UNUSED_EXPERT].any()
        assert (router[used].abs().amax(1) > 0).all()
        for expert in range(EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                assert gradients[name].any() == (expert != UNUSED_EXPERT), name
