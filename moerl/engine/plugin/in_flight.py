"""Weight updates under running requests: the work and the records of the scheduler process.

`exchange` runs between two forward passes and writes the new weights; the mode decides how running
requests meet them:

    interrupt   the host has aborted all requests before; if one still runs it is retracted
    in_place    requests continue with the KV cache of the older weights
    retract     SGLang frees every request's KV cache and prefills it again under the new weights

SGLang 0.5.23 has four gaps, which this module closes.

1. Version spans.  SGLang attributes a token to the new weights although its forward pass is already
   in the overlap queue.  `_mark` counts these tokens.  A request whose prompt is half prefilled
   samples its first token from new weights and an old cache: it gets an empty span of the old
   version.
2. Routing rows.  A request that is retracted, by an update or because memory ran out, is prefilled
   again, and the rows of that prefill overwrite the rows that its tokens were sampled under.
   `keep_rows` copies the rows before the cache is freed, `return_rows` restores them when the
   request ends.  With audit, the rows of the second prefill are appended: tokens after an update
   were sampled on them.
   Positions of sparse attention cannot be restored in this way: indexers whose scores tie choose
   otherwise in the second prefill, and later tokens read keys of that choice.  `drop_positions`
   returns none where the two differ, and the host refuses the record.
3. Prefix cache.  It cannot be emptied under running requests, so a new request would read prefixes
   of older weights.  `name_versions` adds the version to every cache key.

4. Answered requests.  A request is answered while its last batch is still the scheduler's, so an
   update that follows the answer at once finds SGLang busy, and the cache is not emptied.  The
   pause of a retraction drops this batch, so every mode that empties the cache begins with it.

A request under an adapter (lora.delivery = adapter) is of one version, whatever is committed while
it runs: `name_versions` says so, and SGLang adds the adapter to its cache keys.

All ranks of the engine execute the same steps.  Read at 0.5.23: srt/managers/scheduler.py,
schedule_batch.py, scheduler_components/batch_result_processor.py, srt/utils/weight_versions.py.
Rejected: draining the overlap queue first (breaks the event loop), SGLang's pause and continue
(separate requests, so ranks may run a forward pass in between).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moerl.engine.protocol import IN_PLACE, RETRACT_AUDIT

_namespace = ""  # version whose prefixes may be read; empty = the cache is emptied at updates
_audit = False


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Result of an exchange of weights.

    flushed: no prefix of older weights can be read; recomputed: tokens to prefill again.
    """

    flushed: bool
    recomputed: int = 0


def exchange(manager: Any, mode: str, request: Any, write: Callable[[], None]) -> Exchanged:
    """Write new weights in a mode of `protocol.MODES`; requests keep the tokens sampled so far.

    manager: SGLang's SchedulerWeightUpdaterManager; request: carries the new version.
    """
    global _namespace, _audit
    scheduler, recomputed = manager.scheduler, 0
    _audit = mode == RETRACT_AUDIT
    if mode != IN_PLACE:
        recomputed = retract(scheduler)
    _wait_for_device(scheduler)
    write()
    _wait_for_device(scheduler)
    live, pending, before = _live(scheduler), _pending(scheduler), _version()
    manager.record_weight_version_after_update(request.weight_version)
    if _version() != before:
        _mark(live, pending, before)
    if mode == IN_PLACE:
        _namespace = _version()
        for req in scheduler.waiting_queue:
            _name_prefix(req)
        return Exchanged(True)
    flushed = bool(scheduler.flush_cache())
    if not manager.offload_tags:  # else the engine has no KV cache to go on with
        go_on(scheduler)
    return Exchanged(flushed, recomputed)


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def _wait_for_device(scheduler: Any) -> None:
    """Wait for the forward pass in the overlap queue, or for the copies before the next one."""
    torch.get_device_module(scheduler.device).synchronize()


def retract(scheduler: Any) -> int:
    """Pause; requests keep their tokens and lose their KV cache.  Returns tokens to prefill."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    running = [req for req in _live(scheduler) if req.kv.holds_kv and not req.finished()]
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    return sum(len(req.origin_input_ids) + len(req.output_ids) for req in running)


def go_on(scheduler: Any) -> None:
    """End the pause."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


# --- version spans --------------------------------------------------------------------------------
def _live(scheduler: Any) -> list[Any]:
    """Every running or waiting request, each once."""
    found = {id(req): req for req in (*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue)}
    if scheduler.chunked_req is not None:
        found[id(scheduler.chunked_req)] = scheduler.chunked_req
    return list(found.values())


def _pending(scheduler: Any) -> set[int]:
    """id() of requests with a sampled token that SGLang has not processed yet."""
    found = set()
    for batch, _ in getattr(scheduler, "result_queue", ()):
        extends = batch.forward_mode.is_extend()
        for req in batch.reqs:
            prefill_goes_on = extends and req.inflight_middle_chunks > 0
            if not (prefill_goes_on or req.is_retracted or req.finished()):
                found.add(id(req))
    return found


