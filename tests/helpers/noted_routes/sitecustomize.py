"""Each scheduler notes a digest of the experts that it captured for each request that ends.

Python imports a module of this name at its start when its folder is on PYTHONPATH.  Lines
`REQUEST DIGEST` go to the file `rank-N` of the folder `MOERL_TEST_ROUTES`.
`MOERL_TEST_OTHER_ROUTES` names a rank that has one choice wrong.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

HOOKED = "sglang.srt.managers.scheduler_components.batch_result_processor"


def hook(module: ModuleType) -> None:
    import xxhash
    from sglang.srt.runtime_context import get_parallel

    processor = module.SchedulerBatchResultProcessor
    collect = processor._maybe_collect_routed_experts
    folder = Path(os.environ["MOERL_TEST_ROUTES"])

    def noted(self, req):  # type: ignore[no-untyped-def]
        collect(self, req)
        if req.routed_experts is None:
            return
        rank, rows = get_parallel().tp_rank, req.routed_experts
        if str(rank) == os.environ.get("MOERL_TEST_OTHER_ROUTES"):
            rows = rows.clone()
            rows[-1, -1, -1] += 1
        with (folder / f"rank-{rank}").open("a") as lines:
            lines.write(f"{req.rid} {xxhash.xxh3_128_hexdigest(rows.contiguous().numpy())}\n")

    processor._maybe_collect_routed_experts = noted


if os.environ.get("MOERL_TEST_ROUTES"):
    from tests.helpers.after_import import after_import

    after_import(HOOKED, hook)
