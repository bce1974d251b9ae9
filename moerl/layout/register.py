"""Add a model family in this process only: to try its tables before they become part of moerl.

That is enough to prove a layout on shapes (`moerl.planning.layout_check.check_layout` in the same
process).  `moerl check-layout`, the trainer's ranks and the engines are processes of their own and
refuse the family; a run needs it in `moerl/layout/spec_readers.py` and `moerl/layout/families.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moerl.layout.families import FAMILY_TABLES, Family
from moerl.layout.spec_readers import Config, add_reader


def register_family(
    model_type: str, read: Callable[[Config], dict[str, Any]], family: Family
) -> None:
    """read: fields of ModelSpec from a config.json; family: the parts of its layers.

    Raises LayoutError when there is a family of that name.
    """
    add_reader(model_type, read)
    FAMILY_TABLES[model_type] = family
