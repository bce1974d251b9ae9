"""Real Megatron ranks that publish instead of training; started by torchrun from test_sync.py.

    ... -m tests.e2e.sync_gang RUN_DIR CONTROLLER INCARNATION STEPS KILL_AT

Every rank changes its weights in a way that depends on the version alone, publishes, and rank 0
saves the same version as a Hugging Face folder: RUN_DIR/hf-VERSION.  KILL_AT n > 0: rank 0 kills
itself before its n-th flush.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moerl.blob.store import BlobStore
from moerl.config.load import load_saved
from moerl.rundir import RunDir
from moerl.trainer import platform


def main() -> None:
    root, controller, incarnation, steps, kill_at = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    place = platform.prepare("cpu", local_rank=int(os.environ["LOCAL_RANK"]))
    from moerl.trainer import parallel
    from moerl.trainer.gang import Gang, Post
    from moerl.trainer.hf_save import save_hf
    from moerl.trainer.model import live_tensors
    from moerl.types import PolicyVersion

    run = RunDir(Path(root))
    config = load_saved(run.config)
    here = parallel.start(config.trainer.parallel, place, timeout_s=120.0)
    post = Post(run, controller, "token", int(incarnation), BlobStore(run.root / "b", "n"), None)
    gang = Gang(config, post, here, _end)
    assert gang.outlet is not None
    if here.is_first and int(kill_at):
        _die_at(int(kill_at))
    for step in range(1, int(steps) + 1):
        version = PolicyVersion(int(incarnation), step)
        with torch.no_grad():
            for tensor in live_tensors(gang.model.gpt).values():
                tensor.mul_(1 + 0.01 * step + 0.1 * int(incarnation))
        tensors = gang.gather.gather()
        if tensors is not None:
            save_hf(run.root / f"hf-{version}", tensors, gang.source.path)
        gang.outlet.publish(version)
        metrics = gang.outlet.wait()
        if here.is_first:
            print(f"published {version}: {metrics}", flush=True)
        gang.outlet.resume()
    dist.barrier(here.control)
    parallel.stop()


def _end(error: BaseException) -> None:
    print(f"ended: {error}", flush=True)
    os._exit(1)


def _die_at(flush: int) -> None:
    from moerl.transport.shm import SharedLink

    plain, count = SharedLink.flush, 0

    def deadly(link: SharedLink, deadline: float) -> None:
        nonlocal count
        count += 1
        if count == flush:
            os.kill(os.getpid(), signal.SIGKILL)
        plain(link, deadline)

    SharedLink.flush = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
