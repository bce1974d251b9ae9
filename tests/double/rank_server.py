"""`tests.helpers.rank_server` with the double, which must be loaded before torch."""

from __future__ import annotations

import runpy
import sys

from tests.double.load import load

if __name__ == "__main__":
    load()
    sys.argv[1:] = ["cuda"]
    # not an import: forked ranks import the module themselves, with their own environment
    runpy.run_module("tests.helpers.rank_server", run_name="__main__")
