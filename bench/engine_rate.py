"""Tokens per second of one engine host with the quickstart's requests, of two trees, interleaved.

    python bench/engine_rate.py OTHER_TREE [--rounds 8] [--seconds 4]

OTHER_TREE is a checkout of another commit.  Each tree has a server of its own; they take turns, so
that a busy machine slows both alike.  Printed are the medians of the ratios of neighbouring turns:
of tokens per second, and of tokens per second of CPU (host and server), which depends less on what
else runs.  The records are checked and sealed, as in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

GROUPS, SIBLINGS, TOKENS = 16, 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        asyncio.run(serve(asked.seconds))
        return
    trees = {"other": asked.other, "this": Path(__file__).resolve().parents[1]}
    servers = {name: start(tree, asked.seconds) for name, tree in trees.items()}
    try:
        for server in servers.values():
            turn(server)  # the first one warms up
        ratios = []
        for _ in range(asked.rounds):
            rates = {name: turn(server) for name, server in servers.items()}
            ratios.append([a / b for a, b in zip(rates["this"], rates["other"], strict=True)])
            print(
                {name: [round(rate) for rate in both] for name, both in rates.items()}, flush=True
            )
        for what, found in zip(("second", "second of CPU"), zip(*ratios, strict=True), strict=True):
            median = statistics.median(found)
            print(f"tokens per {what}, this / other: median {median:.3f} of {len(found)}")
    finally:
        for server in servers.values():
            server.stdin.close()
            server.wait(60)


def start(tree: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(tree), "--serve", "--seconds", str(seconds)]
    env = os.environ | {"PYTHONPATH": str(tree)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, cwd=tree, **pipes)


def turn(server: subprocess.Popen[str]) -> list[float]:
    """One turn of a server: tokens per second, tokens per second of CPU."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("go\n")
    server.stdin.flush()
    if not (line := server.stdout.readline()):
        raise SystemExit(f"a server ended with status {server.wait()}")
    return [float(word) for word in line.split()]


async def serve(seconds: float) -> None:
    """Take a turn for each line of standard input; an empty one ends."""
    from moerl.config.schema import EngineConfig, ReplayConfig
    from moerl.core.types import PolicyVersion
    from moerl.engine.host.host import EngineContext, EngineHost
    from moerl.records import BlobStore
    from moerl.runtime.run_dir import RunDir
    from tests.helpers import engine_tiny_model as tiny

    root = Path(tempfile.mkdtemp())
    tiny.save(root / "model", 0)
    run = RunDir(root / "run")
    run.create()
    context = EngineContext(root / "model", tiny.SHAPE, ReplayConfig(), run, "token")
    store = BlobStore(root / "blobs", "n0")
    host = EngineHost(0, EngineConfig(max_total_tokens=16384), context, store)
    await host.start(PolicyVersion(0, 0))
    call = 0
    try:
        while (await asyncio.to_thread(sys.stdin.readline)).strip():
            begin, cpu, tokens = time.monotonic(), cpu_seconds(), 0
            while time.monotonic() - begin < seconds:
                replies = await host.generate(requests(call, tiny.VOCAB))
                tokens += sum(len(reply.output_ids) for reply in replies)
                store.delete_all(store.uris())
                call += 1
            wall_s, cpu_s = time.monotonic() - begin, cpu_seconds() - cpu
            print(tokens / wall_s, tokens / cpu_s, flush=True)
    finally:
        await host.stop()


def cpu_seconds() -> float:
    """Of this process and its children, so far."""
    own = psutil.Process()
    times = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def requests(call: int, vocab: int) -> list[object]:
    """One message of the quickstart: groups of one prompt each."""
    from moerl.core.types import GenerateRequest, SamplingParams

    sampling = SamplingParams(TOKENS, top_p=0.95, top_k=64, ignore_eos=True)
    draw = np.random.default_rng(call)
    prompts = [draw.integers(4, vocab, 12).astype(np.int32) for _ in range(GROUPS)]
    return [
        GenerateRequest(f"{call * GROUPS + g}.{s}", 0, prompt, 0, sampling)
        for g, prompt in enumerate(prompts)
        for s in range(SIBLINGS)
    ]


if __name__ == "__main__":
    main()
