"""Checks of the head and replay on a device: tests/gpu runs them on CUDA, tests/unit on the CPU.

Needs torch, numpy and this project's torch-only modules, not megatron.  A check asserts with its
numbers in the message and returns what it measured, which the GPU tests print.

Legend: N tokens, D hidden, E experts, K experts per token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from moerl.algorithms.head_logprob import Head, SamplingMask, Scores, full_logprobs, kept_logprobs
from moerl.core.errors import RecordError
from moerl.trainer.model.replay import Mode, RouteReplay

Csr = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """Hidden states, a head, sampling masks and sampled tokens, on one device."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    offsets: Tensor
    ids: Tensor
    sampled: Tensor
    tau: Tensor

    def score(self, hidden: Tensor, head: Head, **other: Tensor) -> Scores:
        mask = SamplingMask(other.get("offsets", self.offsets), other.get("ids", self.ids))
        tau = other.get("tau", self.tau)
        return kept_logprobs(hidden, head, self.sampled, mask, temperature_S=tau)

    def full(self, hidden: Tensor, head: Head) -> Scores:
        return full_logprobs(hidden, head, self.sampled, temperature_S=self.tau)

    def to(self, device: str, dtype: torch.dtype) -> Case:
        """The same numbers elsewhere; the record stays on the host."""
        return Case(
            self.hidden.to(device, dtype),
            self.weight.to(device, dtype),
            self.offsets,
            self.ids,
            self.sampled,
            self.tau.to(device, torch.float64),
        )


def make_case(
    device: str, dtype: torch.dtype, id_dtype: torch.dtype, rows: int, vocab: int, kept: int
) -> Case:
    """Uneven sampling masks: the first row keeps one id, the last the whole vocabulary."""
    generator = torch.Generator().manual_seed(rows * 7919 + vocab)
    sizes = torch.empty(rows).exponential_(1 / kept, generator=generator).long() + 1
    sets = [torch.randint(0, vocab, (int(n),), generator=generator).unique() for n in sizes]
    sets[0] = sets[0][:1]
    sets[-1] = torch.arange(vocab)
    picks = [int(torch.randint(0, len(one), (1,), generator=generator)) for one in sets]
    return Case(
        torch.randn(rows, 16, generator=generator).to(device, dtype),
        torch.randn(vocab, 16, generator=generator).to(device, dtype),
        torch.tensor([0, *(len(one) for one in sets)]).cumsum(0),
        torch.cat(sets).to(id_dtype),
        torch.stack([one[pick] for one, pick in zip(sets, picks, strict=True)]),
        (torch.rand(rows, generator=generator) + 0.5).to(device),
    )


def gradients(
    case: Case, score: Callable[[Tensor, Head], Scores]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log-probability, entropy, gradient of the hidden states, gradient of the weight)."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (case.hidden, case.weight))
    scores = score(hidden, Head(weight, len(weight)))
    weights = torch.linspace(-1, 2, len(scores.logprob), device=hidden.device)
    (scores.logprob * weights.to(scores.logprob.dtype)).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return scores.logprob.detach(), scores.entropy, hidden.grad, weight.grad


# --- head -----------------------------------------------------------------------------------------
def head_equals_fp64(case: Case) -> float:
    """Against logits as [N, V] in fp64 on the CPU, from the same stored numbers; repeats bitwise.

    Returns the largest error of a log-probability.  In bf16 logits are rounded once, which moves a
    probability by up to 2**-8 of its logit: entropy and gradients are compared with those of logits
    that are rounded alike.
    """
    exact, dtype = case.to("cpu", torch.float64), case.hidden.dtype
    keep = torch.zeros(len(exact.hidden), len(exact.weight), dtype=torch.bool)
    keep[torch.repeat_interleave(exact.offsets.diff()), exact.ids.long()] = True
    worst = 0.0
    for score, mask, of in (
        (case.score, keep, exact.score),
        (case.full, torch.ones_like(keep), exact.full),
    ):
        plain = gradients(exact, partial(by_logits, exact, mask))
        alike = gradients(exact, partial(by_logits, exact, mask, rounded=dtype))
        want = (plain[0], *alike[1:])
        found = gradients(case, score)
        again = gradients(case, score)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        for a, b in zip(gradients(exact, of), plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        bound = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5, torch.float64: 1e-11}[dtype]
        for name, a, b in zip(("logprob", "entropy", "hidden", "weight"), found, want, strict=True):
            error = float((a.cpu().double() - b).abs().max()) / max(1.0, float(b.abs().max()))
            assert error <= bound, f"{name}: {error:.2e} of the largest, at most {bound:.2e}"
        unkept = ~keep.any(0) if of == exact.score else torch.zeros(len(case.weight)).bool()
        assert not found[3].cpu()[unkept].any(), "a gradient reached an entry that nobody kept"
        worst = max(worst, float((found[0].cpu().double() - want[0]).abs().max()))
    return worst


