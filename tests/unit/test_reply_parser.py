"""Record check: a correct reply passes, and each broken one is refused under its own reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moerl.core.errors import RecordError
from moerl.core.types import Finish, GenerateRequest, ModelShape, PolicyVersion, SamplingParams
from moerl.engine.host.reply_parser import Decoded, InFlight, cut, decode_together, parse

VERSION = PolicyVersion(1, 4)
SHAPE = ModelShape(
    vocab_size=50, num_layers=3, moe_layers=(0, 2), num_experts=8, top_k=2, eos_token_ids=(2,)
)
TRUNCATED = SamplingParams(4, top_p=0.9, top_k=10)
FULL = SamplingParams(4)


def ask(sampling: SamplingParams = TRUNCATED, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "rollout_id": "7.0",
        "segment": 0,
        "tail_ids": np.array([5, 9, 11], np.int32),
        "num_sampled": 0,
        "sampling": sampling,
    }
    return GenerateRequest(**(fields | changes))


def rows(count: int) -> np.ndarray:
    """[count, 3 layers, 2]: row t of layer l routes to experts (t + l) % 8 and (t + l + 1) % 8."""
    first = (np.arange(count)[:, None] + np.arange(3)) % 8
    return np.stack([first, (first + 1) % 8], -1).astype("<i4")


def kept(*of_tokens: list[int]) -> dict[str, np.ndarray]:
    lengths = [len(ids) for ids in of_tokens]
    ids = [one for ids in of_tokens for one in ids]
    return {"mask_lengths": np.array(lengths, np.int32), "mask_ids": np.array(ids, np.int32)}


def records(**changes: Any) -> dict[str, np.ndarray]:
    """What the file of `reply()` holds."""
    fields = {
        "routes": rows(4),
        **kept([9, 7], [3]),
        "mask_logprobs": np.array([-1.25, -0.25], np.float32),
    }
    found = {name: value for name, value in (fields | changes).items() if value is not None}
    return {name: np.asarray(value) for name, value in found.items()}


def reply(**meta: Any) -> dict[str, Any]:
    """What the engine answers to `ask()`: tokens 7 and 3 after a prompt of three."""
    fields = {
        "finish_reason": {"type": "length", "length": 2},
        "weight_versions": [{"version": "1.4", "start": 0, "end": 2}],
        "cached_tokens": 1,
        "output_token_logprobs": [[-1.5, 7, None], [-0.5, 3, None]],
    }
    return {"output_ids": [7, 3], "meta_info": fields | meta}


def parsed(
    got: dict[str, Any],
    asked: GenerateRequest | None = None,
    held: dict[str, np.ndarray] | None = None,
    routing: bool = True,
    support: bool = False,
) -> Any:
    """The reply, alone; and what comes of it beside two others, decoded together, is the same."""
    held = records() if held is None else held
    together = decode_together([OTHER, (got, held), OTHER], SHAPE, support=support)[1]
    found = [
        outcome(got, asked or ask(), held, routing, decoded, support)
        for decoded in (Decoded(), together)
    ]
    assert repr(found[0]) == repr(found[1])
    if isinstance(found[0], RecordError):
        raise found[0]
    return found[1]


def outcome(
    got: dict[str, Any],
    request: GenerateRequest,
    held: dict[str, np.ndarray],
    routing: bool,
    decoded: Decoded,
    support: bool,
) -> Any:
    try:
        return parse(
            got,
            held,
            request,
            version=VERSION,
            shape=SHAPE,
            routing=routing,
            decoded=decoded,
            support=support,
        )
    except RecordError as error:
        return error


OTHER: tuple[dict[str, Any], dict[str, np.ndarray]] = (
    {"output_ids": [1]},
    {
        "routes": rows(3)[::-1],
        **kept([4, 1, 8]),
        "mask_logprobs": np.log(np.array([0.5, 0.25, 0.25], np.float32)),
    },
)


def test_replies_are_decoded_together() -> None:
    plain = (reply(), records())
    first, mine, last = decode_together([OTHER, plain, OTHER], SHAPE)
    for routes, count in ((first.routes, 3), (mine.routes, 4), (last.routes, 3)):
        assert routes is not None
        assert routes.shape == (2, count, 2)
    assert first.mask is not None
    assert [part.tolist() for part in first.mask] == [[0, 3], [1, 4, 8]]
    bad = (reply(), records(**kept([9, 7], [4])))
    assert [one.mask for one in decode_together([plain, bad], SHAPE)] == [None, None]
    bad = (reply(), records(routes=rows(4) + 8))
    assert [one.routes for one in decode_together([plain, bad], SHAPE)] == [None, None]


def test_truncated_reply() -> None:
    record = parsed(reply())
    assert record.output_ids.tolist() == [7, 3]
    assert record.logprobs.tolist() == [-1.25, -0.25]
    assert record.logprobs.dtype == np.float32
    assert record.finish is Finish.LENGTH
    assert record.cached_tokens == 1
    np.testing.assert_array_equal(record.routing, rows(4)[:, [0, 2]].transpose(1, 0, 2))
    assert record.routing.dtype == np.uint8
    offsets, ids = record.mask
    assert (offsets.tolist(), ids.tolist()) == ([0, 2, 3], [7, 9, 3])


def test_full_distribution_uses_the_plain_logprobs() -> None:
    record = parsed(reply(), ask(FULL))
    assert record.logprobs.tolist() == [-1.5, -0.5]
    assert record.mask is None


def with_support(*probabilities: float) -> dict[str, np.ndarray]:
    """Masks [9, 7] and [3], sampled 7 and 3, with the probability of each kept id."""
    return records(mask_logprobs=np.log(np.array(probabilities, np.float32)))


def test_log_probabilities_of_all_kept_entries() -> None:
    """Beside the ids, in their order, as fp16; the sampled token's own stays fp32."""
    record = parsed(reply(), held=with_support(0.7, 0.3, 1.0), support=True)
    offsets, ids, logprobs = record.mask
    assert (offsets.tolist(), ids.tolist()) == ([0, 2, 3], [7, 9, 3])
    assert logprobs.dtype == np.float16
    assert logprobs.tolist() == np.log([0.3, 0.7, 1.0]).astype(np.float16).tolist()
    np.testing.assert_array_equal(record.logprobs, np.log(np.array([0.3, 1.0], np.float32)))