def _mark(live: Iterable[Any], pending: Container[int], before: str) -> None:
    """Correct the ends of the old version's spans that SGLang has just recorded."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    for req in live:
        if req.output_ids:  # SGLang recorded these
            req.weight_version_events.pop()
        produced = len(req.output_ids) + (id(req) in pending)
        if produced or req.kv.holds_kv:
            event = WeightVersionEvent(old_version=before, num_output_tokens=produced)
            req.weight_version_events.append(event)


# --- prefix cache ---------------------------------------------------------------------------------
def name_versions(_scheduler: Any, req: Any, *_args: Any, **_fields: Any) -> None:
    """BEFORE Scheduler._add_request_to_queue: prefixes are cached per weight version."""
    _name_prefix(req)
    if req.lora_id is not None:
        _name_tokens(req)


def _name_prefix(req: Any) -> None:
    if _namespace:
        req.extra_key = _namespace


def _name_tokens(req: Any) -> None:
    """All tokens are of the request's adapter, also those sampled after a later update."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    event = WeightVersionEvent(old_version=req.lora_id, num_output_tokens=sys.maxsize)
    req.weight_version_events = [event]


# --- routing rows ---------------------------------------------------------------------------------
def keep_rows(*_args: Any, **fields: Any) -> None:
    """BEFORE schedule_batch.release_req: the KV cache of a running request is freed."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    req, capturer = fields["req"], get_global_experts_capturer()
    if req.output_ids:
        _keep_positions(req, fields["req_to_token_pool"])
    if capturer is None or not req.return_routed_experts or not req.output_ids:
        return
    rows = capturer.get_topk(
        req_pool_idx=req.kv.req_pool_idx,
        seqlen=len(req.origin_input_ids) + len(req.output_ids),
        req_to_token_pool=fields["req_to_token_pool"],
    )
    kept = getattr(req, "moerl_rows", None)
    req.moerl_rows = [*(kept or ()), (_version(), rows)]


def return_rows(_result: None, processor: Any, req: Any) -> None:
    """AFTER SchedulerBatchResultProcessor._maybe_collect_routed_experts: a request ends."""
    kept: list[tuple[str, Tensor]] = getattr(req, "moerl_rows", [])
    if req.routed_experts is None:
        return
    start, native = req.routed_experts_start_len, req.routed_experts
    if kept:
        req.routed_experts = native.clone()
    for _, older in reversed(kept):  # a token was sampled in its first forward pass
        end = max(min(len(older) - start, len(native)), 0)
        req.routed_experts[:end] = older[start : start + end]
    if _audit and req.weight_version_events:
        extra = _recomputed_rows(processor, req, kept)
        req.routed_experts = torch.cat([req.routed_experts, *extra])


def _recomputed_rows(processor: Any, req: Any, older: list[tuple[str, Tensor]]) -> list[Tensor]:
    """For each span of a later version, the rows of its prefix under that version, from row 0."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    outputs = len(req.output_ids_through_stop)
    now = get_global_experts_capturer().get_topk(
        req_pool_idx=req.kv.req_pool_idx,
        seqlen=len(req.origin_input_ids) + outputs,
        req_to_token_pool=processor.req_to_token_pool,
    )
    spans = compute_weight_version_spans(req.weight_version_events, _version(), outputs)
    by_version = dict(older) | {_version(): now}
    prompt = len(req.origin_input_ids)
    # Without the rows of a version the record is too short, and the host refuses it.
    found = [(by_version.get(span.version), prompt + span.start - 1) for span in spans[1:]]
    return [rows[:end] for rows, end in found if rows is not None]


# --- positions of sparse attention ----------------------------------------------------------------
def _keep_positions(req: Any, req_to_token_pool: Any) -> None:
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer

    capturer = get_global_indexer_capturer()
    if capturer is None or not req.return_indexer_topk:
        return
    rows = capturer.get_topk(
        req_pool_idx=req.kv.req_pool_idx,
        seqlen=len(req.origin_input_ids) + len(req.output_ids),
        req_to_token_pool=req_to_token_pool,
    )
    req.moerl_positions = [*getattr(req, "moerl_positions", ()), rows]


def drop_positions(_result: None, _processor: Any, req: Any) -> None:
    """AFTER SchedulerBatchResultProcessor._maybe_collect_indexer_topk: a request ends."""
    kept: list[Tensor] = getattr(req, "moerl_positions", [])
    if req.indexer_topk is not None:
        same = all(_same_positions(older, req.indexer_topk) for older in kept)
        req.indexer_topk = req.indexer_topk if same else None


def _same_positions(older: Tensor, newer: Tensor) -> bool:
    """[rows, layers, top_k] each, from row 0; rows below top_k choose all positions."""
    first, end = newer.shape[-1], min(len(older), len(newer))
    return torch.equal(older[first:end].sort(-1).values, newer[first:end].sort(-1).values)
