"""A pytest plug-in that writes file and marks of every collected test, for test_stages.py.

MARKS_FILE=OUT python -m pytest --collect-only -p tests.helpers.collected_marks
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    found = [
        (str(item.path.relative_to(session.config.rootpath)), [m.name for m in item.iter_markers()])
        for item in session.items
    ]
    Path(os.environ["MARKS_FILE"]).write_text(json.dumps(found))
