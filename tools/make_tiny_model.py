#!/usr/bin/env python
"""Make a tiny random-weight model: tools/make_tiny_model.py FOLDER [--seed N] [key=value].

Keys are the fields of `moerl.config.schema.TinyModel`, for example `num_layers=4 num_experts=16`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moerl.config.schema import TinyModel
from moerl.config.validate import check_keys, read_section
from moerl.core.errors import MoerlError
from moerl.data.tiny_model import make_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        make_tiny_model(arguments.folder, _shape(arguments.settings), arguments.seed)
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(arguments.folder)
    return 0


def _shape(settings: list[str]) -> TinyModel:
    chosen = dict(setting.partition("=")[::2] for setting in settings)
    check_keys(TinyModel, chosen, "model.tiny.")
    return read_section(TinyModel, chosen, "model.tiny.")


if __name__ == "__main__":
    sys.exit(main())
