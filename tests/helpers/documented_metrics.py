"""Which metric names docs/metrics.md does not define."""

from __future__ import annotations

import re
from collections.abc import Iterable


def undocumented(names: Iterable[str], doc_text: str) -> list[str]:
    """Metric names that the document does not define, sorted.

    A name in back-ticks is defined; a part in braces matches one word: `refused/{reason}` defines
    refused/mask_rows.
    """
    patterns = [_name_pattern(name) for name in set(re.findall(r"`([^`\s]+)`", doc_text))]
    return sorted(name for name in set(names) if not any(p.fullmatch(name) for p in patterns))


def _name_pattern(documented: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", documented)
    return re.compile(r"[A-Za-z0-9_.\-]+".join(re.escape(part) for part in parts))