@pytest.mark.parametrize(
    ("mass", "refused"), [(1.0019, False), (0.9981, False), (1.0021, True), (0.9979, True)]
)
def test_a_mask_whose_probabilities_do_not_sum_to_1_is_refused(mass: float, refused: bool) -> None:
    held = with_support(0.4, mass - 0.4, 1.0)
    if not refused:
        assert parsed(reply(), held=held, support=True).mask is not None
        return
    with pytest.raises(RecordError, match=r"mask_mass.*row 0 sum to"):
        parsed(reply(), held=held, support=True)


def test_a_support_that_is_short_or_not_finite_is_refused() -> None:
    for held in (records(), with_support(0.4, 0.6), with_support(0.4, np.nan, 1.0)):
        with pytest.raises(RecordError, match=r"mask_mass|length|logprob_finite"):
            parsed(reply(), held=held, support=True)


def top(ids: list[list[int]], probabilities: list[list[float]]) -> dict[str, np.ndarray]:
    logs = np.log(np.array(probabilities, np.float32))
    return records(
        mask_ids=None,
        mask_lengths=None,
        mask_logprobs=None,
        top_ids=np.array(ids, np.int32),
        top_logprobs=logs,
    )


def test_likeliest_entries_come_where_sampling_truncates_nothing() -> None:
    held = top([[9, 4], [3, 49]], [[0.5, 0.25], [0.9, 0.1]])
    record = parsed(reply(), ask(FULL), held, support=True)
    offsets, ids, logprobs = record.mask
    assert (offsets.tolist(), ids.tolist()) == ([0, 2, 4], [4, 9, 3, 49])
    assert logprobs.tolist() == np.log([0.25, 0.5, 0.9, 0.1]).astype(np.float16).tolist()
    assert record.logprobs.tolist() == [-1.5, -0.5]


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (top([[9, 4]], [[0.5, 0.25]]), "mask_rows"),
        (top([[9, 9], [3, 4]], [[0.5, 0.25]] * 2), "mask_duplicate"),
        (top([[9, 50], [3, 4]], [[0.5, 0.25]] * 2), "mask_range"),
        (top([[9, 4], [3, 4]], [[0.5, 0.25], [0.9, 0.103]]), "mask_mass"),
        (records(), "mask_rows"),
    ],
)
def test_malformed_likeliest_entries_are_refused(held: Any, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        parsed(reply(), ask(FULL), held, support=True)
    assert caught.value.reason == reason


def test_dense_model_needs_no_rows() -> None:
    assert parsed(reply(), held=records(routes=None), routing=False).routing is None


def test_resumed_request_gets_new_rows_only() -> None:
    request = ask(num_sampled=1)  # row 2 is that of the last token of the partial
    record = parsed(reply(), request, records(routes=rows(4)[2:]))
    np.testing.assert_array_equal(record.routing[0], rows(4)[2:, 0])
    assert record.audit is None


def test_a_later_turn_gets_the_rows_behind_those_of_the_turns_before() -> None:
    record = parsed(reply(), ask(rows_known=2), records(routes=rows(4)[2:]))
    np.testing.assert_array_equal(record.routing[0], rows(4)[2:, 0])
    assert record.audit is None
    record = parsed(reply(), ask(rows_known=2, audit=True))
    np.testing.assert_array_equal(record.audit[0], rows(4)[:2, 0])
    np.testing.assert_array_equal(record.routing[0], rows(4)[2:, 0])


def test_audit_splits_prefix_rows_from_new_ones() -> None:
    record = parsed(reply(), ask(num_sampled=1, audit=True))
    np.testing.assert_array_equal(record.audit[1], rows(4)[:2, 2])
    np.testing.assert_array_equal(record.routing[1], rows(4)[2:, 2])


def test_rounding_above_zero_is_clamped() -> None:
    record = parsed(reply(), held=records(mask_logprobs=[5e-7, -0.25]))
    assert record.logprobs.tolist() == [0.0, -0.25]


ABORTED = {"type": "abort", "message": "Abort"}


@pytest.mark.parametrize(
    ("tokens", "sampling", "finish"),
    [
        ([7, 3], TRUNCATED, Finish.ABORT),
        ([7, 2], TRUNCATED, Finish.STOP),  # the abort hit the step that sampled the end
        ([7, 3], SamplingParams(4, top_p=0.9, top_k=9, stop_token_ids=(3,)), Finish.STOP),
        ([7, 2], SamplingParams(4, top_p=0.9, top_k=9, ignore_eos=True), Finish.ABORT),
        ([7, 3], SamplingParams(2, top_p=0.9, top_k=9), Finish.LENGTH),
    ],
)
def test_finish_of_an_abort(tokens: list[int], sampling: SamplingParams, finish: Finish) -> None:
    got = reply(finish_reason=ABORTED)
    got["output_ids"] = tokens
    assert parsed(got, ask(sampling), records(**kept([7], [2, 3]))).finish is finish


@pytest.mark.parametrize("routing", [True, False])
@pytest.mark.parametrize("tokens", [[], [7, 3]])
def test_abort_without_records_counts_as_nothing(tokens: list[int], routing: bool) -> None:
    """In the queue, never started or retracted: the tokens come without their rows."""
    got = {"output_ids": tokens, "meta_info": {"finish_reason": ABORTED}}
    record = parsed(got, held={}, routing=routing)
    assert len(record.output_ids) == len(record.logprobs) == 0
    assert (record.routing, record.mask, record.finish) == (None, None, Finish.ABORT)


def blank() -> np.ndarray:
    got = rows(4)
    got[:, 2] = 0
    return got


@pytest.mark.parametrize(
    ("reason", "meta"),
    [
        ("version", {"weight_versions": [{"version": "1.3", "start": 0, "end": 2}]}),
        ("version", {"weight_versions": None}),
        (
            "version",
            {
                "weight_versions": [
                    {"version": "1.3", "start": 0, "end": 1},
                    {"version": "1.4", "start": 1, "end": 2},
                ]
            },
        ),
        ("nan", {"finish_reason": {"type": "stop", "matched": "NaN happened"}}),
        ("finish", {"finish_reason": {"type": "tired"}}),
        ("reply", {"finish_reason": {}}),
    ],
)
def test_broken_replies_are_refused(reason: str, meta: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        parsed(reply(**meta))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("logprob_sign", {"mask_logprobs": [1e-5, -0.25]}),
        ("logprob_finite", {"mask_logprobs": [np.nan, -0.25]}),
        ("logprob_finite", {"mask_logprobs": [-np.inf, -0.25]}),
        ("length", {"mask_logprobs": [-0.25]}),
        ("length", {"mask_logprobs": None}),
        ("mask_rows", {"mask_lengths": None}),
        ("mask_rows", {"mask_ids": None}),
        ("mask_rows", {"mask_ids": [9, 7]}),  # one fewer than the lengths say
        ("mask_rows", {"mask_lengths": [3, -1]}),
        ("mask_rows", {"mask_lengths": [2.0, 1.0]}),
        ("mask_rows", kept([7])),
        ("mask_empty", kept([7], [])),
        ("mask_sampled", kept([7], [4])),
        ("mask_range", kept([7], [3, 50])),
        ("mask_duplicate", kept([7, 7], [3])),
        ("routing_rows", {"routes": None}),
        ("routing_rows", {"routes": rows(3)}),
        ("routing_rows", {"routes": rows(4).astype(np.float32)}),
        ("routing_range", {"routes": rows(4) + 7}),
        ("routing_range", {"routes": rows(4) - 1}),
        ("routing_blank", {"routes": blank()}),
    ],
)
def test_broken_records_are_refused(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        parsed(reply(), held=records(**changes))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("reason", "tokens"),
    [("token_range", [7, 50]), ("token_range", [-1, 3]), ("length", [3] * 5), ("length", [])],
)
def test_broken_tokens_are_refused(reason: str, tokens: list[int]) -> None:
    got = reply()
    got["output_ids"] = tokens
    with pytest.raises(RecordError) as caught:
        parsed(got)
    assert caught.value.reason == reason


