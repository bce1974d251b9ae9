"""Two hooks of SGLang's scheduler against what they replace, alternating.

    python bench/scheduler_loop.py [--rounds 5] [--rows 256] [--vocab 151936] [--top-k 512]
                                   [--tokens 8192] [--layers 48] [--kept 100]

sampler: one decode step of SGLang's own function with sampling masks, which sorts the vocabulary,
and the hook that takes the k largest first.  record: milliseconds in which the scheduler's loop
stands still for one ended answer, with its record written in the loop and by the thread; with the
thread also the time until the reply is sent.  Printed: medians and the ratio before / after.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moerl.engine.plugin import record_output, top_k_first
from moerl.engine.record_files import RecordWriter

TOP_P, EXPERTS, ROUTED = 0.95, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("rounds", 5), ("rows", 256), ("vocab", 151_936), ("top-k", 512),
        ("tokens", 8192), ("layers", 48), ("kept", 100),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, measure in (("sampler", sampler), ("record", record)):
        print(f"{name}: {measure(asked)}", flush=True)


def sampler(asked: argparse.Namespace) -> str:
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as whole

    short = partial(top_k_first.sample, whole)
    torch.manual_seed(0)
    probs = (3 * torch.randn(asked.rows, asked.vocab)).softmax(-1)
    like = torch.zeros(asked.rows)
    step: tuple[Any, ...] = (like.int() + asked.top_k, like + TOP_P, like, False, None, like.long())
    spent: dict[str, list[float]] = {"whole": [], "short": []}
    for _ in range(asked.rounds):
        for name, how in (("whole", whole), ("short", short)):
            own = probs.clone()
            call = partial(how, own, *step, return_filtered_probs=True, max_top_k=asked.top_k)
            spent[name].append(_ms(call))
    before, after = median(spent["whole"]), median(spent["short"])
    return f"{before:.0f} ms, {after:.0f} ms, ratio {before / after:.1f}"


def record(asked: argparse.Namespace) -> str:
    rng = np.random.default_rng(0)
    shape = (asked.tokens - 1, asked.layers, ROUTED)
    routes = torch.from_numpy(rng.integers(0, EXPERTS, shape, np.int32))
    mask = _Mask(
        np.full(asked.tokens, asked.kept, np.int32),
        rng.integers(0, asked.vocab, asked.tokens * asked.kept, np.int32),
        -rng.random(asked.tokens, np.float32),
    )
    loop: list[float] = []
    threaded: list[float] = []
    sent: list[float] = []
    with tempfile.TemporaryDirectory(prefix="moerl-bench-") as folder:
        writer = RecordWriter(Path(folder), inline_bytes=0)
        replies = record_output.RecordedReplies(writer)
        record_output._replies = lambda: replies  # type: ignore[assignment]
        record_output._reports = lambda: True
        for number in range(asked.rounds):
            for times, least in ((loop, 1 << 40), (threaded, 0)):
                record_output.LOOP_BYTES = least
                request = SimpleNamespace(rid=f"{number}.{least}", output_ids=[7])
                begin = time.perf_counter()
                times.append(_ms(partial(_answer, replies, request, routes, mask)))
                replies._queue.join()
                sent.append(1e3 * (time.perf_counter() - begin))
    before, after = median(loop), median(threaded)
    return (
        f"{before:.2f} ms, {after:.2f} ms, ratio {before / after:.0f}; "
        f"sent after {median(sent[::2]):.1f} ms, {median(sent[1::2]):.1f} ms"
    )


class _Mask:
    """SGLang's SamplingMaskChunk."""

    def __init__(self, lengths: Any, token_ids: Any, logprobs: Any) -> None:
        self.lengths, self.token_ids, self.logprobs = lengths, token_ids, logprobs


def _answer(
    replies: record_output.RecordedReplies, request: Any, routes: torch.Tensor, mask: _Mask
) -> None:
    output = SimpleNamespace(
        finished_reasons=[{"type": "length"}],
        routed_experts=[routes],
        indexer_topk=None,
        output_token_sampling_mask=[mask],
    )
    record_output.to_files(output, SimpleNamespace(output_reqs=[request]))
    replies.send(lambda _output: None, output)


def _ms(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
