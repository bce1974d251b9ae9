"""Errors of the gateway in OpenAI's form: a status, a code and one sentence."""

from __future__ import annotations

from typing import Literal

Code = Literal[
    "invalid_api_key",
    "invalid_request",
    "invalid_messages",
    "invalid_prompt",
    "invalid_grammar",
    "unsupported_parameter",
    "request_too_large",
    "request_too_slow",
    "context_length_exceeded",
    "turn_limit_exceeded",
    "token_limit_exceeded",
    "episode_ended",
    "engine_unavailable",
    "model_not_found",
    "other_model_failed",
    "record_refused",
    "internal_error",
    "not_found",
]


class ApiError(Exception):
    """One sentence, a status and a code.  OpenAI's client asks again after 408, 409, 429 and 5xx,
    unless `retry` is False.
    """

    def __init__(self, status: int, code: Code, message: str, *, retry: bool = True) -> None:
        self.status, self.code, self.message, self.retry = status, code, message, retry
        super().__init__(message)

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 401:
            kind = "authentication_error"
        return {
            "error": {"message": self.message, "type": kind, "param": None, "code": self.code},
        }

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry else {"x-should-retry": "false"}


def unsupported(message: str) -> ApiError:
    """A field or value that the gateway does not take; asking again does not help."""
    return ApiError(400, "unsupported_parameter", message, retry=False)
