"""`python -m tests.double.run_module MODULE ARGUMENTS`: a trainer's program on the double.

The double must be loaded before torch.
"""

from __future__ import annotations

import runpy
import sys

from tests.double.load import load


def main() -> None:
    load()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
