"""How evenly recorded routes load expert-parallel ranks, and what levelling them would gain.

    moerl train quickstart stream.keep_steps=-1 --run load
    python bench/expert_levelling.py runs/load --ep 2 4

An expert-parallel group waits for its busiest rank in each layer of each microbatch.  Printed is
the work of the busiest ranks over the mean of ranks, summed over layers (1 = level):

- step: all tokens of a step at once, the floor for any order of its rows;
- microbatch: the plan that was trained;
- dealt: rows dealt anew to the same number of microbatches, by their routes;
- placed: the trained plan, with experts put on ranks by the routes of earlier steps, each time for
  the next `--every` steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from figures import machine
from numpy.typing import NDArray

from moerl.records import BlobStore
from moerl.records.blob_ranges import read_all_routes
from moerl.records.header_check import moved_to_node
from moerl.records.stream_files import StepFile, StreamDir, read_lines, surviving, whole_plan

Counts = NDArray[np.int64]
Ranks = NDArray[np.int64]  # [L, E]: rank of each expert
TOKENS_MORE = 1.1  # tokens of a dealt microbatch over the mean, at most


@dataclass(frozen=True)
class Rows:
    """The rows of one step."""

    counts: Counts  # [rows, L, E]: tokens x K that each expert served
    tokens: Counts  # [rows]: fed in
    microbatch: Counts  # [rows]: expert-parallel group and microbatch, 0 to n


def steps_of(run: Path, ep: int) -> Iterator[Rows]:
    """The trained steps, in order."""
    folder = StreamDir(run / "stream")
    kept, _ = surviving(line for line, _ in read_lines(folder.log))
    for line in kept:
        plan, blobs = whole_plan(StepFile(folder, line))
        with tempfile.TemporaryDirectory() as name:
            store = BlobStore(Path(name), "n")
            for uri, data in blobs.items():
                store.put_back(moved_to_node(uri, store.node), data)
            counts, tokens, places = [], [], []
            for row in plan.rows:
                group = moved_to_node(plan.groups[row.group], store.node)
                rollout = group.episodes[row.episode].turns[row.turn].rollout
                parts = rollout.routing
                span = [(parts[0].row_begin, parts[-1].row_end)]
                ids = read_all_routes(store, [(parts, span)], layers=parts[0].layers)
                experts = range(parts[0].num_experts)
                counts.append([np.bincount(layer.ravel(), minlength=len(experts)) for layer in ids])
                tokens.append(ids.shape[1])
                places.append((row.dp_rank // ep, row.microbatch))
        numbers = {place: number for number, place in enumerate(sorted(set(places)))}
        own = np.array([numbers[place] for place in places])
        yield Rows(np.array(counts), np.array(tokens), own)


def by_rank(counts: Counts, ranks: Ranks, ep: int) -> Counts:
    """[..., L, E] -> [..., L, ep]."""
    return np.stack([np.where(ranks == rank, counts, 0).sum(-1) for rank in range(ep)], -1)


def ratio(loads: Counts) -> float:
    """Work of the busiest ranks over the mean.  loads: [..., ep]."""
    return float(loads.max(-1).sum() / loads.mean(-1).sum())


def batched(loads: Counts, microbatch: Counts) -> Counts:
    """[rows, L, ep] -> [microbatches, L, ep]."""
    total = np.zeros((microbatch.max() + 1, *loads.shape[1:]), np.int64)
    np.add.at(total, microbatch, loads)
    return total


def dealt(loads: Counts, tokens: Counts, num: int) -> Counts:
    """A microbatch for each row: the longest first, each where the busiest ranks gain least."""
    total, used = np.zeros((num, *loads.shape[1:]), np.int64), np.zeros(num, np.int64)
    most = max(TOKENS_MORE * tokens.sum() / num, tokens.max())
    found = np.zeros(len(tokens), np.int64)
    for row in np.argsort(-tokens, kind="stable"):
        gain = (total + loads[row]).max(-1).sum(-1) - total.mean(-1).sum(-1)
        gain = np.where(used + tokens[row] <= most, gain, np.iinfo(np.int64).max)
        best = int(gain.argmin())
        found[row] = best
        total[best] += loads[row]
        used[best] += tokens[row]
    return found


def placed(counts: Counts, ep: int) -> Ranks:
    """Experts on ranks, as many on each: the busiest first, to the rank with the least work."""
    layers, experts = counts.shape
    ranks = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        work, free = np.zeros(ep), np.full(ep, experts // ep)
        for expert in np.argsort(-counts[layer], kind="stable"):
            rank = int(np.where(free > 0, work, np.inf).argmin())
            ranks[layer, expert] = rank
            work[rank] += counts[layer, expert]
            free[rank] -= 1
    return ranks


def measure(steps: Sequence[Rows], ep: int, every: int) -> dict[str, float]:
    """Ratios by name, over all steps; `placed` and its own floor begin behind the first `every`."""
    layers, experts = steps[0].counts.shape[1:]
    plain = np.tile(np.arange(experts) // (experts // ep), (layers, 1))
    found: dict[str, list[Counts]] = {}

    def add(name: str, loads: Counts) -> None:
        found.setdefault(name, []).append(loads.reshape(-1, layers, ep))

    ranks = plain
    for number, rows in enumerate(steps):
        if number and number % every == 0:
            ranks = placed(sum(r.counts.sum(0) for r in steps[number - every : number]), ep)
        loads = by_rank(rows.counts, plain, ep)
        add("step", loads.sum(0))
        add("microbatch", batched(loads, rows.microbatch))
        num = int(rows.microbatch.max()) + 1
        add("dealt", batched(loads, dealt(loads, rows.tokens, num)))
        if number >= every:
            moved = by_rank(rows.counts, ranks, ep)
            add("placed, step", moved.sum(0))
            add("placed", batched(moved, rows.microbatch))
            add("microbatch, same steps", batched(loads, rows.microbatch))
    return {name: ratio(np.concatenate(parts)) for name, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run with a stream")
    parser.add_argument("--ep", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--every", type=int, default=10, help="steps between two placements")
    options = parser.parse_args()
    for ep in options.ep:
        steps = list(steps_of(options.run, ep))
        experts = steps[0].counts.shape[2]
        if experts % ep:
            sys.exit(f"--ep {ep} does not divide {experts} experts")
        found = measure(steps, ep, options.every)
        print(f"ep {ep}, {len(steps)} steps of {len(steps[0].tokens)} rows, {experts} experts")
        for name, value in found.items():
            print(f"  {name:24}{value:.3f}")
    print(machine())


if __name__ == "__main__":
    main()
