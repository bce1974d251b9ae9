"""Segments join into one aligned record; every broken join is refused at the door."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from moerl.core.errors import RecordError
from moerl.core.types import (
    BlobRef,
    Finish,
    GenerateRequest,
    MaskBlob,
    ModelShape,
    PolicyVersion,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Segment,
)
from moerl.episodes.finished_episode import join
from moerl.episodes.turn import TurnInFlight
from moerl.records.header_check import blob_uris, check

LAYERS, TOP_K, VOCAB = 2, 2, 50
SHAPE = ModelShape(VOCAB, LAYERS, (0, 1), 8, TOP_K)
IDS = np.asarray([5, 9, 11], np.int32)
SAMPLING = SamplingParams(max_new_tokens=6, top_p=0.9, top_k=8)


def blob(name: str, dtype: str, shape: tuple[int, ...]) -> BlobRef:
    return BlobRef(f"blob://n/{name}", 0, dtype, shape, "0" * 16)


def reply(
    request: GenerateRequest, tokens: list[int], version: int, finish: Finish = Finish.ABORT
) -> Segment:
    """What an engine host returns: rows for every newly fed token, a mask row per new token."""
    end = len(request.token_ids) + len(tokens) - 1
    name = f"{request.rollout_id}-s{request.segment}"
    rows = (LAYERS, end - request.rows_from, TOP_K)
    policy = PolicyVersion(0, version)
    routing = RoutingBlob(blob(name, "uint8", rows), request.rows_from, end, policy, (0, 1), 8)
    mask = MaskBlob(
        blob(name, "int64", (len(tokens) + 1,)),
        blob(name, "int32", (3 * len(tokens),)),
        request.num_sampled,
        len(tokens),
    )
    some = bool(tokens)
    return Segment(
        rollout_id=request.rollout_id,
        output_ids=np.asarray(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        version=policy,
        finish=finish,
        routing=routing if some else None,
        sampling_mask=mask if some else None,
        audit_rows=None,
        engine=0,
        cached_tokens=0,
        start_s=0.0,
        end_s=1.0,
    )


def turn_of() -> TurnInFlight:
    return TurnInFlight("3.0", IDS, SAMPLING, audit=False)


def record_of(partial: TurnInFlight) -> Rollout:
    return join(partial.name, [partial.sampled(partial.sampling)])


def accept(partial: TurnInFlight) -> None:
    check(record_of(partial), SHAPE)


def test_two_interruptions_give_one_aligned_record() -> None:
    partial = turn_of()
    partial.add(reply(partial.request(), [1, 2], 0))
    partial.add(reply(partial.request(), [], 0))  # aborted before its first token
    second = partial.request()
    assert (second.num_sampled, second.rows_from) == (2, 4)
    assert second.sampling.max_new_tokens == 4
    partial.add(reply(second, [3], 1))
    partial.add(reply(partial.request(), [4, 5], 2, Finish.STOP))
    record = record_of(partial)
    assert partial.finished
    assert record.token_ids.tolist() == [5, 9, 11, 1, 2, 3, 4, 5]
    assert record.loss_mask.tolist() == [False] * 3 + [True] * 5
    assert [(s.first, s.version.step) for s in record.versions] == [(0, 0), (2, 1), (3, 2)]
    assert [(r.row_begin, r.row_end) for r in record.routing] == [(0, 4), (4, 5), (5, 7)]
    assert [(m.first, m.num_tokens) for m in record.sampling_mask] == [(0, 2), (2, 1), (3, 2)]
    assert [v.step for v in record.version_of_tokens()] == [0, 0, 1, 2, 2]
    assert blob_uris(record) == {"blob://n/3.0-s0", "blob://n/3.0-s2", "blob://n/3.0-s3"}
    accept(partial)


def test_an_abort_at_the_length_limit_is_finished() -> None:
    partial = turn_of()
    partial.add(reply(partial.request(), [1, 2, 3, 4, 5, 6], 0))
    assert partial.finished
    assert record_of(partial).finish == Finish.LENGTH


def test_a_version_that_goes_back_is_refused() -> None:
    partial = turn_of()
    partial.add(reply(partial.request(), [1], 2))
    with pytest.raises(RecordError, match=r"after 0\.2"):
        partial.add(reply(partial.request(), [1], 1))


def test_a_missing_seam_row_is_refused() -> None:
    """The row of the last token before a stop exists only in the resumed call: drop it."""
    partial = turn_of()
    partial.add(reply(partial.request(), [1, 2], 0))
    request = partial.request()
    late = GenerateRequest(
        request.rollout_id,
        request.segment,
        np.append(request.token_ids, np.int32(7)),  # pretends one more token was fed before
        request.num_sampled,
        request.sampling,
    )
    segment = reply(late, [3], 0, Finish.STOP)
    partial.add(segment)
    with pytest.raises(RecordError) as refused:
        accept(partial)
    assert refused.value.reason == "routing_rows"


def test_cumulative_rows_are_refused() -> None:
    """An engine that sends all rows again on resume gives too many."""
    partial = turn_of()
    partial.add(reply(partial.request(), [1, 2], 0))
    request = partial.request()
    again = GenerateRequest(
        request.rollout_id, request.segment, request.token_ids, 0, request.sampling
    )
    partial.add(reply(again, [3], 0, Finish.STOP))
    with pytest.raises(RecordError) as refused:
        accept(partial)
    assert refused.value.reason == "routing_rows"


@pytest.mark.parametrize(
    ("field", "reason"), [("routing", "routing_rows"), ("sampling_mask", "mask_rows")]
)
def test_records_that_end_before_the_tokens_are_refused(field: str, reason: str) -> None:
    """The last segment's blob is not in the header; the others tile from the first token."""
    partial = turn_of()
    partial.add(reply(partial.request(), [1, 2], 0))
    partial.add(reply(partial.request(), [3], 0, Finish.STOP))
    record = record_of(partial)
    check(record, SHAPE)
    with pytest.raises(RecordError) as refused:
        check(replace(record, **{field: getattr(record, field)[:-1]}), SHAPE)
    assert refused.value.reason == reason


