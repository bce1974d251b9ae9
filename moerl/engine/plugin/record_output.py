"""SGLang's schedulers write the records of requests into files, in place of JSON.

Masks of a request come in pieces, one piece for each of its outputs; all records are written when
it ends.  Every rank makes the outputs, and the ranks that have a socket to the HTTP process send
them: rank 0, or with data-parallel attention one rank of each group, all on the node of the host.

Masks have the log-probabilities of all kept entries where a request asks for them (`support`), else
of the sampled token; without a mask a request may ask for its likeliest entries.

A long record costs milliseconds, in which the scheduler's loop would launch no step.  A thread
writes it and then sends the output with the reply that names it; later outputs keep their order.

Rejected: replies that go ahead of their records (the host would wait for files, and a full disk
could not be reported).
Read at 0.5.23: srt/managers/scheduler_components/output_streamer.py, output_sender.py, scheduler.py
(init_ipc_channels), srt/sampling/sampling_mask.py.
"""

from __future__ import annotations

import logging
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from moerl.core.types import Array
from moerl.engine.record_files import FIELD, FOLDER, RecordWriter
from moerl.weight_sync.receiver_names import SCRATCH

LOOP_BYTES = 65536  # of the arrays of one output: up to here a thread would cost more
_MOST_BEHIND = 64  # outputs; then the scheduler's loop waits


def to_files(output: Any, batch: Any, **_fields: object) -> None:
    """AFTER _GenerationStreamAccumulator.to_payload: the requests of one output."""
    replies = _replies()
    if output is None or replies is None:
        return
    for place, req in enumerate(batch.output_reqs):
        arrays = _taken(output, place, req)
        reason = output.finished_reasons[place]
        if reason is not None and arrays and req.output_ids and _reports():
            replies.ended.append(_Ended(reason, req.rid, arrays))


def send_recorded(_result: None, streamer: Any) -> None:
    """AFTER SchedulerOutputStreamer.__post_init__: the way of its outputs is through `_replies`."""
    replies, sender = _replies(), streamer.send_to_detokenizer
    if replies is not None and sender.socket is not None:
        sender.send_output = partial(replies.send, sender.send_output)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that ended, in the output that is sent next."""

    reason: dict[str, Any]  # of its reply
    request_id: str
    arrays: dict[str, Array]


class RecordedReplies:
    """Outputs of one scheduler process, each sent after its records are written."""

    def __init__(self, writer: RecordWriter) -> None:
        self.ended: list[_Ended] = []
        self._writer = writer
        self._queue: queue.Queue[tuple[list[_Ended], Callable[[], None]]]
        self._queue = queue.Queue(_MOST_BEHIND)
        self._thread: threading.Thread | None = None

    def send(self, original: Callable[..., None], *output: object) -> None:
        """In place of the sender's `send_output`, in the thread of the scheduler's loop.

        While the thread has something, it alone uses writer and socket.
        """
        ended, self.ended = self.ended, []
        send = partial(original, *output)
        size = sum(array.nbytes for one in ended for array in one.arrays.values())
        if size <= LOOP_BYTES and not self._queue.unfinished_tasks:
            self._deliver(ended, send)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="moerl records", daemon=True)
            self._thread.start()
        self._queue.put((ended, send))

    def _deliver(self, ended: list[_Ended], send: Callable[[], None]) -> None:
        for one in ended:
            one.reason[FIELD] = self._writer.write(one.request_id, one.arrays)
        send()

    def _work(self) -> None:
        try:
            while True:
                self._deliver(*self._queue.get())
                self._queue.task_done()
        except BaseException:  # its replies would never come
            logging.getLogger(__name__).exception("records of ended requests")
            os._exit(1)


@cache
def _replies() -> RecordedReplies | None:
    """None in a server that no host of ours has started."""
    scratch = Path(tempfile.gettempdir())
    folder = scratch / FOLDER
    ours = scratch.name.startswith(SCRATCH) and folder.is_dir()
    return RecordedReplies(RecordWriter(folder)) if ours else None


def _reports() -> bool:
    """Whether this rank sends outputs; SGLang asks the same when it opens its sockets."""
    from sglang.srt.runtime_context import get_parallel

    own = get_parallel()
    return bool(own.pp_rank == own.attn_tp_rank == own.attn_cp_rank == 0)


def _taken(output: Any, place: int, req: Any) -> dict[str, Array]:
    """Take the records of a request out of an output; empty until the request ends."""
    arrays: dict[str, Array] = {}
    for name, rows in (("routes", output.routed_experts), ("positions", output.indexer_topk)):
        if rows is not None and rows[place] is not None:
            arrays[name], rows[place] = rows[place].numpy(), None
    arrays |= _taken_top(output, place, req)
    masks = output.output_token_sampling_mask
    if masks is None or masks[place] is None:
        return arrays
    pieces = req.moerl_masks = [*getattr(req, "moerl_masks", ()), masks[place]]
    masks[place] = _empty(masks[place])
    if output.finished_reasons[place] is not None:
        arrays["mask_lengths"] = np.concatenate([piece.lengths for piece in pieces])
        arrays["mask_ids"] = np.concatenate([piece.token_ids for piece in pieces])
        arrays["mask_logprobs"] = np.concatenate([piece.logprobs for piece in pieces])
    return arrays


def _taken_top(output: Any, place: int, req: Any) -> dict[str, Array]:
    """The likeliest entries of each token, [n, K]: the request keeps them until it ends."""
    if not req.return_logprob or not req.logprob.top_logprobs_num:
        return {}
    output.output_top_logprobs_val[place], output.output_top_logprobs_idx[place] = [], []
    if output.finished_reasons[place] is None:
        return {}
    own, end = req.logprob, req.send_output_token_logprobs_offset
    return {
        "top_ids": np.asarray(own.output_top_logprobs_idx[:end], np.int32),
        "top_logprobs": np.asarray(own.output_top_logprobs_val[:end], np.float32),
    }


def _empty(piece: Any) -> Any:
    none = np.zeros(0, np.int32)
    return type(piece)(lengths=none, token_ids=none, logprobs=np.zeros(0, np.float32))
