"""Settings of a step, the probe and parts of the loss on the double: the CPU's numbers, waits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from moerl.algorithms.device_copies import upload
from moerl.algorithms.head_logprob import (
    Head,
    SamplingMask,
    full_logprobs,
    kept_logprobs,
    top_logprobs,
)
from moerl.algorithms.loss import policy_loss
from moerl.algorithms.support_losses import Support, centering, forward_kl, reverse_kl
from moerl.algorithms.tokens import Sequences, Tokens
from moerl.config.algorithms import CORRECTIONS, KLS, OBJECTIVES, RatioRule
from moerl.config.schema import AlgorithmConfig
from tests.double import other_models
from tests.double.other_models import SETTINGS, probed, with_setting
from tests.double.train_once import (
    BOUNDS,
    Numbers,
    Trained,
    largest_difference,
    numbers,
    other_metrics,
)
from tests.double.watch import PAGEABLE, WAITS, watch

pytest_plugins = ("tests.double.trainer_fixtures",)

# Waits in an optimizer step, none for a microbatch.  R2 has a pass more, with routes to the host.
USUAL = {
    "moerl/trainer/learner/step_sums.py": 1,
    "moerl/algorithms/device_copies.py": 1,
    "moerl/trainer/learner/optimizer.py": 1,
}
MORE = {
    "router losses": {"moerl/trainer/passes/router_losses.py": 1},
    "routes of the proximal policy": {"moerl/algorithms/device_copies.py": 2},
}
# Of the probe: live ids of all layers, where they differ, both scores and
# those at lag 0.
PROBE = {"moerl/trainer/passes/probe.py": 5}
TOKENS = 24


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_with_other_settings(name: str, trained: Trained, on_cpu: Numbers) -> None:
    made, want = with_setting(trained, name), on_cpu["settings"][name]
    found = numbers(made)
    for part, bound in BOUNDS.items():
        assert largest_difference(found[part], want[part]) <= bound, part
    if made.learner.config.trainer.minibatches > 1:  # later steps start from other weights
        assert found["metrics"] == pytest.approx(want["metrics"], rel=1e-3, abs=1e-5)
    else:
        assert other_metrics(found["metrics"], want["metrics"]) == []
    with watch() as seen:
        made.learner.step(made.plan)
    print("own:", seen.own_lines(*WAITS, PAGEABLE))
    assert not seen.own_lines(PAGEABLE)
    assert made.plan.num_microbatches > 1
    steps = made.learner.config.trainer.minibatches
    want = {file: times * steps for file, times in (USUAL | MORE.get(name, {})).items()}
    assert dict(seen.own_files(*WAITS)) == want, seen.own_lines(*WAITS)


def test_a_probe_is_that_of_the_cpu(trained: Trained, on_cpu: Numbers) -> None:
    made = with_setting(trained, "recompute")
    with watch() as seen:
        found = probed(made)
    assert found == on_cpu["probe"]
    assert not seen.own_lines(PAGEABLE)
    print("own:", seen.own_lines(*WAITS))
    assert dict(seen.own_files(*WAITS)) == PROBE


# --- latent attention in packed rows --------------------------------------------------------------
@pytest.fixture(scope="module")
def latent(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model whose queries, keys and values come from latents, with live routes."""
    return other_models.with_latent_attention(trained, tmp_path_factory.mktemp("latent") / "model")


