"""Names for the ranges that settings share; msgspec reads them (`moerl.config.validate`).

Every upper bound is finite: infinity is above it, and NaN satisfies no bound.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

LARGEST = sys.float_info.max

Count = Annotated[int, Meta(ge=1)]
UserPath = Annotated[str, Meta(title="path")]  # ~ is the home folder
Several = Annotated[int, Meta(ge=2)]
Natural = Annotated[int, Meta(ge=0)]

Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
NonNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Limit = Annotated[float, Meta(ge=0)]  # infinity: no limit
Share = Annotated[float, Meta(gt=0, le=1)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
