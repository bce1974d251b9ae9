"""Decode steps through the plugin's hooks, as SGLang's overlapped scheduler calls them.

SGLang's own capture, sampler and packing of masks run from its source, without a seed.  A step has
two waits, both SGLang's: torch's check of the weights of a draw, and the copies of the results.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moerl.engine.plugin import in_flight, kv_slots_per_request, record_output, top_k_first
from moerl.engine.record_files import FIELD, RecordReader, RecordWriter
from tests.double.mutations import DECODE_BLUNDERS, Blunder
from tests.double.outcome import caught, check_repeats, outcome, stop_streams
from tests.double.sglang_source import take
from tests.double.watch import PAGEABLE, WAITS, Watch, watch

REQUESTS, LAYERS, TOP_K, VOCAB, MOST, STEPS = 6, 5, 2, 300, 64, 4
PROMPT = 3
MOST_WAITS = 2  # of a decode step, SGLang's own included

_TYPES = {"torch": torch, "dataclasses": dataclasses, "IntEnum": IntEnum, "NamedTuple": NamedTuple}
_LOGITS = take("layers/logits_processor.py", ("SamplingMaskStatus", "SamplingMaskOutput"), _TYPES)
_CAPTURE = take(
    "state_capturer/base.py",
    ("BaseDeviceCache", "BaseHostCache", "TopkCaptureOutput", "BaseTopkCapturer"),
    _TYPES
    | {
        "_MB": 1 << 20,
        "_GB": 1 << 30,
        "logger": SimpleNamespace(info=lambda _text: None),
        "get_tensor_size_bytes": lambda t: t.nbytes,
        "HostTensorAllocator": lambda: None,
        "ALLOC_MEMORY_FUNCS": {
            "cuda": lambda shape, dtype, **_how: torch.empty(shape, dtype=dtype, pin_memory=True)
        },
    },
)
_SAMPLER = take(
    "layers/sampler.py",
    (
        "_SamplingMaskCapture",
        "top_k_top_p_min_p_sampling_from_probs_torch",
        "Sampler._build_sampling_mask_output",
    ),
    _TYPES | _LOGITS | {"dist": dist},
)
_RESULTS = take(
    "managers/scheduler_components/batch_result_processor.py",
    ("SchedulerBatchResultProcessor.materialize_sampling_mask_output",),
    _TYPES | _LOGITS | {"np": np},
)


@dataclass
class Request:
    """The fields of a running request that hooks read."""

    rid: str
    place: int
    return_sampling_mask: bool = True
    return_routed_experts: bool = True
    return_indexer_topk: bool = False
    return_logprob: bool = False
    sampling_logprobs_mode: str = "selected"
    routed_experts_start_len: int = 0
    routed_experts: Tensor | None = None
    indexer_topk: Tensor | None = None
    origin_input_ids: list[int] = field(default_factory=lambda: list(range(PROMPT)))
    output_ids: list[int] = field(default_factory=list)
    weight_version_events: list[object] = field(default_factory=list)
    rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(req_pool_idx=self.place)


def to_host(value: Tensor) -> Tensor:
    """SGLang's copy of a result: to locked memory, complete when its event is."""
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


