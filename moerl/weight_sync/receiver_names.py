"""Names that an engine host and the receivers in its server's ranks share.

Apart from the receiver, because a host needs no torch: its import takes seconds at each start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

COMMIT = "moerl_commit"  # load_format of the commit request
MEMORY = "moerl_memory"  # load_format of a request to sleep or to wake
UNCHANGED = "nothing was changed"  # prefix of a refused commit's reply
SCRATCH = "moerl-engine-"  # prefix of the private folder that the host makes for one server


@dataclass(frozen=True, slots=True)
class Committed:
    """Cost of a commit on the scheduler; its JSON is the first line of the reply's message."""

    seconds: float  # time without a forward pass
    recomputed: int = 0  # tokens whose KV cache was dropped
    begun_s: float = 0.0  # unix time at which the scheduler started it
    cpu_s: float = 0.0  # CPU time of `seconds`; the rest is waiting for a CPU or a GPU


@dataclass(frozen=True, slots=True)
class MemoryMoved:
    """Cost of a sleep or a wake on the scheduler; its JSON is the first line of the reply."""

    seconds: float
    num_bytes: int = 0  # that rank 0 gave back
    recomputed: int = 0  # tokens whose KV cache was dropped


def adapter_name(version: str) -> str:
    """Name of a version's adapter in SGLang's slots."""
    return f"moerl-v{version}"


def socket_path(folder: Path, rank: int) -> Path:
    """Socket of a rank's receiver; `folder` is the server's private scratch folder."""
    return folder / f"receiver-{rank}.sock"


def keys_path(folder: Path) -> Path:
    """Keys of the requests to the receivers of one server, in the same folder."""
    return folder / "keys"
