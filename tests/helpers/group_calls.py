"""Methods that torch's `distributed_c10d` calls on a process group, and those of the double's."""

from __future__ import annotations

import ast

SAME = (  # gloo's names
    "allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter",
    "_reduce_scatter_base", "alltoall", "alltoall_base", "gather", "scatter", "reduce",
    "allreduce_coalesced",
)  # fmt: skip
RENAMED = {  # torch 2.13 calls these
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
COALESCED = {  # gloo has no such form: one after the other
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "all_gather_single_coalesced": "_allgather_base",
}
NAMES = frozenset((*SAME, *RENAMED, *COALESCED, "send", "recv", "barrier"))  # of the double
# called by nothing here; the last two are new in torch 2.14
_ABSENT = frozenset(("allgather_coalesced", "recv_anysource", "gather_single", "new_window"))
_WITHOUT_TENSORS = frozenset((
    "_add_ephemeral_timeout", "_end_coalescing", "_end_time_estimate", "_get_backend", "_group_end",
    "_group_start", "_has_hooks", "_register_backend", "_set_default_backend",
    "_set_default_timeout", "_set_group_desc", "_set_group_name", "_start_coalescing",
    "_start_time_estimate", "_wait_for_pending_works", "abort", "get_backend", "get_comm",
    "get_reconfigure_handle", "lower", "rank", "reconfigure", "set_timeout", "shutdown", "size",
    "split",
))  # fmt: skip


def called(source: str) -> set[str]:
    """Names, of the text of distributed_c10d.py."""
    return {
        node.func.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("group", "pg", "backend", "process_group")
    }


def unknown(source: str) -> set[str]:
    """Of these, those with tensors that the double's NCCL does not have."""
    return called(source) - NAMES - _WITHOUT_TENSORS - _ABSENT
