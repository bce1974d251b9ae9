"""A trainer of one rank in this process, for benches; import it before torch."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.helpers of its importers

from moerl.config.schema import ParallelConfig, TransformerImpl
from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import store_variable

if TYPE_CHECKING:
    from moerl.trainer.model.parallel import Parallel


def one_rank(impl: TransformerImpl = "auto") -> Parallel:
    """Join a trainer of one rank.  Import Megatron after this call, not before."""
    from moerl.trainer.model import parallel
    from moerl.trainer.model.platform import prepare

    platform = prepare("auto", impl=impl)
    os.environ |= store_variable(_store().server_address, 0) | {"RANK": "0", "WORLD_SIZE": "1"}
    return parallel.start(ParallelConfig(), platform, timeout_s=600)


@cache
def _store() -> StoreServer:
    """It lives as long as the process."""
    return StoreServer("127.0.0.1")