def test_a_missing_mask_is_refused() -> None:
    partial = turn_of()
    from dataclasses import replace

    segment = replace(reply(partial.request(), [1, 2], 0, Finish.STOP), sampling_mask=None)
    partial.add(segment)
    with pytest.raises(RecordError) as refused:
        accept(partial)
    assert refused.value.reason == "mask_rows"


def test_a_later_turn_continues_the_rows_of_an_earlier_one() -> None:
    first = TurnInFlight("1.0", IDS, SAMPLING, audit=False)
    first.add(reply(first.request(), [1, 2, 3], 4, Finish.STOP))
    prompt_ids = np.asarray([*IDS, 1, 2, 3, 20, 21], np.int32)
    second = TurnInFlight("1.0.t1", prompt_ids, SAMPLING, audit=False, rows_known=5)
    request = second.request()
    assert request.rows_from == 5
    second.add(reply(request, [4, 5], 5, Finish.STOP))
    row = join("1.0", [first.sampled(SAMPLING), second.sampled(SAMPLING)])
    check(row, SHAPE)
    assert [part.row_begin for part in row.routing] == [0, 5]
    with pytest.raises(RecordError) as refused:  # control: alone it lacks the rows before
        accept(second)
    assert refused.value.reason == "routing_rows"


# --- slices ---------------------------------------------------------------------------------------
def sliced() -> TurnInFlight:
    sampling = replace(SAMPLING, stop_token_ids=(2,))
    return TurnInFlight("3.0", IDS, sampling, audit=False, slice_tokens=4)


def test_a_slice_goes_on_where_it_ended() -> None:
    partial = sliced()
    request = partial.request()
    assert request.sampling.max_new_tokens == 4
    partial.add(reply(request, [7, 8, 9, 6], 1, Finish.LENGTH))
    assert not partial.finished
    request = partial.request()
    assert (request.sampling.max_new_tokens, request.num_sampled) == (2, 4)
    partial.add(reply(request, [5, 4], 1, Finish.LENGTH))
    assert partial.finished
    rollout = record_of(partial)
    assert rollout.finish == Finish.LENGTH
    assert [span.first for span in rollout.versions] == [0]
    check(rollout, SHAPE)


@pytest.mark.parametrize(("last", "finish"), [(2, Finish.STOP), (3, Finish.LENGTH)])
def test_a_stop_token_at_the_end_of_a_slice_ends_the_rollout(last: int, finish: Finish) -> None:
    """The engine looks at the limit first; going on would sample beyond the end."""
    partial = sliced()
    partial.add(reply(partial.request(), [7, 8, 9, last], 1, Finish.LENGTH))
    assert partial.finished == (finish == Finish.STOP)


def test_an_aborted_slice_asks_for_a_whole_one() -> None:
    partial = sliced()
    partial.add(reply(partial.request(), [7], 1, Finish.ABORT))
    assert partial.request().sampling.max_new_tokens == 4


def test_a_call_carries_the_prompt_of_its_siblings_once() -> None:
    """Tokens are the same as ever, and pickling the call writes the shared array once."""
    shared = np.arange(500, dtype=np.int32)

    def call(*prompts: np.ndarray) -> list[GenerateRequest]:
        siblings = [
            TurnInFlight(f"3.{i}", prompt_ids, SAMPLING, audit=False)
            for i, prompt_ids in enumerate(prompts)
        ]
        return [sibling.request() for sibling in siblings]

    together = pickle.dumps(call(*[shared] * 8), protocol=5)
    apart = pickle.dumps(call(*(shared.copy() for _ in range(8))), protocol=5)
    assert len(together) < len(apart) - 7 * shared.nbytes + 100
    assert all(r.token_ids.tolist() == list(range(500)) for r in pickle.loads(together))