class Engine:
    """What a scheduler has between forward passes."""

    def __init__(self, folder: Path) -> None:
        self.requests = [Request(f"{n}.0:0", n) for n in range(REQUESTS)]
        slots = torch.arange(REQUESTS * 32, dtype=torch.int32).view(REQUESTS, 32)
        self.pool = SimpleNamespace(req_to_token=slots.pin_memory().cuda(non_blocking=True))
        self.capturer = _CAPTURE["BaseTopkCapturer"](
            REQUESTS * 32, REQUESTS, LAYERS, TOP_K, "cuda", "routes"
        )
        self.replies = record_output.RecordedReplies(RecordWriter(folder))
        self.limits = [torch.full((REQUESTS,), value, device="cuda") for value in (40, 0.9, 0.0)]
        self.indices = torch.arange(REQUESTS, device="cuda")
        self.chance = torch.Generator().manual_seed(8)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance).pin_memory().cuda(non_blocking=True)

    def forward(self, step: int) -> tuple[Any, Any, Tensor]:
        """One decode step on the device: captured routes, packed masks, sampled tokens."""
        for layer in range(LAYERS):
            chosen = self.random(REQUESTS, 16).topk(TOP_K).indices.int()
            self.capturer.capture(layer, chosen)
        probs = self.random(REQUESTS, VOCAB).softmax(-1)
        top_ks, top_ps, min_ps = self.limits
        tokens, weights, ids, selected = top_k_first.sample(
            _SAMPLER["top_k_top_p_min_p_sampling_from_probs_torch"],
            probs, top_ks, top_ps, min_ps, False, None, self.indices,
            return_filtered_probs=True, max_top_k=40,
        )  # fmt: skip
        captured = _SAMPLER["_SamplingMaskCapture"](weights, ids, selected, self.indices)
        own = SimpleNamespace(sampling_mask_max_tokens=MOST)
        masks = _SAMPLER["_build_sampling_mask_output"](own, tokens, captured, None)
        slots = self.pool.req_to_token[:, PROMPT + step - 1].long()
        batch = SimpleNamespace(out_cache_loc=slots, out_cache_loc_virtual=None)
        routes = self.capturer.on_forward_end(batch, False, None, no_copy_to_cpu=True)
        return routes, masks, tokens

    def step(self, number: int) -> None:
        self.results(*self.forward(number))

    def results(self, routes: Any, masks: Any, tokens: Tensor) -> None:
        """The host's half of a step: copies, one wait, then values."""
        tokens = to_host(tokens)
        for part in (routes, masks):
            part.map_device_tensors(to_host)
        torch.cuda.current_stream().record_event().synchronize()
        routes.finalize()
        output = SimpleNamespace(sampling_mask_output=masks)
        _RESULTS["materialize_sampling_mask_output"](self.requests, output)
        for place, (req, token) in enumerate(zip(self.requests, tokens.tolist(), strict=True)):
            req.output_ids.append(token)
            req.rows.append((output.next_token_sampling_mask_idx[place],
                             output.next_token_sampling_logprobs[place]))  # fmt: skip

    def send(self, *, ended: bool) -> list[dict[str, Any] | None]:
        """An output of all requests; where they end, their routes come with it."""
        if ended:
            for req in self.requests:
                length = len(req.origin_input_ids) + len(req.output_ids)
                req.routed_experts = self.capturer.get_topk(req.place, length, self.pool)
                in_flight.return_rows(None, None, req)
                in_flight.drop_positions(None, None, req)
        output = SimpleNamespace(
            routed_experts=[req.routed_experts for req in self.requests],
            indexer_topk=None,
            output_token_sampling_mask=[_chunk(req) for req in self.requests],
            finished_reasons=[{} if ended else None for _ in self.requests],
        )
        record_output.to_files(output, SimpleNamespace(output_reqs=self.requests))
        self.replies.send(lambda _output: None, output)
        reasons: list[dict[str, Any] | None] = output.finished_reasons
        return reasons


class Chunk(NamedTuple):
    """SGLang's SamplingMaskChunk."""

    lengths: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


