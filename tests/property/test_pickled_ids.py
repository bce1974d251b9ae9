"""Requests and replies between processes: token ids in three bytes each, nothing else changes."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moerl.core.types import Finish, GenerateRequest, PolicyVersion, SamplingParams, Segment

SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, top_p=0.9)


def request(tail: np.ndarray, prompt: np.ndarray) -> GenerateRequest:
    return GenerateRequest("4.0", 2, tail, len(tail), SAMPLING, rows_known=3, prompt_ids=prompt)


def segment(ids: np.ndarray, rest: tuple[Segment, ...] = ()) -> Segment:
    logprobs = -np.arange(len(ids), dtype=np.float32)
    return Segment(
        rollout_id="4.0",
        output_ids=ids,
        logprobs=logprobs,
        version=PolicyVersion(1, 2),
        finish=Finish.STOP,
        routing=None,
        sampling_mask=None,
        audit_rows=None,
        engine=3,
        cached_tokens=5,
        start_s=1.0,
        end_s=2.0,
        rest=rest,
    )


def same(left: object, right: object) -> None:
    assert type(left) is type(right)
    for one in fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, one.name), getattr(right, one.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        elif one.name == "rest":
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                same(x, y)
        else:
            assert a == b, one.name


any_ids = st.one_of(
    arrays.arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 2**24 - 1)),
    arrays.arrays(np.int32, st.integers(0, 40), elements=st.integers(-(2**31), 2**31 - 1)),
    arrays.arrays(np.int64, st.integers(0, 40), elements=st.integers(0, 200_000)),
)


@given(any_ids, any_ids)
def test_nothing_changes(ids: np.ndarray, prompt: np.ndarray) -> None:
    """Also ids that do not fit: a garbage reply reaches the check at the door as it was."""
    for value in (request(ids, prompt), segment(ids, (segment(prompt),))):
        for protocol in (2, 5):
            same(pickle.loads(pickle.dumps(value, protocol=protocol)), value)
        same(copy.deepcopy(value), value)
        same(replace(value), value)


def test_three_bytes_a_token_and_a_shared_prompt_once() -> None:
    rng = np.random.default_rng(0)
    ids, prompt = (rng.integers(0, 150_000, n).astype(np.int32) for n in (1000, 3000))
    siblings = [request(ids[: 100 + i], prompt) for i in range(16)]
    size = len(pickle.dumps(siblings, protocol=5))
    tails = sum(len(sibling.tail_ids) for sibling in siblings)
    assert 3 * tails + 4 * len(prompt) < size < 3 * tails + 4 * len(prompt) + 16 * 200
    back = pickle.loads(pickle.dumps(siblings, protocol=5))
    assert all(sibling.prompt_ids is back[0].prompt_ids for sibling in back)
    assert len(pickle.dumps(segment(ids))) < 3 * len(ids) + 4 * len(ids) + 1200  # ids, logprobs


def test_ids_that_do_not_fit_are_not_cut() -> None:
    for wrong in (-1, 2**24):
        value = segment(np.array([5, wrong], np.int32))
        assert pickle.loads(pickle.dumps(value)).output_ids.tolist() == [5, wrong]


@pytest.mark.parametrize("length", [0, 1])
def test_short_ones(length: int) -> None:
    value = request(np.arange(length, dtype=np.int32), np.zeros(0, np.int32))
    same(pickle.loads(pickle.dumps(value)), value)
