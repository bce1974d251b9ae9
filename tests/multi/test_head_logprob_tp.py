"""The head cut over 1, 2 and 4 gloo processes, against all logits on one in fp64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moerl.algorithms import head_plan
from moerl.algorithms.head_logprob import (
    Head,
    HeadFactors,
    SamplingMask,
    Scores,
    full_logprobs,
    kept_logprobs,
    top_logprobs,
)
from moerl.algorithms.mismatch import MismatchSums
from moerl.algorithms.support_losses import Support, centering, forward_kl, reverse_kl
from moerl.config.algorithms import RatioRule

S, V, H, R, WORLD = 40, 2400, 24, 3, 4
PADDED = 2408
SHARDS = (1, 2, 4)
FP32 = "fp32 head"  # of bf16 operands
KINDS = ("few", "one", "all", "mixed", "full")
BLOCKS = {"one block": {}, "small blocks": {"_BLOCK": 900, "_ROWS": 11, "_PIECE": 30}}
EXACT = 1e-6
HALF = ("hidden", "weight")
TOP = 17  # likeliest entries of another policy
TERMS = {
    "centering": lambda s: centering(s, torch.ones(S, dtype=s.logprob.dtype), RULE),
    "reverse": reverse_kl,
    "forward": forward_kl,
}
RULE = RatioRule("clamped", (0.5, 1.5), (0.5, 1.5))
OVER = ("mask", "top")  # a support: the recorded masks, or the other policy's likeliest


class Found(NamedTuple):
    """Sums of the last three over ranks are gradients; the weight's are of a rank's own entries."""

    logprob: Tensor
    entropy: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    d_a: Tensor
    d_b: Tensor


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (S, H), "weight": (PADDED, H), "a": (R, H), "b": (V, R)}
    return {
        name: torch.randn(*shape, generator=generator) / (1 if name == "hidden" else H**0.5)
        for name, shape in shapes.items()
    } | {"tau": torch.rand(S, generator=generator) + 0.5}


def record(kind: str) -> tuple[Tensor, Tensor]:
    """Kept entries [S, V] and sampled tokens; the first rows keep nothing on the first rank."""
    generator = torch.Generator().manual_seed(5)
    share = {"few": 0.003, "one": 0.0, "all": 1.0, "mixed": 0.02, "full": 1.0}[kind]
    keep = torch.rand(S, V, generator=generator) < share
    if kind == "mixed":
        keep[::3] = torch.rand(S, V, generator=generator)[::3] < 0.001
        keep[5] = True
    sampled = torch.randint(0, V, (S,), generator=generator)
    if kind != "all":
        keep[:3, : V // 4] = kind == "full"
        sampled[:3] = V - 1
    keep[torch.arange(S), sampled] = True
    return keep, sampled


def csr(keep: Tensor) -> SamplingMask:
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), keep.sum(1).cumsum(0)])
    return SamplingMask(offsets, keep.nonzero()[:, 1].int())


def by_logits(kind: str, *, half: bool = False) -> Found:
    """half: of hidden states and a weight in bf16."""
    keep, sampled = record(kind)
    parts = {n: t.bfloat16() if half and n in HALF else t for n, t in tensors().items()}
    x, w, a, b, tau = (t.double().requires_grad_() for t in parts.values())
    tau = tau.detach()
    # the adapter is in the weight already: no change of value, its gradient
    changed = w[:V] + 0.5 * (b @ a - (b @ a).detach())
    z = (x @ changed.T / tau[:, None]).masked_fill(~keep, -torch.inf)
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~keep, 0.0)).sum(-1)
    logprob = log_p.gather(1, sampled[:, None])[:, 0]
    (logprob * torch.linspace(-1, 2, S)).sum().backward()
    return Found(logprob.detach(), entropy.detach(), *(t.grad for t in (x, w, a, b)))


def by_blocks(
    kind: str, rank: int, size: int, group: dist.ProcessGroup | None, shift: int = 0
) -> Found:
    keep, sampled = record(kind)
    width = PADDED // size
    part = slice(rank * width, (rank + 1) * width)
    x, w, a, b, tau = tensors().values()
    x, w, a, b = (t.clone().requires_grad_() for t in (x, w[part], a, b[part]))
    head = Head(w, V, part.start, group, adapter=HeadFactors(a, b, 0.5))
    scores = scored(kind, x, head, keep, sampled, tau, shift)
    (scores.logprob * torch.linspace(-1, 2, S)).sum().backward()
    return Found(scores.logprob.detach(), scores.entropy, *(t.grad for t in (x, w, a, b)))


def in_half(kind: str, rank: int, size: int, group: dist.ProcessGroup, *, fp32: bool) -> Found:
    """`by_blocks` of hidden states and a weight in bf16, whose gradient is in a buffer."""
    keep, sampled = record(kind)
    part = slice(rank * (PADDED // size), (rank + 1) * (PADDED // size))
    x, w, a, b, tau = tensors().values()
    x, a, b = (t.requires_grad_() for t in (x.bfloat16(), a, b[part].clone()))
    weight: Any = torch.nn.Parameter(w[part].bfloat16())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(len(weight), H), False
    head = Head(weight, V, part.start, group, adapter=HeadFactors(a, b, 0.5), fp32=fp32)
    scores = scored(kind, x, head, keep, sampled, tau, shift=0)
    (scores.logprob * torch.linspace(-1, 2, S)).sum().backward()
    gradients = (x.grad, weight.main_grad, a.grad, b.grad)
    return Found(scores.logprob.detach(), scores.entropy, *gradients)


def other_weight() -> Tensor:
    """Of the engine, or the teacher."""
    noise = torch.randn(PADDED, H, generator=torch.Generator().manual_seed(9))
    return tensors()["weight"] + 0.2 * noise / H**0.5


def terms_by_logits(over: str, term: str) -> Found:
    """Dense rows in fp64; over masks both policies are normalised, likeliest entries have a rest.

    The entropy of `Found` is the other policy's log-probability of the first entry of a row.
    """
    keep, _ = record("mixed")
    x, w, a, b, tau = (t.double().requires_grad_() for t in tensors().values())
    tau = tau.detach()
    changed = w[:V] + 0.5 * (b @ a - (b @ a).detach())
    other = (x.detach() @ other_weight()[:V].double().T / tau[:, None]).log_softmax(-1)
    z = x @ changed.T / tau[:, None]
    if over == "mask":
        z, other = (one.masked_fill(~keep, -torch.inf) for one in (z, other))
        other = other.log_softmax(-1)
    else:
        keep = torch.zeros_like(keep).scatter_(1, other.topk(TOP).indices, True)
    p = z.log_softmax(-1)
    value = TERMS[term](Support(p[keep], other[keep], keep.sum(1), over == "mask"))
    (value * torch.linspace(-1, 2, S)).sum().backward()
    first = other[torch.arange(S), keep.int().argmax(1)]
    return Found(value.detach(), first.detach(), *(t.grad for t in (x, w, a, b)))


def terms_by_blocks(
    over: str, term: str, rank: int, size: int, group: dist.ProcessGroup, *, broken: bool = False
) -> Found:
    """broken: gradients without the sum over the support."""
    keep, sampled = record("mixed")
    width = PADDED // size
    part = slice(rank * width, (rank + 1) * width)
    x, w, a, b, tau = tensors().values()
    x, w, a, b = (t.clone().requires_grad_() for t in (x, w[part], a, b[part]))
    head = Head(w, V, part.start, group, adapter=HeadFactors(a, b, 0.5))
    other = Head(other_weight()[part], V, part.start, group)
    if over == "mask":
        mask = csr(keep)
        own, its = (
            kept_logprobs(x if h is head else x.detach(), h, sampled, mask, temperature_S=tau,
                          support=True).support
            for h in (head, other)
        )  # fmt: skip
    else:
        ids, its = top_logprobs(x.detach(), other, TOP, temperature_S=tau)
        ids, order = ids.sort(1)
        its = its.gather(1, order).flatten()
        mask = SamplingMask(torch.arange(S + 1) * TOP, ids.flatten())
        own = full_logprobs(x, head, sampled, temperature_S=tau, support=mask).support
    assert own is not None
    assert its is not None
    if broken:
        own = own + (own.detach() - own) * (torch.arange(len(own)) % 2)
    value = TERMS[term](Support(own, its, mask.offsets.diff(), over == "mask"))
    (value * torch.linspace(-1, 2, S)).sum().backward()
    first = its[mask.offsets[:-1]].detach()
    return Found(value.detach(), first, *(t.grad for t in (x, w, a, b)))


def scored(
    kind: str, x: Tensor, head: Head, keep: Tensor, sampled: Tensor, tau: Tensor, shift: int
) -> Scores:
    if kind == "full":
        return full_logprobs(x, head, sampled, temperature_S=tau)
    if shift:
        keep = keep.roll(shift, 1)
        keep[torch.arange(S), sampled] = True
    return kept_logprobs(x, head, sampled, csr(keep), temperature_S=tau)


def _rank(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    found = {}
    for size in SHARDS:
        group = dist.new_group(range(size))
        for blocks, sizes in BLOCKS.items():
            before = {name: getattr(head_plan, name) for name in sizes}
            vars(head_plan).update(sizes)
            for kind in KINDS if rank < size else ():
                found[size, blocks, kind] = by_blocks(kind, rank, size, group)
            for over, term in product(OVER, TERMS) if rank < size else ():
                found[size, blocks, f"{over} {term}"] = terms_by_blocks(
                    over, term, rank, size, group
                )
            for kind in ("few", "full") if rank < size else ():
                found[size, f"{FP32}, {blocks}", kind] = in_half(kind, rank, size, group, fp32=True)
            vars(head_plan).update(before)
        if rank < size:
            found[size, "rounded", "full"] = in_half("full", rank, size, group, fp32=False)
            found[size, "broken", "mask reverse"] = terms_by_blocks(
                "mask", "reverse", rank, size, group, broken=True
            )
            found[size, "shifted", "few"] = by_blocks("few", rank, size, group, shift=1)
    d = torch.arange(4.0) * (rank + 1) * 0.1
    sums = MismatchSums.of(-d, torch.zeros(4), torch.tensor([0, 1, 3, 9]))
    torch.save((found, sums.all_reduce(dist.group.WORLD).metrics()), folder / f"{rank}.pt")
    dist.destroy_process_group()


Ranks = list[tuple[dict[tuple[int, str, str], Found], dict[str, float]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Ranks:
    """What each process computed: scores and gradients, joined mismatch metrics."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_rank, (free_port(), folder), nprocs=WORLD, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def joined(ranks: Ranks, size: int, blocks: str, kind: str) -> Found:
    every = [found[size, blocks, kind] for found, _ in ranks[:size]]
    first = every[0]
    for other in every:  # equal bitwise: every rank computes the same loss
        assert torch.equal(other.logprob, first.logprob)
        assert torch.equal(other.entropy, first.entropy)
    d_hidden, d_a = (
        sum(getattr(one, name).double() for one in every) for name in ("d_hidden", "d_a")
    )
    d_weight, d_b = (
        torch.cat([getattr(one, name) for one in every]) for name in ("d_weight", "d_b")
    )
    return Found(first.logprob, first.entropy, d_hidden, d_weight, d_a, d_b)


