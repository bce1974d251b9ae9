"""CPU of an engine's host for one reply: taken from the server's answer, checked, sealed.

    python bench/engine_host.py [--groups 32] [--siblings 8] [--prompt 5] [--tokens 4] [--rounds 10]

A scripted server answers the requests of the quickstart's step in two batches, each in one piece,
with routes and masks of random content.  Milliseconds of CPU of the event loop's thread per reply,
the JSON of the answer included, so that other work on the machine does not count; the median of the
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from moerl.core.types import GenerateRequest, ModelShape, PolicyVersion, SamplingParams, Segment
from moerl.engine.host.generation import Generation
from moerl.engine.host.health import EngineHealth
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.weight_updates import WeightUpdater
from moerl.engine.record_files import FIELD, RecordReader, RecordWriter
from moerl.records import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer

LAYERS, EXPERTS, TOP_K, VOCAB, KEPT = 4, 16, 2, 64, 8
SHAPE = ModelShape(VOCAB, LAYERS, tuple(range(LAYERS)), EXPERTS, TOP_K)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=5, help="tokens")
    parser.add_argument("--tokens", type=int, default=4, help="of an answer")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moerl-bench-", dir="/dev/shm") as folder:
        spent = asyncio.run(measure(asked, Path(folder)))[2:]
    print(f"per reply: {statistics.median(spent):.3f} ms ({min(spent):.3f} least)", flush=True)


async def measure(asked: argparse.Namespace, folder: Path) -> list[float]:
    """Milliseconds per reply of each round."""
    run = RunDir(folder / "run")
    run.create()
    health, tracer = EngineHealth(0), Tracer(run.trace, "engine0")
    updates, store = WeightUpdater(health, tracer, mode=""), BlobStore(folder / "blobs", "bench")
    engine = Generation(SHAPE, store, health, updates, tracer, routing=True)
    server = ScriptedServer(folder / "records")
    engine.client, engine.records = cast(EngineClient, server), RecordReader(server.folder)
    health.open()
    spent = []
    for number in range(asked.rounds + 2):
        halves = [requests(asked, number, half) for half in range(2)]
        server.prepare([one for half in halves for one in half])
        replies: list[object] = []
        take = partial(_take, replies)
        begin = time.thread_time()
        await asyncio.gather(*(engine.run(half, take, lambda *_: None) for half in halves))
        spent.append(1e3 * (time.thread_time() - begin) / len(replies))
        assert all(isinstance(reply, Segment) for reply in replies), replies[0]
    return spent


def _take(replies: list[object], _request: GenerateRequest, reply: object) -> None:
    replies.append(reply)


def requests(asked: argparse.Namespace, number: int, half: int) -> list[GenerateRequest]:
    """Half the requests of a step, siblings side by side."""
    rng = np.random.default_rng([number, half])
    sampling = SamplingParams(asked.tokens, top_p=0.95, top_k=VOCAB)
    found = []
    for group in range(asked.groups // 2):
        ids = rng.integers(0, VOCAB, asked.prompt).astype(np.int32)
        name = 2 * (number * asked.groups + group) + half
        found += [
            GenerateRequest(
                f"{name}.{sibling}", 0, np.zeros(0, np.int32), 0, sampling, prompt_ids=ids
            )
            for sibling in range(asked.siblings)
        ]
    return found


class ScriptedServer:
    """Answers made by `prepare`, as the JSON that SGLang sends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._writer = folder, RecordWriter(folder)
        self._rng = np.random.default_rng(0)
        self._answers: dict[str, bytes] = {}  # by the first request of a batch

    def prepare(self, asked: list[GenerateRequest]) -> None:
        half = len(asked) // 2
        for batch in (asked[:half], asked[half:]):
            rows = {r.rollout_id.partition(".")[0]: self._routes(r.num_tokens - 1) for r in batch}
            replies = [self._reply(r, rows[r.rollout_id.partition(".")[0]]) for r in batch]
            self._answers[batch[0].name] = orjson.dumps(replies)

    async def generate(
        self, body: dict[str, Any], took: Callable[[int, dict[str, Any]], None]
    ) -> None:
        await asyncio.sleep(0)
        answer = self._answers.pop(body["rid"][0].rpartition(".")[0].rpartition(".")[0])
        for place, reply in enumerate(orjson.loads(answer)):
            took(place, reply)

    def _routes(self, rows: int) -> np.ndarray:
        scores = self._rng.random((rows, LAYERS, EXPERTS))
        return scores.argsort(-1)[..., :TOP_K].astype(np.int32)

    def _reply(self, request: GenerateRequest, prompt_rows: np.ndarray) -> dict[str, Any]:
        rng, num = self._rng, request.sampling.max_new_tokens
        output = rng.integers(0, VOCAB, num)
        kept = [np.union1d(rng.choice(VOCAB, KEPT, replace=False), [token]) for token in output]
        arrays = {
            "routes": np.concatenate([prompt_rows, self._routes(num)]),
            "mask_lengths": np.array([len(row) for row in kept], np.int32),
            "mask_ids": np.concatenate(kept).astype(np.int32),
            "mask_logprobs": (-rng.random(num)).astype(np.float32),
        }
        version = str(PolicyVersion(0, 0))
        meta = {
            "id": request.name,
            "finish_reason": {
                "type": "length",
                "length": num,
                FIELD: self._writer.write(request.name, arrays),
            },
            "prompt_tokens": request.num_tokens,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": num}],
            "completion_tokens": num,
            "cached_tokens": 0,
            "e2e_latency": 0.1,
        }
        return {"text": "", "output_ids": output.tolist(), "meta_info": meta}


if __name__ == "__main__":
    main()
