"""torchrun with moerl's rendezvous: `python -m moerl.distributed.torchrun ARGUMENTS`.

The arguments are torchrun's.  On one machine `--nproc-per-node N PROGRAM` is enough.

`TorchrunJob` starts, watches and ends one torchrun: of the trainer, the reference ranks, supervised
training or scoring.  Ranks have sessions of their own, so no process group holds all of them; a
variable of the environment marks all processes of the job, also when their torchrun was killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from moerl.runtime.process_tree import (
    children_with,
    die_with_parent,
    end_descendants,
    ending_of,
    error_in,
)

# Environment variable of every process of one job: the trainer's incarnation, or REF_MODELS.
TRAINER_JOB = "MOERL_TRAINER_JOB"
_GRACE_S = 2.0


def main(arguments: Sequence[str]) -> None:
    """Be torchrun.  The processes that only start a job do not import torch."""
    from torch.distributed import run

    from moerl.distributed.elastic_rendezvous import BACKEND, register

    if run.parse_args(arguments).standalone:
        sys.exit("moerl: --standalone opens torch's own store; leave it out")
    register()
    run.main(["--rdzv-backend", BACKEND, *arguments])


class TorchrunJob:
    """One torchrun with its ranks; it runs from its construction on, and appends to its log."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        *,
        pipe: bool = False,
        ends_with_parent: bool = False,
    ) -> None:
        """Start torchrun.

        environment: all of it.  pipe: standard output goes to `output` and not to the log.

        ends_with_parent: torchrun gets SIGTERM when the thread that started it ends.
        """
        self.log = log
        self._mark = environment.get(TRAINER_JOB, "")
        self._begin = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else file,
                stderr=file,
                preexec_fn=die_with_parent if ends_with_parent else None,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        assert self._process.stdout is not None, "asked for with pipe"
        return self._process.stdout

    def poll(self) -> int | None:
        """Exit status; None while torchrun runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """Ask torchrun to end its ranks and itself."""
        self._process.terminate()

    def kill(self) -> None:
        """End torchrun at once; `end` ends its ranks."""
        self._process.kill()

    def end(self, grace_s: float = _GRACE_S) -> None:
        """End torchrun and all processes of the job that this process or its children started."""
        assert self._mark, f"{TRAINER_JOB} names the job"
        end_descendants(grace_s, mark=(TRAINER_JOB, self._mark))

    def ranks(self) -> list[tuple[int, str]]:
        """(pid, rank) of the living ranks."""
        return children_with(self._process.pid, "RANK")

    def cause(self) -> str:
        """The cause of its end in its log, in one sentence."""
        return error_in(self.log, self._begin)

    def ending(self, code: int) -> str:
        """Its exit status and the cause."""
        return f"{ending_of(code)}: {self.cause()}"


if __name__ == "__main__":
    main(sys.argv[1:])
