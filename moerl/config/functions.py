"""A user's own function, named in a setting as `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from moerl.errors import ConfigError


def look_up(field: str, path: str, named: Sequence[str]) -> Any:
    """A user's `package.module:function`, looked up from the working directory too.

    Raises ConfigError naming `field` and what else it may be.
    """
    allowed = f"use {', '.join(named)} or package.module:function"
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ConfigError(field, path, allowed)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(field, path, f"{error}; {allowed}") from error