def by_logits(
    case: Case, keep: Tensor, hidden: Tensor, head: Head, rounded: torch.dtype = torch.float64
) -> Scores:
    """The plain form: all logits, a dense mask, torch's log_softmax.

    rounded: dtype that the product's values are rounded to; gradients pass through.
    """
    product = hidden @ head.weight.T
    product = product + (product.to(rounded).double() - product).detach()
    z = (product / case.tau[:, None]).masked_fill(~keep, -torch.inf)
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~keep, 0.0)).sum(-1)
    return Scores(log_p.gather(1, case.sampled[:, None])[:, 0], entropy.detach(), None)


def gradcheck_and_its_controls(device: str) -> None:
    """Finite differences in fp64; the gradient of a set with one id less, and of another
    temperature, must not pass.
    """
    case = make_case(device, torch.float64, torch.int64, 5, 16, 6)
    x, w = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    right = lambda x, w, **other: case.score(x, Head(w, 16), **other).logprob  # noqa: E731
    assert torch.autograd.gradcheck(right, (x, w))
    row = int((case.offsets.diff() > 1).nonzero()[0])
    at = int(case.offsets[row])
    at += int(case.ids[at]) == int(case.sampled[row])
    less = torch.cat([case.ids[:at], case.ids[at + 1 :]])
    offsets = case.offsets - (torch.arange(len(case.offsets)) > row).long()
    for wrong in ({"ids": less, "offsets": offsets}, {"tau": case.tau * 1.02}):

        def mixed(x: Tensor, w: Tensor, wrong: dict[str, Tensor] = wrong) -> Tensor:
            other: Tensor = right(x, w, **wrong)
            return other + (right(x, w) - other).detach()

        assert not torch.autograd.gradcheck(mixed, (x, w), raise_exception=False), list(wrong)


def broken_records_are_refused(device: str) -> None:
    case = make_case(device, torch.float32, torch.int32, 6, 50, 5)
    foreign = torch.where(case.ids == case.ids[0], (case.ids + 1) % 50, case.ids)
    flipped = case.ids.flip(0)
    for ids in (foreign, flipped):
        with pytest.raises(RecordError) as caught:
            case.score(case.hidden, Head(case.weight, 50), ids=ids)
        assert caught.value.reason in ("mask_sampled", "mask_duplicate")


def full_entropy_is_that_of_all_logits(device: str) -> None:
    case = make_case(device, torch.float32, torch.int32, 9, 3000, 20)
    head, sampled = Head(case.weight, 2990), case.sampled.clamp(max=2989)
    log_p = case.hidden.double() @ case.weight[:2990].double().T / case.tau[:, None].double()
    log_p = log_p.log_softmax(-1)
    want = -(log_p.exp() * log_p).sum(-1)
    mask = SamplingMask(torch.arange(10), sampled)
    scores = kept_logprobs(
        case.hidden, head, sampled, mask, temperature_S=case.tau, full_entropy=True
    )
    full = full_logprobs(case.hidden, head, sampled, temperature_S=case.tau)
    assert scores.full_entropy is not None
    assert full.full_entropy is not None
    for got in (scores.full_entropy, full.full_entropy):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# --- replay ---------------------------------------------------------------------------------------
L, E, K, D, V = 4, 16, 2, 32, 96
TOKENS = 160


