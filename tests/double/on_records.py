"""Records of an engine whose passes run in graphs: on which device each tensor is, and whose rows.

SGLang's own capturer is on the double.  A graph's router writes into one buffer of the device at
every replay; the overlap scheduler copies it to the host while the next pass runs.  The plug-in's
hooks and the writer of records take what the capturer gives, as in a scheduler process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.state_capturer import base, routed_experts

from moerl.engine.plugin import in_flight, record_output
from tests.double.watch import WAITS, watch

LAYERS, TOP_K, PROMPT, TOKENS = 3, 2, 5, 9
SLOTS = 32


def passes() -> list[np.ndarray]:
    """Rows [tokens, L, K] of a prefill and of the decode steps after it."""
    draw = np.random.default_rng(0)
    sizes = [PROMPT, *[1] * (TOKENS - PROMPT - 1)]
    return [draw.integers(0, 8, (n, LAYERS, TOP_K), dtype=np.int32) for n in sizes]


class Engine:
    """A capturer, the pool of one request, and the two passes that an overlap scheduler has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturer = base.BaseTopkCapturer(SLOTS, 16, LAYERS, TOP_K, "cuda", "routed_experts")
        slots = torch.arange(SLOTS - 1, SLOTS - 1 - TOKENS, -1, dtype=torch.int32, device="cuda")
        self.pool = SimpleNamespace(req_to_token=slots[None])
        self.req = SimpleNamespace(
            origin_input_ids=list(range(PROMPT)), output_ids=list(range(TOKENS - PROMPT)),
            output_ids_through_stop=list(range(TOKENS - PROMPT)), routed_experts=None,
            return_routed_experts=True, routed_experts_start_len=0, weight_version_events=[],
            return_indexer_topk=False, kv=SimpleNamespace(req_pool_idx=0), rid="a",
            return_logprob=False,
        )  # fmt: skip
        monkeypatch.setattr(routed_experts, "get_global_experts_capturer", lambda: self.capturer)
        monkeypatch.setattr(in_flight, "_version", lambda: "0.1")
        monkeypatch.setattr(in_flight, "_keep_positions", lambda *_: None)

    def replay(self, first: int, rows: np.ndarray) -> base.TopkCaptureOutput:
        """A graph's replay: all layers write the one buffer; then what the scheduler takes."""
        for layer in range(LAYERS):
            self.capturer.capture(layer, torch.from_numpy(rows[:, layer]).to("cuda"))
        where = self.pool.req_to_token[0, first : first + len(rows)].long()
        batch = SimpleNamespace(out_cache_loc=where, out_cache_loc_virtual=None)
        taken = self.capturer.on_forward_end(batch, True, len(rows), no_copy_to_cpu=True)
        assert taken is not None
        assert taken.topk.is_cuda
        return taken

    def run(self, every: list[np.ndarray]) -> None:
        """Each pass is finished after the next one has written the buffer."""
        before, first = None, 0
        for rows in every:
            taken = self.replay(first, rows)
            first += len(rows)
            if before is not None:
                self.finish(before)
            before = taken
        assert before is not None
        self.finish(before)

    def finish(self, taken: base.TopkCaptureOutput) -> None:
        taken.map_device_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))
        torch.cuda.synchronize()  # the scheduler's `copy_done`
        taken.finalize()

    def end(self) -> None:
        self.req.routed_experts = self.capturer.get_topk(0, TOKENS, self.pool)
        processor = SimpleNamespace(req_to_token_pool=self.pool)
        in_flight.return_rows(None, processor, self.req)

    def written(self) -> np.ndarray:
        """Of the writer of records."""
        output = SimpleNamespace(
            routed_experts=[self.req.routed_experts], indexer_topk=None, finished_reasons=[{}],
            output_token_sampling_mask=None,
        )  # fmt: skip
        return record_output._taken(output, 0, self.req)["routes"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_rows_of_graphs_are_on_the_host_and_those_of_their_pass(engine: Engine) -> None:
    every = passes()
    engine.run(every)
    engine.end()
    assert engine.req.routed_experts.device.type == "cpu"
    assert np.array_equal(engine.written(), np.concatenate(every))


def test_rows_of_a_retracted_request_are_kept_on_the_host(engine: Engine) -> None:
    """The cache is freed, and the prefill again writes other rows into the same slots."""
    every = passes()
    engine.run(every)
    in_flight.keep_rows(req=engine.req, req_to_token_pool=engine.pool)
    ((version, kept),) = engine.req.moerl_rows
    assert (version, kept.device.type) == ("0.1", "cpu")
    other = [(rows + 1) % 8 for rows in every]
    engine.run([np.concatenate(other)])
    engine.end()
    assert np.array_equal(engine.written(), np.concatenate(every))


def test_hooks_wait_once_for_a_request(engine: Engine) -> None:
    """For the request's slots, when it is retracted and when it ends: never for a layer."""
    engine.run(passes())
    with watch() as seen:
        in_flight.keep_rows(req=engine.req, req_to_token_pool=engine.pool)
        engine.end()
        engine.written()
    assert seen.count(*WAITS) == 2, seen.seen


def buffer_on_the_device(engine: Engine, _patch: pytest.MonkeyPatch) -> None:
    engine.capturer.host_cache.buffer = engine.capturer.host_cache.buffer.to("cuda")


def rows_taken_late(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Without the copy that the scheduler takes before the next replay."""
    patch.setattr(torch.Tensor, "clone", lambda tensor: tensor)


@pytest.mark.parametrize("mistake", [buffer_on_the_device, rows_taken_late])
def test_mistakes_are_noticed(
    mistake: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, caught = passes(), ""
    mistake(engine, monkeypatch)
    try:
        engine.run(every)
        engine.end()
        if not np.array_equal(engine.written(), np.concatenate(every)):
            caught = "other rows"
    except (TypeError, RuntimeError) as error:
        caught = str(error).splitlines()[0]
    print(f"{mistake.__name__}: {caught or 'NOT CAUGHT'}")
    assert caught
