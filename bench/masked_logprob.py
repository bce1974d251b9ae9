"""CSR masked log-softmax against a dense boolean mask: time and peak memory, forward + backward.

    python bench/masked_logprob.py [--rows 512] [--kept 64] [--dtype bfloat16] [--rounds 7]

Three ways to the same numbers, at V = 151,936 (Qwen3): `dense` builds a [rows, V] boolean mask and
takes torch's log_softmax of the masked logits in fp32, as trainers do that have no sparse form;
`torch` and `built` are the two implementations of moerl/algorithms/masked_logprob.py.  Each round
runs all three in rotating order, so that a noisy machine hits all alike; ratios are taken within a
round.  `--device cuda` runs the same on a GPU.

Memory is what an implementation holds at its peak beyond the logits and the record: on the CPU by
the high-water mark of a process of its own, on CUDA by the allocator.  The gradient of the logits,
[rows, V], is part of it, because the output layer's backward wants it dense; `zeros` does nothing
but make that gradient, so it is the floor of all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp
from torch import Tensor

from moerl.algorithms.masked_logprob import SamplingMask, kept_logprobs
from moerl.kernels.library import describe, library

V = 151_936
Score = Callable[[Tensor, "Record"], Tensor]


class Record:
    """Sampled tokens and sampling masks of geometric size, as truncated sampling leaves them."""

    def __init__(self, rows: int, kept: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.empty(rows).exponential_(1 / kept, generator=generator).long().clamp(1, V)
        sets = [torch.randint(0, V, (int(size),), generator=generator).unique() for size in sizes]
        self.offsets = torch.tensor([0, *(len(one) for one in sets)]).cumsum(0).to(device)
        self.ids = torch.cat(sets).int().to(device)
        self.sampled = torch.stack([one[len(one) // 2] for one in sets]).to(device)
        self.tau = torch.full((rows,), 0.8, device=device)


def dense(logits: Tensor, record: Record) -> Tensor:
    rows = len(record.sampled)
    owner = torch.repeat_interleave(record.offsets.diff())
    keep = torch.zeros(rows, V, dtype=torch.bool, device=logits.device)
    keep[owner, record.ids.long()] = True
    z = (logits.float() / record.tau[:, None]).masked_fill(~keep, -torch.inf)
    return z.log_softmax(-1).gather(1, record.sampled[:, None])[:, 0]


def zeros(logits: Tensor, record: Record) -> Tensor:
    return logits[: len(record.sampled), 0] * 0


def sparse(implementation: str) -> Score:
    def score(logits: Tensor, record: Record) -> Tensor:
        return kept_logprobs(
            logits,
            record.sampled,
            SamplingMask(record.offsets, record.ids),
            temperature_S=record.tau,
            implementation=implementation,
        ).logprob

    return score


ARMS: dict[str, Score] = {
    "dense": dense,
    "torch": sparse("torch"),
    "built": sparse("built"),
    "zeros": zeros,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="sampled tokens")
    parser.add_argument("--kept", type=int, default=64, help="mean size of a sampling mask")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    names = [name for name in ARMS if name != "built" or library(args.device) is not None]
    record = Record(args.rows, args.kept, args.device)
    size = args.rows * V * dtype.itemsize
    print(
        f"{args.rows} rows x {V} in {args.dtype}, {len(record.ids)} kept ids; logits and their "
        f"gradient {size / 2**20:.0f} MiB each; {args.device}, load {os.getloadavg()[0]:.1f}"
    )
    print(describe(args.device))
    logits = make_logits(args.rows, dtype, args.device)
    check(logits, record, names)
    seconds = measure_time(logits, record, names, args.rounds)
    del logits
    for name in names:
        peak = measure_memory(name, args) / 2**20
        mid = statistics.median(seconds[name])
        ratios = [a / b for a, b in zip(seconds["dense"], seconds[name], strict=True)]
        print(
            f"{name:6s} {1e3 * mid:8.1f} ms, dense / this {statistics.median(ratios):5.1f} "
            f"({min(ratios):.1f} .. {max(ratios):.1f}); peak {peak:7.1f} MiB, of that "
            f"{peak - size / 2**20:7.1f} beside the gradient"
        )
    print(f"load {os.getloadavg()[0]:.1f} at the end, {args.rounds} interleaved rounds")


def make_logits(rows: int, dtype: torch.dtype, device: str) -> Tensor:
    torch.manual_seed(0)
    logits = torch.empty(rows, V, dtype=dtype, device=device)
    for part in logits.split(64):
        part.copy_(torch.randn(len(part), V) * 2)
    return logits.requires_grad_()


def step(score: Score, logits: Tensor, record: Record) -> tuple[Tensor, Tensor]:
    logprob = score(logits, record)
    logprob.sum().backward()
    grad, logits.grad = logits.grad, None
    assert grad is not None
    return logprob.detach(), grad


def check(logits: Tensor, record: Record, names: list[str]) -> None:
    """The arms agree."""
    results = {name: step(ARMS[name], logits, record)[0] for name in names}
    for name in set(names) - {"zeros"}:
        gap = float((results[name] - results["dense"]).abs().max())
        assert gap < 1e-4, f"{name} differs from dense by {gap}"


def measure_time(
    logits: Tensor, record: Record, names: list[str], rounds: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in (*names[turn:], *names[:turn]):
            synchronize(logits)
            begin = time.perf_counter()
            step(ARMS[name], logits, record)
            synchronize(logits)
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def synchronize(logits: Tensor) -> None:
    if logits.is_cuda:
        torch.cuda.synchronize()


def measure_memory(name: str, args: argparse.Namespace) -> int:
    """Peak bytes of one step beyond what was there before it."""
    if args.device == "cuda":
        return cuda_peak(name, args)
    context = mp.get_context("spawn")  # a process of its own: high-water marks do not go down
    queue = context.SimpleQueue()
    process = context.Process(target=cpu_peak, args=(name, args, queue))
    process.start()
    peak: int = queue.get()
    process.join()
    return peak


def cpu_peak(name: str, args: argparse.Namespace, queue: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    record = Record(args.rows, args.kept, "cpu")
    small = Record(4, 8, "cpu")
    step(ARMS[name], make_logits(4, getattr(torch, args.dtype), "cpu"), small)  # code and pools
    logits = make_logits(args.rows, getattr(torch, args.dtype), "cpu")
    ctypes.CDLL(None).malloc_trim(0)  # or the step would fill holes that are counted already
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is held now
    before = status_bytes("VmHWM")
    step(ARMS[name], logits, record)
    queue.put(status_bytes("VmHWM") - before)


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def cuda_peak(name: str, args: argparse.Namespace) -> int:
    record = Record(args.rows, args.kept, "cuda")
    logits = make_logits(args.rows, getattr(torch, args.dtype), "cuda")
    step(ARMS[name], logits, record)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(ARMS[name], logits, record)
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
