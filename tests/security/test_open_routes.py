"""Without the token, SGLang's own decision opens three routes of a server and no other."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest

from moerl.engine.plugin.server_access import decide


@pytest.fixture(scope="module")
def auth() -> dict[str, Any]:
    """The file alone: its package would take seconds to import."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).parent / "srt/utils/auth.py"), run_name="auth")


@pytest.mark.parametrize(
    ("path", "by_sglang", "by_us"),
    [
        ("/health", True, True),
        ("/ready", True, True),
        ("/metrics", True, True),
        ("/health_generate", True, False),
        ("/metrics2", True, False),
        ("/generate", False, False),
    ],
)
def test_only_whole_names_are_open(
    auth: dict[str, Any], path: str, by_sglang: bool, by_us: bool
) -> None:
    original = auth["decide_request_auth"]
    request = dict.fromkeys(("api_key", "admin_api_key"), "token") | {
        "method": "GET",
        "path": path,
        "auth_level": auth["AuthLevel"].NORMAL,
    }
    stranger, known = (request | {"authorization_header": h} for h in (None, "Bearer token"))
    assert original(**stranger).allowed == by_sglang
    assert decide(original, **stranger).allowed == by_us  # type: ignore[attr-defined]
    assert decide(original, **known).allowed  # type: ignore[attr-defined]