GARBAGE = (
    None, "x", "", -1, 2**70, 1.5, float("nan"), float("inf"), True, [], {}, [None], ["x"], [[]],
    [{}], {"a": 1}, [2**70], [[-1]], [[1.5]], [["x"]], "\ud800", [[None, None, None]] * 2,
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a reply, itself included."""
    yield at
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*at, key))


def put(value: Any, at: tuple[Any, ...], other: Any) -> Any:
    if not at:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = put(value[at[0]], at[1:], other)
    return copy


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sampling", [TRUNCATED, FULL])
def test_garbage_anywhere_is_refused_or_of_no_consequence(sampling: SamplingParams) -> None:
    """No other error leaves the door; what passes is a reply of two tokens all the same."""
    whole, refused, passed = reply(), 0, 0
    for at in places(whole):
        for other in GARBAGE:
            try:
                record = parsed(put(whole, at, other), ask(sampling))
            except RecordError:
                refused += 1
            else:
                passed += 1
                assert record.output_ids.tolist() == [7, 3], (at, other)
                assert (record.logprobs <= 0).all()
    assert refused > passed > 0


def test_logprobs_of_other_tokens_are_refused() -> None:
    got = reply(output_token_logprobs=[[-1.5, 7, None], [-0.5, 4, None]])
    with pytest.raises(RecordError, match="logprob_tokens"):
        parsed(got, ask(FULL))


def test_reply_without_meta_is_refused() -> None:
    with pytest.raises(RecordError, match="reply"):
        parsed({"output_ids": [1]})


# --- weights that changed under the request -------------------------------------------------------
NEXT = PolicyVersion(1, 5)


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    begins = [0, *(end for _, end in ends)]
    return [{"version": v, "start": s, "end": e} for (v, e), s in zip(ends, begins, strict=False)]


def in_flight(
    got: dict[str, Any], held: dict[str, np.ndarray] | None = None, **fields: bool
) -> list[Any]:
    served = InFlight((VERSION, NEXT), **fields)
    request, held = ask(), records() if held is None else held
    record = parse(got, held, request, version=VERSION, shape=SHAPE, routing=True, in_flight=served)
    return cut(record, request)


def test_a_reply_of_two_versions_is_cut_where_an_abort_would_have() -> None:
    (first, a), (second, b) = in_flight(
        reply(weight_versions=spans(("1.4", 1), ("1.5", 2))), keeps_kv=True
    )
    assert [span.kept_kv for span in (*a.spans, *b.spans)] == [False, True]
    assert (a.finish, b.finish) == (Finish.ABORT, Finish.LENGTH)
    assert a.output_ids.tolist() + b.output_ids.tolist() == [7, 3]
    assert (second.num_sampled, second.token_ids.tolist()) == (1, [5, 9, 11, 7])
    assert a.routing.shape[1] == second.rows_from == 3  # the row of 7 is the second's
    assert b.routing.shape[1] == 1
    np.testing.assert_array_equal(np.concatenate([a.routing, b.routing], 1)[0], rows(4)[:, 0])
    assert [part.mask[0].tolist() for part in (a, b)] == [[0, 2], [0, 1]]
    assert [part.mask[1].tolist() for part in (a, b)] == [[7, 9], [3]]
    assert first.num_sampled == 0


def test_rows_of_a_recomputed_prefix_follow() -> None:
    got = reply(weight_versions=spans(("1.4", 1), ("1.5", 2)))
    held = records(routes=np.concatenate([rows(4), rows(6)[3:6]]))
    (_, a), (_, b) = in_flight(got, held, returns_prefix=True)
    assert a.audit is None
    np.testing.assert_array_equal(b.audit[0], rows(6)[3:6, 0])


def test_a_half_prefilled_prompt_is_marked() -> None:
    ((_, only),) = in_flight(reply(weight_versions=spans(("1.4", 0), ("1.5", 2))), keeps_kv=True)
    assert [(span.first, span.version, span.kept_kv) for span in only.spans] == [(0, NEXT, True)]


@pytest.mark.parametrize(
    "told",
    [
        spans(("1.5", 1), ("1.4", 2)),  # backwards
        spans(("1.4", 1), ("1.6", 2)),  # never served
        spans(("1.4", 1), ("1.5", 1)),  # a token short
        spans(("1.4", 1), ("1.5", 3)),
        spans(("1.3", 2)),
        [],
    ],
)
def test_spans_that_cannot_be(told: list[dict[str, Any]]) -> None:
    with pytest.raises(RecordError) as error:
        in_flight(reply(weight_versions=told))
    assert error.value.reason == "version"
