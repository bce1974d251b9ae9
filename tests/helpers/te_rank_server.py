"""`tests.helpers.rank_server` with the stand-in for Transformer Engine, made before megatron."""

from __future__ import annotations

import runpy

from tests.helpers.te_modules import install

if __name__ == "__main__":
    install()
    # not an import: forked ranks import the module themselves, with their own environment
    runpy.run_module("tests.helpers.rank_server", run_name="__main__")
