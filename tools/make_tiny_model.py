#!/usr/bin/env python
"""Make a tiny random-weight Qwen3-MoE: tools/make_tiny_model.py FOLDER [--seed N] [key=value].

Keys are the fields of `moerl.config.schema.TinyModel`, for example `hidden_size=64 num_layers=4`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, get_type_hints

from moerl.config.schema import TinyModel
from moerl.data.tiny_model import make_tiny_model
from moerl.errors import ConfigError, MoerlError


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
    kinds = {key: kind for key, kind in get_type_hints(TinyModel).items() if key != "enabled"}
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in kinds:
            raise ConfigError("model.tiny", setting, f"known keys are {', '.join(kinds)}")
        try:
            chosen[key] = kinds[key](value)
        except ValueError as error:
            raise ConfigError(f"model.tiny.{key}", value, "a number is wanted") from error
    return TinyModel(**chosen)


if __name__ == "__main__":
    sys.exit(main())