def errors(found: Found, want: Found) -> dict[str, float]:
    """Largest difference, relative to the largest number of its kind where that is above 1."""
    return {
        name: float((a.double() - b).abs().max() / b.abs().max().clamp(min=1))
        for name, a, b in zip(Found._fields, found, want, strict=True)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("size", SHARDS)
def test_shards_give_what_all_logits_give(ranks: Ranks, size: int, blocks: str, kind: str) -> None:
    found = errors(joined(ranks, size, blocks, kind), by_logits(kind))
    print(found)
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("size", SHARDS)
def test_terms_over_a_support_are_those_of_all_logits(
    ranks: Ranks, size: int, blocks: str, over: str, term: str
) -> None:
    found = errors(joined(ranks, size, blocks, f"{over} {term}"), terms_by_logits(over, term))
    print(found)
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("size", SHARDS)
def test_control_a_gradient_of_half_of_the_support_is_another(ranks: Ranks, size: int) -> None:
    found = errors(
        joined(ranks, size, "broken", "mask reverse"), terms_by_logits("mask", "reverse")
    )
    assert found["logprob"] <= EXACT
    assert found["d_hidden"] > 1e-2


@pytest.mark.parametrize("size", SHARDS)
def test_control_sets_shifted_by_one_id_are_wrong(ranks: Ranks, size: int) -> None:
    found = errors(joined(ranks, size, "shifted", "few"), by_logits("few"))
    assert min(found.values()) > 100 * EXACT, found


@pytest.mark.parametrize("kind", ["few", "full"])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("size", SHARDS)
def test_shards_of_an_fp32_head_give_what_all_logits_of_bf16_operands_give(
    ranks: Ranks, size: int, blocks: str, kind: str
) -> None:
    """Shards round their gradients of hidden states to bf16; they are summed here in fp64."""
    found = errors(joined(ranks, size, f"{FP32}, {blocks}", kind), by_logits(kind, half=True))
    print(found)
    assert found.pop("d_hidden") <= 2**-7
    assert found.pop("d_a") <= 3 * EXACT  # a sum over all entries, then one over all tokens
    assert max(found.values()) <= EXACT, found


@pytest.mark.parametrize("size", SHARDS)
def test_control_a_head_in_bf16_is_rounded(ranks: Ranks, size: int) -> None:
    found = errors(joined(ranks, size, "rounded", "full"), by_logits("full", half=True))
    assert min(found.values()) > 100 * EXACT, found


def test_control_a_shard_without_its_group_is_wrong() -> None:
    alone = by_blocks("full", 1, 2, None).logprob
    assert float((alone - by_logits("full").logprob).abs().max()) > 0.1


def test_mismatch_sums_of_all_ranks_are_those_of_their_tokens(ranks: Ranks) -> None:
    d = torch.cat([torch.arange(4.0) * (rank + 1) * 0.1 for rank in range(WORLD)])
    lag = torch.tensor([0, 1, 3, 9] * WORLD)
    want = MismatchSums.of(-d, torch.zeros(len(d)), lag).metrics()
    for _, got in ranks:
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert abs(got[name] - value) < 1e-12, name
