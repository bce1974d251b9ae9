"""Errors that a user can act on.

Every error here is one sentence that names the fault, the value found, and the allowed values.  A
user's mistake is a `ConfigError`; data that breaks the record contract is a `RecordError`; a failed
process or endpoint is an `EngineError` or `TrainerError`; a tensor that cannot be placed is a
`LayoutError`.  Invariants inside the program are `assert`s.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MoerlError(Exception):
    """Base of errors that are shown as one sentence, without a traceback."""


class ConfigError(MoerlError):
    """A setting that cannot work: names the field, the value and the allowed values."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"{field} = {value!r} is not usable: {allowed}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return ConfigError, (self.field, self.value, self.allowed)

    def under(self, field: str) -> ConfigError:
        """The same mistake under another name of the setting."""
        return ConfigError(field, self.value, self.allowed)


class LineError(ConfigError):
    """One unusable line of user data; the run continues with the next.

    kind: a few words by which lines are counted, such as "no answer".
    """

    def __init__(self, field: str, value: object, allowed: str, kind: str) -> None:
        self.kind = kind
        super().__init__(field, value, allowed)

    def __reduce__(self) -> tuple[type[LineError], tuple[str, object, str, str]]:  # type: ignore[override]
        return LineError, (self.field, self.value, self.allowed, self.kind)

    def under(self, field: str) -> LineError:
        return LineError(field, self.value, self.allowed, self.kind)


class RecordError(MoerlError):
    """A record from an engine that breaks the contract; `reason` is a short stable key.

    Metrics count refusals by the key (`refused/{reason}`); the detail is for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"record refused ({reason}): {detail}")

    def __reduce__(self) -> tuple[type[RecordError], tuple[str, str]]:
        return RecordError, (self.reason, self.detail)


class StreamError(MoerlError):
    """A stream of a run that is not as it was written; `step` is -1 where none can be named."""

    def __init__(self, detail: str, step: int = -1) -> None:
        self.step = step
        super().__init__(detail)


class LayoutError(MoerlError):
    """A tensor that no rule covers, or a tile that cannot be placed; names the tensor."""


class ModelError(MoerlError):
    """A model folder that cannot be used: names the folder or tensor and the fault."""


class BlobError(MoerlError):
    """A sealed blob that is missing, truncated or does not match its digest.

    `uri` names a damaged blob; it is empty when the blob is missing or its node does not answer.
    """

    def __init__(self, detail: str, uri: str = "") -> None:
        self.uri = uri
        super().__init__(detail)

    def __reduce__(self) -> tuple[type[BlobError], tuple[str, str]]:
        return BlobError, (str(self), self.uri)


class JournalError(MoerlError):
    """The journal could not be written: the disk is full or failing."""


class EngineError(MoerlError):
    """An engine that failed to start, to answer or to update; carries the cause it logged."""


class DaemonError(EngineError):
    """A daemon of Ray died on the controller's node: the command resumes the run once."""


class AnswerError(EngineError):
    """An engine's server lives, and has answered a request with something else than a reply."""


class TrainerError(MoerlError):
    """The trainer failed; carries the first rank's cause."""


class NonRetryableError(TrainerError):
    """A fault of the trainer that a restart would meet again: a full disk, weights that are not
    finite, a model that cannot be written.  The run ends.
    """


class ScoreError(MoerlError):
    """A reward that raised, timed out or was not finite."""


class ScorerDown(ScoreError):
    """A scorer that did not answer: its requests may be repeated.

    wait_s: seconds until the next request, by the scorer's wish; 0 = none.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        super().__init__(text)

    def __reduce__(self) -> tuple[type[ScorerDown], tuple[str, float]]:
        return ScorerDown, (str(self), self.wait_s)


class TransportError(MoerlError):
    """A failed transfer; `reason` is a short stable key by which failures are counted.

    Keys: deadline, peer (dead or unreachable), range (outside the buffer), refused (not permitted),
    missing (a library or file), room (no memory or disk).
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"transfer failed ({reason}): {detail}")

    def __reduce__(self) -> tuple[type[TransportError], tuple[str, str]]:
        return TransportError, (self.reason, self.detail)


class ProtocolError(MoerlError):
    """A message between trainer and controller that was late, unknown or out of order."""


def cause_of(error: BaseException) -> str:
    """One sentence for the user: our own errors unchanged, others with their type; then notes."""
    text = str(error) if isinstance(error, MoerlError) else f"{type(error).__name__}: {error}"
    return "; ".join((text, *getattr(error, "__notes__", ())))


def nearest(name: str, known: Iterable[str], before: str = "") -> str:
    """`; did you mean A, B`, nearest first, or nothing.  before: text in front of each name."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {', '.join(before + one for one in near)}" if near else ""


def printable(text: object) -> str:
    """For a terminal: causes hold text of others, and control characters could move its cursor."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))
