"""torchrun with moerl's rendezvous: `python -m moerl.distributed.torchrun ARGUMENTS`.

The arguments are torchrun's.  On one machine `--nproc-per-node N PROGRAM` is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run

from moerl.distributed.elastic_rendezvous import BACKEND, register


def main(arguments: Sequence[str]) -> None:
    if run.parse_args(arguments).standalone:
        sys.exit("moerl: --standalone opens torch's own store; leave it out")
    register()
    run.main(["--rdzv-backend", BACKEND, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
