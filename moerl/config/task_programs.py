"""Settings of the programs of a task: their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from moerl.config.bounds import Count, Natural


@dataclass(frozen=True)
class TaskLimits:
    """Limits of each isolated program: a worker with rewards and environments, or a tool."""

    memory_mb: Natural = 4096  # MiB of address space of each process; 0 = no limit
    # CPU seconds of each process in one score or reply; 0 = twice score_timeout_s
    cpu_s: Natural = 0
    processes: Annotated[int, Meta(ge=4)] = 64  # processes and threads at once
    file_mb: Natural = 64  # MiB of each file that it writes
    open_files: Annotated[int, Meta(ge=64)] = 1024
    reply_kb: Count = 1024  # KiB of a score with its steps, or of an environment's text
    output_kb: Natural = 64  # KiB of printed text that reach the log of the scorer
    # User of the programs when moerl runs as root; other: one without any file, where it can run
    user: Literal["other", "same"] = "other"
