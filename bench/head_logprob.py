"""The head by blocks against one that makes all logits: time and peak memory, forward + backward.

    python bench/head_logprob.py [--tokens 4096] [--hidden 64] [--kept 64] [--dtype bfloat16]
        [--rounds 3] [--rows masks] [--only blocks] [--fp32-head] [--most-gb 10] [--equal]
        [--skyrl WHEEL] [--json FILE]

At V = 151,936 (Qwen3), from the hidden states of all tokens to the gradients of hidden states and
weight.  `logits` is one product [tokens, V], log-probabilities from it (over the kept entries as
CSR, or over the vocabulary in chunks of rows), and a gradient [tokens, V]; `blocks` is
moerl/algorithms/head_logprob.py.  Every token is sampled, which favours `logits`: prompts would
cost it as much.  Both with sampling masks and without.  Ways alternate, so that a noisy machine
hits both alike; ratios are taken within a round.  `--device cuda` runs the same on a GPU.
`--fp32-head` is `model.fp32_lm_head`, of blocks alone.

`--skyrl` adds a third way, with masks: SkyRL 0.4's projection onto kept rows (bench/skyrl_head.py),
from masks that are as wide as the largest; `--equal` makes all of one size, which is its best case.
Errors are of log-probabilities and of the gradient of hidden states (its norm), against fp64.

Memory is the peak beyond inputs and the gradient of the weight: on the CPU by the high-water mark
of a process of its own, on CUDA by the allocator.  Where logits and their gradient take more than
`--most-gb`, `logits` is left out, and the bytes of the two are computed in place of a peak.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.autograd import Function

from moerl.algorithms.head_logprob import Head, SamplingMask, full_logprobs, kept_logprobs

V, TAU = 151_936, 0.8
KINDS = ("masks", "vocabulary")
SKYRL_WHEEL = "SKYRL_WHEEL"  # environment variable: path of the wheel whose way is compared
ROWS = 32  # of logits in fp32 at a time, about


@dataclass(frozen=True)
class Shape:
    """One comparison."""

    tokens: int
    hidden: int
    kept: int  # mean size of a sampling mask
    masked: bool
    fp32: bool = False  # an fp32 head of blocks
    equal: bool = False  # all sampling masks have the mean size

    def logits_bytes(self, dtype: torch.dtype) -> int:
        """All logits and their gradient."""
        return 2 * self.tokens * V * dtype.itemsize


class Inputs:
    """Hidden states, a head with a gradient buffer, and masks of geometric size."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.empty(shape.tokens).exponential_(1 / shape.kept, generator=generator)
        if shape.equal:
            sizes.fill_(shape.kept)
        sets = [
            torch.randint(0, V, (int(size),), generator=generator).unique()
            for size in sizes.long().clamp(1, V)
        ]
        offsets = torch.tensor([0, *(len(one) for one in sets)]).cumsum(0)
        self.shape, self.mask = shape, SamplingMask(offsets, torch.cat(sets).int())
        self.sampled = torch.stack([one[len(one) // 2] for one in sets])
        if os.environ.get(SKYRL_WHEEL):
            from skyrl_head import support_of

            self.support = support_of(self.mask.offsets, self.mask.ids)
        self.tau = torch.full((shape.tokens,), TAU, device=device)
        hidden = torch.randn(shape.tokens, shape.hidden, generator=generator)
        weight = torch.randn(V, shape.hidden, generator=generator) * shape.hidden**-0.5
        self.hidden = hidden.to(device, dtype).requires_grad_()
        weights: Any = torch.nn.Parameter(weight.to(device, dtype))
        weights.main_grad = torch.zeros(V, shape.hidden, device=device)
        self.weight = weights

    def reset(self) -> None:
        self.hidden.grad = self.weight.grad = None


def by_blocks(inputs: Inputs) -> Tensor:
    inputs.weight.grad_added_to_main_grad = False  # as Megatron's data-parallel wrapper marks it
    head = Head(inputs.weight, V, fp32=inputs.shape.fp32)
    if inputs.shape.masked:
        scores = kept_logprobs(
            inputs.hidden, head, inputs.sampled, inputs.mask, temperature_S=inputs.tau
        )
    else:
        scores = full_logprobs(inputs.hidden, head, inputs.sampled, temperature_S=inputs.tau)
    return scores.logprob


def by_logits(inputs: Inputs) -> Tensor:
    logits, device = inputs.hidden @ inputs.weight.T, inputs.hidden.device
    sampled = inputs.sampled.to(device)
    if not inputs.shape.masked:
        result: Tensor = _Vocabulary.apply(logits, sampled, inputs.tau)  # type: ignore[no-untyped-call]
        return result
    ids, counts = inputs.mask.ids.to(device).long(), inputs.mask.offsets.to(device).diff()
    owner = torch.repeat_interleave(counts)
    z = logits[owner, ids].float() / inputs.tau[owner]
    top = torch.segment_reduce(z.detach(), "max", lengths=counts, unsafe=True)
    total = torch.zeros_like(top).index_add(0, owner, (z - top[owner]).exp())
    own = z[(ids == sampled[owner]).nonzero()[:, 0]]
    return own - top - total.log()


class _Vocabulary(Function):
    """log_softmax of the sampled tokens, rows in chunks: no second [tokens, V] in fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sampled: Tensor, tau: Tensor) -> Tensor:
        found, log_z = torch.empty_like(tau), torch.empty_like(tau)
        for rows in torch.arange(len(tau), device=tau.device).split(ROWS):
            z = logits[rows].float() / tau[rows, None]
            log_z[rows] = z.logsumexp(-1)
            found[rows] = z.gather(1, sampled[rows, None])[:, 0] - log_z[rows]
        ctx.save_for_backward(logits, sampled, tau, log_z)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, sampled, tau, log_z = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in torch.arange(len(tau), device=tau.device).split(ROWS):
            p = (logits[rows].float() / tau[rows, None] - log_z[rows, None]).exp().neg()
            p[torch.arange(len(rows)), sampled[rows]] += 1
            grad[rows] = (p * (grads[0] / tau)[rows, None]).to(grad.dtype)
        return grad, None, None


def by_skyrl(inputs: Inputs) -> Tensor:
    from skyrl_head import logprobs

    return logprobs(inputs.hidden, inputs.weight, inputs.sampled, inputs.support, TAU)


WAYS: dict[str, Callable[[Inputs], Tensor]] = {
    "logits": by_logits,
    "blocks": by_blocks,
    "skyrl": by_skyrl,
}


def step(inputs: Inputs, way: str) -> Tensor:
    inputs.reset()
    logprob = WAYS[way](inputs)
    logprob.sum().backward()
    return logprob.detach()


def check(inputs: Inputs, names: Sequence[str]) -> None:
    """All ways agree, as far as one rounding of a logit goes."""
    one, *others = names
    want = step(inputs, one)
    bound = 1e-4 if inputs.hidden.dtype == torch.float32 else 0.1
    for way in others:
        gap = float((step(inputs, way) - want).abs().max())
        assert gap < bound, f"{way} and {one} differ by {gap}"


def errors(inputs: Inputs, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of log-probabilities, the largest, and of the gradient of hidden states, relative."""
    hidden, weight = inputs.hidden.detach().double().requires_grad_(), inputs.weight.detach()
    offsets, ids = inputs.mask.offsets.tolist(), inputs.mask.ids.long().to(weight.device)
    parts = []
    for token, (begin, end) in enumerate(pairwise(offsets)):
        z = weight[ids[begin:end]].double() @ hidden[token] / TAU
        own = int((ids[begin:end] == inputs.sampled[token].to(ids.device)).nonzero())
        parts.append(z[own] - z.logsumexp(0))
    want = torch.stack(parts)
    want.sum().backward()
    assert hidden.grad is not None
    found = {}
    for way in names:
        logprob = step(inputs, way)
        gap = inputs.hidden.grad.double() - hidden.grad  # type: ignore[union-attr]
        found[way] = {
            "logprob": float((logprob.double() - want.detach()).abs().max()),
            "grad": float(gap.norm() / hidden.grad.norm()),
        }
    return found


def measure_time(inputs: Inputs, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            synchronize(inputs)
            begin = time.perf_counter()
            step(inputs, name)
            synchronize(inputs)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def synchronize(inputs: Inputs) -> None:
    if inputs.hidden.is_cuda:
        torch.cuda.synchronize()


# --- memory ---------------------------------------------------------------------------------------
def cuda_peak(inputs: Inputs, way: str) -> int:
    step(inputs, way)
    inputs.reset()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(inputs, way)
    return torch.cuda.max_memory_allocated() - before


def cpu_peak(shape: Shape, dtype: torch.dtype, way: str) -> int:
    context = mp.get_context("spawn")  # a process of its own: high-water marks do not go down
    queue = context.SimpleQueue()
    process = context.Process(target=_cpu_peak, args=(shape, dtype, way, queue))
    process.start()
    peak: int = queue.get()
    process.join()
    return peak


def _cpu_peak(shape: Shape, dtype: torch.dtype, way: str, queue: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    few = replace(shape, tokens=4, kept=8)
    step(Inputs(few, dtype, "cpu"), way)  # code and pools
    inputs = Inputs(shape, dtype, "cpu")
    ctypes.CDLL(None).malloc_trim(0)  # or the step would fill holes that are counted already
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
    before = _high_water()
    step(inputs, way)
    queue.put(_high_water() - before)


def _high_water() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError("/proc/self/status has no VmHWM")


# --- command --------------------------------------------------------------------------------------
def measured(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    dtype, names = getattr(torch, args.dtype), args.only or list(WAYS)
    if not (args.skyrl and shape.masked):
        names = [name for name in names if name != "skyrl"]
    if shape.logits_bytes(dtype) > args.most_gb * 1e9:
        names = [name for name in names if name != "logits"]
    inputs = Inputs(shape, dtype, args.device)
    if len(names) > 1:
        check(inputs, names)
    wrong = errors(inputs, names) if args.skyrl and shape.masked else {}
    seconds = measure_time(inputs, names, args.rounds)
    if args.device == "cuda":
        peaks = {name: cuda_peak(inputs, name) for name in names}
    else:
        del inputs
        peaks = {name: cpu_peak(shape, dtype, name) for name in names}
    found: dict[str, Any] = {
        "shape": asdict(shape),
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "peak_mib": {name: peak / 2**20 for name, peak in peaks.items()},
        "computed_mib_of_all_logits": shape.logits_bytes(dtype) / 2**20,
    }
    if "blocks" in peaks:
        found["computed_memory_ratio"] = shape.logits_bytes(dtype) / peaks["blocks"]
    for name in {"logits", "skyrl"} & peaks.keys() if "blocks" in peaks else ():
        ratios = [a / b for a, b in zip(seconds[name], seconds["blocks"], strict=True)]
        found[f"{name}_over_blocks"] = {
            "time": [min(ratios), statistics.median(ratios), max(ratios)],
            "memory": peaks[name] / peaks["blocks"],
        }
    return found | ({"errors": wrong} if wrong else {})


def main() -> None:
    from figures import machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--kept", type=int, default=64, help="mean size of a sampling mask")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", choices=KINDS, action="append", help="one kind of rows alone")
    parser.add_argument("--fp32-head", action="store_true", help="blocks multiply in fp32")
    parser.add_argument("--most-gb", type=float, default=10.0, help="of all logits, 1e9 bytes")
    parser.add_argument("--only", choices=list(WAYS), action="append", help="one way alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--equal", action="store_true", help="all masks of one size")
    parser.add_argument("--skyrl", type=Path, metavar="WHEEL", help="compare with SkyRL's way")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    args = parser.parse_args()
    if args.skyrl:
        os.environ[SKYRL_WHEEL] = str(args.skyrl.resolve())
    torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "dtype": args.dtype, "device": args.device}
    for rows in args.rows or KINDS:
        masked = rows == "masks"
        shape = Shape(args.tokens, args.hidden, args.kept, masked, args.fp32_head, args.equal)
        result[rows] = measured(shape, args)
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
