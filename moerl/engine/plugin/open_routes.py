"""Which routes of SGLang's server answer without the run's token: `/health`, `/ready`, `/metrics`.

SGLang opens every path that begins with one of these names, so that probes need no secret.  One of
them, `/health_generate`, samples a token: any process that connects could keep an engine busy.
"""

from __future__ import annotations

from collections.abc import Callable

_OPEN = ("/health", "/ready", "/metrics")


def decide(original: Callable[..., object], *, path: str, **request: object) -> object:
    """SGLang's `decide_request_auth`, for a path that is open by its whole name only."""
    begins_alike = path.startswith(_OPEN) and path not in _OPEN
    return original(path=f"/closed{path}" if begins_alike else path, **request)