class ToyMoe:
    """Decoder with causal averaging for attention and a routed layer; weights from a seed.

    The same numbers in every precision: `to(dtype)` casts.
    """

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(5)

        def weight(*shape: int, gain: float = 1.0) -> Tensor:
            scale = gain / math.sqrt(shape[-2])
            return (torch.randn(*shape, generator=generator) * scale).to(device)

        self.embed = weight(V, D, gain=math.sqrt(V))
        self.mix = weight(L, D, D)
        self.router = weight(L, D, E)
        self.up = weight(L, E, D, 2 * D)
        self.down = weight(L, E, 2 * D, D, gain=1.5)
        self.head = weight(D, V, gain=2.0)

    def to(self, dtype: torch.dtype) -> ToyMoe:
        other = object.__new__(ToyMoe)
        for name, value in vars(self).items():
            setattr(other, name, value.to(dtype, copy=True))
        return other

    def parameters(self) -> dict[str, Tensor]:
        return vars(self)

    def hidden(
        self, tokens: Tensor, replay: RouteReplay, mode: Mode
    ) -> tuple[Tensor, list[Tensor]]:
        """[N, D] before the head and the ids executed by layer; routers in fp32, as in trainers."""
        h = self.embed[tokens]
        past = torch.ones(len(tokens), len(tokens), device=h.device).tril()
        past = (past / past.sum(-1, keepdim=True)).to(h.dtype)
        executed = []
        with replay.forward(0, mode):
            for layer in range(L):
                h = h + (past @ h) @ self.mix[layer]
                normed = h / h.float().square().mean(-1, keepdim=True).sqrt().to(h.dtype)
                scores = (normed.float() @ self.router[layer].float()).softmax(-1)
                chosen, ids = replay.choose(layer, scores, K, lambda s=scores: s.topk(K, dim=1))
                gate = (chosen / chosen.sum(-1, keepdim=True)).to(h.dtype)
                inner = torch.einsum("nd,edf->nef", normed, self.up[layer])
                outer = torch.einsum(
                    "nef,efd->ned", torch.nn.functional.silu(inner), self.down[layer]
                )
                picked = outer.gather(1, ids[..., None].expand(-1, -1, D))
                h = h + (gate[..., None] * picked).sum(1)
                executed.append(ids)
        return h, executed


@dataclass(frozen=True)
class Recorded:
    """What an engine in bf16 leaves of one sequence."""

    tokens: Tensor  # [N] fed in
    labels: Tensor  # [N] produced
    routes: dict[int, Tensor]  # [N, K]
    offsets: Tensor
    ids: Tensor
    logprob: Tensor  # [N]


