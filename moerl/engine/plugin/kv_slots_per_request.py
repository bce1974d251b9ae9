"""A recorded request keeps its own cache slots where another request computed the same prefix.

SGLang records by cache slot.  When two requests compute one prefix at the same time, the second to
publish it in the prefix cache exchanges its slots for the slots of the first: its record would then
name the experts of the other request, although its own tokens were computed from its own choice.
Mostly both made the same choice.  Where they did not (scores that tie, rounding), or where the rows
are not known yet, the request stays out of the prefix cache, which SGLang allows per request: it
keeps its slots, its keys and its record.  A prefix found in the cache is another matter: the
request really used its slots, and so its rows.

A request of a few tokens stays out of the prefix cache in any case: computing its prefix again
takes less time than the look-up, the comparison and the insertion.

Rejected: refusing such records (siblings of one prompt meet often), no prefix cache at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_SHORT = 16  # most tokens, prompt and answer, of a request that is not worth a place in the cache


def publish(original: Callable[..., None], req: Any, tree_cache: Any) -> None:
    """AROUND checkpoint_kv_cache: a running request publishes its prefix so far."""
    if req.return_routed_experts or req.return_indexer_topk:
        req.skip_radix_cache_insert |= _is_short(req) or not _may_share(req, tree_cache)
    original(req, tree_cache)


def _is_short(req: Any) -> bool:
    most = len(req.origin_input_ids) + req.sampling_params.max_new_tokens
    return bool(most <= _SHORT)


def _may_share(req: Any, tree_cache: Any) -> bool:
    """Whether the slots that publishing would exchange hold the same rows."""
    if not tree_cache.supports_prefix_sharing():
        return True
    own = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.extend_end]
    theirs = _in_cache(req, tree_cache)
    first, end = req.kv.cache_protected_len, min(len(theirs), len(own))
    if end <= first:
        return True
    own, theirs = torch.stack([own[first:end].long(), theirs[first:end].long()]).cpu()
    other = own != theirs
    return not bool(other.any()) or (
        # rows of a chunk in the middle may still be on their way from the device
        req.extend_end == len(req.full_untruncated_fill_ids)
        and all(torch.equal(rows[own[other]], rows[theirs[other]]) for rows in _rows())
    )


def _in_cache(req: Any, tree_cache: Any) -> Tensor:
    """Slots of the longest prefix that is in the cache."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.common import _req_radix_key

    key = _req_radix_key(tree_cache, req, req.full_untruncated_fill_ids[: req.extend_end])
    found = tree_cache.match_prefix(MatchPrefixParams(key=key))
    slots: Tensor = tree_cache.path_device_indices(found.last_device_node)
    return slots


def _rows() -> Iterator[Tensor]:
    """The recorded rows of each capturer, by slot."""
    from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    for capturer in (get_global_experts_capturer(), get_global_indexer_capturer()):
        if capturer is not None:
            yield capturer.host_cache.buffer
