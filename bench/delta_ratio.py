"""What deltas save on a real training run: every publish of a run, as the bytes an engine gets.

    tools/quickstart --run delta run.steps=21 checkpoint.keep_versions=true
    python bench/delta_ratio.py runs/delta [--dtype bfloat16] [--level 1]

The versions that the run saved (`checkpoint.keep_versions`) are put into buckets of the size of a
publish's.  A receiver starts from the first version and gets nothing but deltas; after each one its
bytes must equal the published ones, bit for bit, or this exits with an error.

--dtype casts the weights first, as for an engine of that dtype: training in fp32 changes nearly
every word at every publish, in bf16 only those that an update moves by half a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from moerl.core.types import PolicyVersion
from moerl.runtime.run_dir import RunDir
from moerl.weight_sync.delta import apply, encode

Weights = dict[str, torch.Tensor]


def versions(run: RunDir) -> list[tuple[PolicyVersion, Path]]:
    """The saved versions of a run, oldest first."""
    found = [(PolicyVersion.parse(folder.name), folder) for folder in run.versions.iterdir()]
    return sorted(found)


def weights(folder: Path, dtype: torch.dtype | None) -> Weights:
    """All tensors of a Hugging Face folder, by name."""
    tensors: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensors[name].to(dtype).contiguous() for name in sorted(tensors)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version in flat buckets."""

    version: PolicyVersion
    buckets: tuple[torch.Tensor, ...]  # bytes
    word_bytes: tuple[int, ...]  # of the dtype of each bucket

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.buckets))


def snapshot(tensors: Weights, version: PolicyVersion, bucket_bytes: int) -> Snapshot:
    """Tensors of one dtype back to back, at most `bucket_bytes` (a larger one stands alone)."""
    groups: list[list[torch.Tensor]] = []
    for tensor in tensors.values():
        last = groups[-1] if groups else []
        size = sum(one.nbytes for one in last) + tensor.nbytes
        if last and last[0].dtype == tensor.dtype and size <= bucket_bytes:
            last.append(tensor)
        else:
            groups.append([tensor])
    return Snapshot(
        version,
        tuple(torch.cat([t.reshape(-1).view(torch.uint8) for t in group]) for group in groups),
        tuple(group[0].itemsize for group in groups),
    )


def publishes(
    run: RunDir, dtype: torch.dtype | None, bucket_bytes: int
) -> Iterator[tuple[Snapshot, Snapshot]]:
    """(before, after) of each publish; every version in buffers of its own."""
    before = None
    for version, folder in versions(run):
        after = snapshot(weights(folder, dtype), version, bucket_bytes)
        if before is not None:
            yield before, after
        before = after


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--dtype", help="of the wire; default: as saved")
    parser.add_argument("--level", type=int, default=1, help="of zstd, 0 = none (default 1)")
    parser.add_argument("--bucket-bytes", type=int, default=16 * 2**20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    ratios, changes = [], []
    encodings: Counter[str] = Counter()
    receiver: list[torch.Tensor] = []
    for before, after in publishes(RunDir(arguments.run), dtype, arguments.bucket_bytes):
        receiver = receiver or [bucket.clone() for bucket in before.buckets]
        sent = changed = words = 0
        start = time.perf_counter()
        for word_bytes, old, new, there in zip(
            after.word_bytes, before.buckets, after.buckets, receiver, strict=True
        ):
            delta = encode(
                old,
                new,
                word_bytes=word_bytes,
                base=before.version,
                version=after.version,
                level=arguments.level,
            )
            info = apply(delta, there, holds=before.version)
            encodings[info.encoding] += 1
            sent += len(delta)
            changed += info.num_changed
            words += len(new) // word_bytes
            if not torch.equal(there, new):
                sys.exit(f"{after.version}: the receiver's bytes differ from the published ones")
        ratios.append(after.num_bytes / sent)
        changes.append(changed / words)
        print(
            f"{before.version} -> {after.version}: {changes[-1]:8.3%} of words changed, "
            f"{after.num_bytes:,} bytes as {sent:,}, ratio {ratios[-1]:.2f}, "
            f"{time.perf_counter() - start:.2f} s",
            flush=True,
        )
    if not ratios:
        sys.exit(f"{arguments.run} has fewer than two saved versions")
    print(
        f"{len(ratios)} publishes, bitwise equal after each; ratio median "
        f"{statistics.median(ratios):.2f} (first {ratios[0]:.2f}, last {ratios[-1]:.2f}); "
        f"changed words median {statistics.median(changes):.3%}; buckets by encoding "
        f"{dict(encodings)}"
    )


if __name__ == "__main__":
    main()
