"""Which requests stay out of the prefix cache: a fake tree and a fake record, no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moerl.engine.plugin import kv_slots_per_request

OWN, THEIRS = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([0, 1, 12, 13])


def published(
    monkeypatch: pytest.MonkeyPatch,
    *,
    same_rows: bool,
    whole: bool = True,
    records: bool = True,
    theirs: torch.Tensor = THEIRS,
    most_tokens: int = 64,
) -> bool:
    """Whether a request of 6 tokens, the first 2 found in the cache, goes into the cache."""
    rows = torch.arange(20)[:, None, None].repeat(1, 2, 1)
    if same_rows:
        rows[12:14] = rows[2:4]
    monkeypatch.setattr(kv_slots_per_request, "_rows", lambda: iter([rows]))
    monkeypatch.setattr(kv_slots_per_request, "_in_cache", lambda _req, _tree: theirs)
    tree = SimpleNamespace(
        supports_prefix_sharing=lambda: True,
        req_to_token_pool=SimpleNamespace(req_to_token=OWN[None]),
    )
    req: Any = SimpleNamespace(
        return_routed_experts=records,
        return_indexer_topk=False,
        skip_radix_cache_insert=False,
        origin_input_ids=[7] * 9,
        sampling_params=SimpleNamespace(max_new_tokens=most_tokens - 9),
        extend_end=6,
        full_untruncated_fill_ids=[7] * (6 if whole else 9),
        kv=SimpleNamespace(req_pool_idx=0, cache_protected_len=2),
    )
    seen: list[bool] = []
    kv_slots_per_request.publish(
        lambda r, _tree: seen.append(not r.skip_radix_cache_insert), req, tree
    )
    (found,) = seen
    return found


def test_a_request_whose_rows_differ_keeps_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not published(monkeypatch, same_rows=False)
    assert published(monkeypatch, same_rows=True)
    assert published(monkeypatch, same_rows=False, records=False), "nothing is recorded"


def test_a_chunk_in_the_middle_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not published(monkeypatch, same_rows=True, whole=False)
    alone = torch.tensor([0, 1])
    assert published(monkeypatch, same_rows=False, whole=False, theirs=alone), "no other request"
    assert published(monkeypatch, same_rows=False, whole=False, theirs=OWN[:4]), "its own slots"


def test_a_request_of_a_few_tokens_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(monkeypatch, same_rows=True, most_tokens=17)
    assert not published(monkeypatch, same_rows=True, most_tokens=16)
