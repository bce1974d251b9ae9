"""`python -m tests.double.run_module MODULE ARGUMENTS`: a trainer's program on the double.

The double must be loaded before torch.  Layers are local: it has no Transformer Engine.
"""

from __future__ import annotations

import functools
import runpy
import sys

from tests.double.load import load


def main() -> None:
    load()
    from moerl.trainer.model import platform

    vars(platform)["prepare"] = functools.partial(platform.prepare, layers="local")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