def test_rotary_embeddings_of_latent_attention_do_not_wait(
    latent: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with the ends of packed rollouts on the device, the same gradients and four waits
    for each layer and microbatch.
    """
    from moerl.trainer.model import packed_rows

    found = {}
    for name in ("host", "device"):
        with watch() as seen:
            gradients = latent.gradients()
        waits = sum(one.kind in WAITS and one.line == "megatron" for one in seen.seen)
        found[name] = (gradients, waits)
        monkeypatch.setattr(packed_rows, "_on_host", lambda value: value)
    layers = len(latent.learner.model.gpt.decoder.layers)
    more = found["device"][1] - found["host"][1]
    assert more == 4 * layers * latent.plan.num_microbatches, found
    assert largest_difference(found["host"][0], found["device"][0]) == 0


# --- parts of the loss ----------------------------------------------------------------------------
def tokens_on(device: str) -> tuple[Tokens, Tensor, Tensor]:
    """Tokens, their weights, and the log-probabilities that get the gradient."""
    generator = torch.Generator().manual_seed(0)

    def random() -> Tensor:
        return torch.randn(TOKENS, generator=generator)

    logprob = (0.3 * random() - 1).to(device).requires_grad_()
    near = {
        name: (logprob.detach().cpu() + 0.2 * random()).to(device)
        for name in ("engine", "proximal", "reference", "teacher")
    }
    tokens = Tokens(
        logprob,
        advantage=random().to(device),
        sequences=Sequences((torch.arange(TOKENS) // 6).to(device), TOKENS // 6),
        lag=(torch.arange(TOKENS) % 3).to(device),
        entropy=random().abs().to(device),
        centering=random().to(device),
        teacher_kl=random().abs().to(device),
        m2_bound=0.1,
        **near,
    )
    return tokens, torch.full((TOKENS,), 1 / TOKENS, device=device), logprob


def losses() -> dict[str, AlgorithmConfig]:
    """Every objective, correction and KL, each alone; the first with entropy and distillation."""
    plain = AlgorithmConfig(lag_cap=1, entropy_coef=0.1, distill_coef=0.5)
    found = {name: replace(plain, objective=name) for name in OBJECTIVES}
    found |= {name: replace(plain, corrections=[name]) for name in CORRECTIONS}
    return found | {name: replace(plain, kl=name, kl_coef=0.1) for name in KLS}


@pytest.mark.parametrize("name", losses())
def test_no_part_of_a_loss_waits(name: str) -> None:
    config, results = losses()[name], []
    for device in ("cpu", "cuda"):
        tokens, weight, logprob = tokens_on(device)
        with watch() as seen:
            result = policy_loss(config, tokens, weight)
            result.loss.backward()
        assert seen.count(*WAITS, PAGEABLE) == 0, seen.seen
        assert logprob.grad is not None
        results.append((result.loss.detach().cpu(), result.sums.cpu(), logprob.grad.cpu()))
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-9)


def test_no_term_over_a_support_waits() -> None:
    """From the head, over a mask and over some entries of the vocabulary, to both gradients."""
    generator, results = torch.Generator().manual_seed(1), []
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (TOKENS, 300))
    tau, sampled = torch.ones(TOKENS), torch.arange(TOKENS) % 5
    lengths = torch.arange(TOKENS) % 3 + 5
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    mask = SamplingMask(offsets, torch.cat([torch.arange(int(n)) for n in lengths]))
    other = torch.randn(int(lengths.sum()), generator=generator) - 3
    for device in map(torch.device, ("cpu", "cuda")):
        x, w, a, b, c = (upload(t, device) for t in (hidden, weight, tau, other, lengths))
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        with watch() as seen:
            kept = kept_logprobs(x, Head(w, 300), sampled, mask, temperature_S=a, support=True)
            full = full_logprobs(x, Head(w, 300), sampled, temperature_S=a, support=mask)
            total = torch.zeros((), device=device)
            for scores, is_whole in ((kept, True), (full, False)):
                assert scores.support is not None
                s = Support(scores.support, b, c, is_whole)
                term = centering(s, a, RatioRule("clamped", (0.5, 2.0), (0.5, 2.0)))
                total = total + (term + reverse_kl(s) + forward_kl(s)).sum()
            total.backward()
            ids, top = top_logprobs(x, Head(w, 300), 7, temperature_S=a)
        assert seen.count(*WAITS, PAGEABLE) == 0, seen.seen
        results.append([t.detach().cpu() for t in (total, x.grad, w.grad, ids, top)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


def test_every_field_of_the_tokens_is_on_the_device() -> None:
    tokens, _, _ = tokens_on("cuda")
    values = [getattr(tokens, field.name) for field in fields(tokens)]
    assert all(value.is_cuda for value in values if isinstance(value, Tensor))