def _chunk(req: Request) -> Chunk:
    rows, req.rows = req.rows, []
    lengths = np.array([len(ids) for ids, _ in rows], np.int32)
    parts = [np.concatenate(part) for part in zip(*rows, strict=True)]
    return Chunk(lengths, *parts)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(tmp_path)
    monkeypatch.setattr(record_output, "_replies", lambda: made.replies)
    monkeypatch.setattr(record_output, "_reports", lambda: True)
    for name, getter in (("routed_experts", "experts"), ("indexer_topk", "indexer")):
        module: Any = ModuleType(name)
        found = made.capturer if getter == "experts" else None
        setattr(module, f"get_global_{getter}_capturer", lambda found=found: found)
        monkeypatch.setitem(sys.modules, f"sglang.srt.state_capturer.{name}", module)
    for name in ("sglang", "sglang.srt", "sglang.srt.state_capturer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(in_flight, "_version", lambda: "v0")
    yield made
    stop_streams()


def counted(work: Callable[[], object]) -> Watch:
    with watch() as seen:
        work()
    assert not seen.own_lines(PAGEABLE), "copies from pageable memory"
    return seen


def play(engine: Engine) -> tuple[list[Watch], Watch]:
    """What each decode step, and the output that ends all requests, waited for."""
    steps = []
    for step in range(STEPS):
        last = step == STEPS - 1
        steps.append(counted(partial(engine.step, step)))
        if not last:
            steps[-1].seen += counted(partial(engine.send, ended=False)).seen
    return steps, counted(partial(engine.send, ended=True))


def test_hooks_of_a_decode_step_do_not_wait_and_no_layer_does(engine: Engine) -> None:
    """The end of a request reads where its rows are: one wait, of SGLang's `get_topk`."""
    steps, end = play(engine)
    for step in steps:
        assert not step.own_lines(*WAITS)
        assert step.count(*WAITS) == MOST_WAITS, [e for e in step.seen if e.kind in WAITS]
    assert not end.own_lines(*WAITS)
    assert end.count(*WAITS) == REQUESTS


def test_records_of_these_steps_are_whole(engine: Engine, tmp_path: Path) -> None:
    """Routes and masks from the host; a tensor of the device has no `.numpy()`."""
    for step in range(STEPS):
        engine.step(step)
    reasons = engine.send(ended=True)
    for req, reason in zip(engine.requests, reasons, strict=True):
        assert reason is not None
        found = RecordReader(tmp_path).take(req.rid, reason[FIELD])
        assert found["routes"].shape == (PROMPT + STEPS - 1, LAYERS, TOP_K)
        assert len(found["mask_lengths"]) == STEPS
        assert len(found["mask_ids"]) == found["mask_lengths"].sum() > STEPS
    late = engine.requests[0]
    late.routed_experts = torch.zeros(2, LAYERS, TOP_K, device="cuda")
    output = SimpleNamespace(
        routed_experts=[late.routed_experts], indexer_topk=None, output_token_sampling_mask=None
    )
    with pytest.raises(TypeError, match="can't convert cuda"):
        record_output._taken(output, 0, late)


def test_a_retraction_waits_once_for_a_request(engine: Engine) -> None:
    engine.step(0)
    for req in engine.requests:
        seen = counted(partial(in_flight.keep_rows, req=req, req_to_token_pool=engine.pool))
        assert not seen.own_lines(*WAITS)
        assert seen.count(*WAITS) == 1


def test_a_prefill_that_shares_a_prefix_waits_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots and the cache's come to the host together; controls: none shared, other rows."""
    rows = torch.arange(REQUESTS * 32)[:, None] % 32
    theirs = torch.arange(32, 64, device="cuda")
    monkeypatch.setattr(kv_slots_per_request, "_rows", lambda: iter([rows]))
    monkeypatch.setattr(kv_slots_per_request, "_in_cache", lambda _req, _tree: theirs)
    cache = SimpleNamespace(supports_prefix_sharing=lambda: True, req_to_token_pool=engine.pool)
    waits = {}
    for name, begin in (("same rows", 0), ("nothing new", 20)):
        req = SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=begin),
            extend_end=20,
            full_untruncated_fill_ids=list(range(20)),
        )
        seen = counted(partial(kv_slots_per_request._may_share, req, cache))
        waits[name] = seen.count(*WAITS)
        assert kv_slots_per_request._may_share(req, cache)
    assert waits == {"same rows": 1, "nothing new": 0}
    rows[40] += 1
    req.kv.cache_protected_len = 0
    assert not kv_slots_per_request._may_share(req, cache)


@pytest.mark.parametrize("blunder", DECODE_BLUNDERS, ids=[b.name for b in DECODE_BLUNDERS])
def test_blunders_of_decode_hooks_are_caught(
    blunder: Blunder, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> dict[str, Tensor]:
        again = Engine(tmp_path)
        monkeypatch.setattr(record_output, "_replies", lambda: again.replies)
        torch.manual_seed(0)
        play(again)
        return {"tokens": torch.tensor([req.output_ids for req in again.requests])}

    sound = outcome(steps)
    assert sound.waits == 0
    check_repeats(steps, sound)
    blunder.apply(monkeypatch)
    found = caught(steps, sound)
    print(f"{blunder.name}: {found or 'NOT CAUGHT'}")
    assert found
