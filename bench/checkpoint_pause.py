"""How long training stands still for a checkpoint: copied and written beside it, or synchronously.

    python bench/checkpoint_pause.py [--repeats 5] [--hidden 256] [--folder DIR]

One trainer rank saves the same state both ways in turn: with ours
(`moerl.trainer.checkpoints.checkpoint_writer`), whose pause is planning and a copy to host buffers,
and with megatron-core's own synchronous save, which forks writers and waits for the disk.  The
first repetition, which allocates, is shown apart.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from small_moe import SPEC

from moerl.config.schema import CheckpointConfig, Config, ParallelConfig, TrainerConfig
from moerl.core.types import PolicyVersion
from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import store_variable
from moerl.layout import ModelSpec
from moerl.records import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from moerl.trainer.model import platform


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        run(folder, args.repeats, replace(SPEC, hidden=args.hidden))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(folder: Path, repeats: int, spec: ModelSpec) -> None:
    place = platform.prepare("cpu")
    from megatron.core import dist_checkpointing

    from moerl.trainer.checkpoints import checkpoint
    from moerl.trainer.checkpoints.checkpoint_writer import METADATA, CheckpointWriter
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import parallel
    from moerl.trainer.model.gpt import build

    store = StoreServer("127.0.0.1")
    os.environ |= store_variable(store.server_address, 0)
    ranks = parallel.start(ParallelConfig(), place, timeout_s=60)
    config = Config(trainer=TrainerConfig())
    model = build(spec, config.trainer, ranks, with_replay=True)
    learner = Learner(model, ranks, config, BlobStore(folder / "blobs", "n0"))
    checkpoint._give_adam_state(learner.ddp, learner.optimizer)
    parameters = sum(p.numel() for p in model.gpt.parameters())
    directory = RunDir(folder / "run")
    directory.create()
    tracer = Tracer(directory.trace, "t")
    writer = CheckpointWriter(directory, CheckpointConfig(), ranks, tracer, incarnation=0)
    pauses: list[float] = []
    writes: list[float] = []
    synchronous: list[float] = []
    for step in range(repeats + 1):
        progress = checkpoint.Progress(PolicyVersion(0, step), ((0, 1000),))
        begin = time.perf_counter()
        checkpoint.save(writer, learner, progress, ranks)
        pauses.append(time.perf_counter() - begin)
        writer.finish()
        writes.append(time.perf_counter() - begin - pauses[-1])
        plain = folder / f"plain{step}"
        plain.mkdir()
        begin = time.perf_counter()
        state = checkpoint._state(learner, ranks, is_loading=False)
        dist_checkpointing.save(state, str(plain), content_metadata=dict(METADATA))
        synchronous.append(time.perf_counter() - begin)
        shutil.rmtree(plain)
    print(f"{parameters / 1e6:.1f} M parameters, {parameters * 12 / 2**20:.0f} MiB of state")
    for name, seconds in (
        ("pause, written beside training", pauses),
        ("of it in the background", writes),
        ("pause, synchronous", synchronous),
    ):
        later = seconds[1:]
        print(
            f"{name:<32} first {seconds[0]:6.2f} s, then median {statistics.median(later):6.2f} s "
            f"({min(later):.2f}-{max(later):.2f})"
        )
    parallel.stop()


if __name__ == "__main__":
    main()