def record(model: ToyMoe, device: str) -> Recorded:
    """bf16, live routes; sampling masks by top-p 0.7 of its own logits, sampled from them."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, V, (TOKENS,), generator=generator).to(device)
    replay = fresh_replay()
    engine = model.to(torch.bfloat16)
    hidden, executed = engine.hidden(tokens, replay, Mode.RECORD)
    logits = hidden @ engine.head
    order = logits.float().softmax(-1).sort(descending=True)
    before = order.values.cumsum(-1) - order.values
    keep = torch.zeros_like(before, dtype=torch.bool).scatter(1, order.indices, before <= 0.7)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long, device=device), keep.sum(1).cumsum(0)])
    ids = keep.nonzero()[:, 1]
    kept = torch.where(keep, logits.float(), torch.full_like(before, -torch.inf)).cpu()
    labels = torch.multinomial(kept.softmax(-1), 1, generator=generator)[:, 0].to(device)
    logprob = kept_logprobs(
        hidden, Head(engine.head.T, V), labels, SamplingMask(offsets, ids),
        temperature_S=torch.ones(TOKENS, device=device),
    ).logprob  # fmt: skip
    routes = {layer: ids.detach() for layer, ids in enumerate(executed)}
    return Recorded(tokens, labels, routes, offsets, ids, logprob.detach())


def fresh_replay() -> RouteReplay:
    return RouteReplay(tuple(range(L)), num_experts=E, top_k=K)


def trainer_logprob(
    model: ToyMoe,
    recorded: Recorded,
    routes: dict[int, Tensor] | None,
    *,
    masked: bool = True,
    temperature: float = 1.0,
) -> tuple[Tensor, list[Tensor]]:
    """Log-probability of the labels and executed ids; routes None = live."""
    replay = fresh_replay()
    if routes is not None:
        replay.load(0, routes)
    mode = Mode.RECORD if routes is None else Mode.REPLAY
    hidden, executed = model.hidden(recorded.tokens, replay, mode)
    tau, head = torch.full((TOKENS,), temperature, device=hidden.device), Head(model.head.T, V)
    if not masked:
        scores = full_logprobs(hidden, head, recorded.labels, temperature_S=tau)
    else:
        scores = kept_logprobs(
            hidden, head, recorded.labels, SamplingMask(recorded.offsets, recorded.ids),
            temperature_S=tau,
        )  # fmt: skip
    return scores.logprob, executed


def gap(trainer: Tensor, engine: Tensor) -> tuple[float, float]:
    """(largest |d|, mean of k3 = exp(d) - 1 - d), d = trainer - engine."""
    d = (trainer - engine).double()
    return float(d.abs().max()), float((d.exp() - 1 - d).mean())


def replay_closes_the_gap(device: str) -> dict[str, tuple[float, float]]:
    """An fp32 trainer scores what a bf16 engine sampled: exact routes and sets, or it shows.

    Gates: executed experts bitwise equal to the record; with both replays max |d| <= 0.25 and mean
    d within 0.02; wrong routes reach ten times that maximum, a missing mask and another temperature
    four times.  Returns {name: (largest |d|, k3)}.
    """
    model = ToyMoe(device)
    recorded = record(model, device)
    with torch.no_grad():
        right, executed = trainer_logprob(model, recorded, recorded.routes)
        wrong = {
            name: trainer_logprob(model, recorded, routes)[0]
            for name, routes in controls(recorded).items()
        }
        bare, _ = trainer_logprob(model, recorded, recorded.routes, masked=False)
        hot, _ = trainer_logprob(model, recorded, recorded.routes, temperature=1.3)
    for layer, ids in enumerate(executed):
        assert torch.equal(ids, recorded.routes[layer]), f"layer {layer} executed other experts"
    everything = {"replay": right, **wrong, "mask missing": bare, "temperature 1.3": hot}
    numbers = {name: gap(lp, recorded.logprob) for name, lp in everything.items()}
    most = numbers["replay"][0]
    assert most <= 0.25, numbers
    assert abs(float((right - recorded.logprob).mean())) < 0.02, numbers
    for name in wrong:
        assert numbers[name][0] >= 10 * most, (name, numbers)
    for name in ("mask missing", "temperature 1.3"):
        assert numbers[name][0] >= 4 * most, (name, numbers)
    return numbers


def controls(recorded: Recorded) -> dict[str, dict[int, Tensor] | None]:
    """Records that must fail; `live` is no replay at all."""
    routes = recorded.routes
    generator = torch.Generator().manual_seed(3)
    hurt = {}
    for layer, ids in routes.items():
        where = (torch.rand(len(ids), generator=generator) < 0.05).to(ids.device)
        hurt[layer] = ids.clone()
        hurt[layer][where, 0] = unnamed_expert(ids)[where]
    return {
        "shifted": {layer: ids.roll(1, 0) for layer, ids in routes.items()},
        "reversed": {layer: routes[L - 1 - layer] for layer in routes},
        "5% corrupted": hurt,
        "live": None,
    }


def unnamed_expert(ids: Tensor) -> Tensor:
    """For each row [K] an expert that is not in it, [N]."""
    candidates = (ids[:, :1] + torch.arange(1, K + 1, device=ids.device)) % E
    free = (candidates[:, :, None] != ids[:, None, :]).all(-1)
    return candidates.gather(1, free.int().argmax(1, keepdim=True))[:, 0]


def gradient_reaches_chosen_experts_only(device: str, dtype: torch.dtype) -> None:
    """Under replay an expert that no row names gets exactly zero, routers do not."""
    model = ToyMoe(device)
    recorded = record(model, device)
    banned = 3
    routes = {
        layer: torch.where(ids == banned, unnamed_expert(ids)[:, None], ids)
        for layer, ids in recorded.routes.items()
    }
    assert all(not bool((ids == banned).any()) for ids in routes.values())
    trained = model.to(dtype)
    for value in trained.parameters().values():
        value.requires_grad_()
    logprob, _ = trainer_logprob(trained, recorded, routes)
    logprob.sum().backward()
    for name in ("up", "down"):
        grad = trained.parameters()[name].grad
        assert grad is not None
        assert not grad[:, banned].any(), f"{name} of an expert that no row names moved"
        assert grad[:, (banned + 1) % E].any()
    router = trained.router.grad
    assert router is not None
    assert all(bool(layer.any()) for layer in router), "a router got no gradient"
