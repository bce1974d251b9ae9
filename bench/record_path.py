"""Bytes and CPU per token of a reply's records, from the scheduler to the host's arrays.

    python bench/record_path.py [--tokens 4096] [--layers 48] [--kept 20]

No server runs: the steps of one reply are timed in this process.  "JSON" is what SGLang 0.5.23 does
by itself (pickle to the HTTP process, base64 of int32 and lists there, JSON to the host); "file" is
what moerl's plug-in does.  Both end in the same checked arrays, which are compared.
"""

from __future__ import annotations

import argparse
import base64
import pickle
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import orjson
import torch

from moerl.engine.record_files import RecordReader, RecordWriter
from moerl.records.routing import decode_engine_rows
from moerl.records.sampling_mask import encode_rows

VOCAB, EXPERTS, TOP_K = 151936, 128, 8
Arrays = dict[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--kept", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    sampled, arrays = draw(asked.tokens, asked.layers, asked.kept)
    found = {}
    print(f"{asked.tokens} tokens, {asked.layers} layers, top {TOP_K}, {asked.kept} kept ids")
    print("| way | bytes/token | scheduler us | HTTP process us | host us | sum us |")
    print("|---|---|---|---|---|---|")
    for name, way in (("JSON", by_json), ("file", by_file)):
        rounds = [way(arrays) for _ in range(asked.rounds)]
        size, held, *_ = rounds[0]
        seconds = np.min([one[2:] for one in rounds], axis=0)
        start = time.process_time()
        found[name] = checked(held, sampled, asked.layers)
        seconds[-1] += time.process_time() - start
        us = seconds / asked.tokens * 1e6
        cells = " | ".join(f"{value:.2f}" for value in (size / asked.tokens, *us, us.sum()))
        print(f"| {name} | {cells} |")
    for one, other in zip(found["JSON"], found["file"], strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def draw(tokens: int, layers: int, kept: int) -> tuple[np.ndarray, Arrays]:
    rng = np.random.default_rng(0)
    scores = rng.random((tokens, layers, EXPERTS), np.float32)
    routes = np.argpartition(scores, TOP_K, -1)[..., :TOP_K].astype(np.int32)
    first = rng.integers(0, VOCAB - kept, tokens)
    ids = (first[:, None] + np.arange(kept)).astype(np.int32)
    return ids[:, 0], {
        "routes": routes,
        "mask_lengths": np.full(tokens, kept, np.int32),
        "mask_ids": ids.ravel(),
        "mask_logprobs": -rng.random(tokens, np.float32),
    }


def checked(held: Arrays, sampled: np.ndarray, layers: int) -> tuple[np.ndarray, ...]:
    """The host's check, the same for both ways."""
    routes = decode_engine_rows(
        held["routes"],
        num_rows=len(sampled),
        num_layers=layers,
        moe_layers=tuple(range(layers)),
        top_k=TOP_K,
        num_experts=EXPERTS,
    )
    mask = encode_rows(held["mask_lengths"], held["mask_ids"], sampled, vocab_size=VOCAB)
    return routes, *mask, held["mask_logprobs"]


def timed(work: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    return work(), time.process_time() - start


def by_json(arrays: Arrays) -> tuple[int, Arrays, float, float, float]:
    """Bytes of the reply, the host's arrays, seconds of scheduler, HTTP process and host."""

    def send() -> bytes:
        return pickle.dumps(arrays | {"routes": torch.from_numpy(arrays["routes"])}, 5)

    def answer() -> bytes:
        got = pickle.loads(sent)
        ends = np.cumsum(got["mask_lengths"])[:-1]
        return orjson.dumps(
            {
                "routes": base64.b64encode(got["routes"].numpy().tobytes()).decode(),
                "mask": [row.tolist() for row in np.split(got["mask_ids"], ends)],
                "logprobs": got["mask_logprobs"].tolist(),
            }
        )

    def read() -> Arrays:
        told = orjson.loads(body)
        lengths = np.fromiter((len(row) for row in told["mask"]), np.int64)
        raw = base64.b64decode(told["routes"], validate=True)
        return {
            "routes": np.frombuffer(raw, "<i4").reshape(arrays["routes"].shape),
            "mask_lengths": lengths,
            "mask_ids": np.fromiter(chain.from_iterable(told["mask"]), np.int64),
            "mask_logprobs": np.asarray(told["logprobs"], np.float32),
        }

    sent, first = timed(send)
    body, second = timed(answer)
    held, third = timed(read)
    return len(body), held, first, second, third


def by_file(arrays: Arrays) -> tuple[int, Arrays, float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = RecordWriter(Path(folder)), RecordReader(Path(folder))
        told, first = timed(lambda: writer.write("a", arrays))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        body, second = timed(lambda: orjson.dumps(told))
        held, third = timed(lambda: reader.take("a", orjson.loads(body)))
    return size + len(body), held, first, second, third


if __name__ == "__main__":
    main()
