"""Encoding of messages and stored values: msgpack by msgspec, no pickle.

A message is wrapped in an envelope with its class name, from an explicit registry.  Arrays are
[dtype, shape, bytes], booleans bits.  A plan contains the prompt of a group once (`_cut`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import msgspec
import numpy as np

from moerl.core.errors import ProtocolError
from moerl.core.messages import Message, Plan, SamePlan
from moerl.core.types import Array, BatchPlan, EpisodeGroup

_Change = Callable[[Array, int, Array], Array]

_TYPES: dict[str, type] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    """A plan of thousands of rollouts takes long: call this in a thread."""
    return _ENCODER.encode((type(message).__name__, _with_plans(message, _cut)))


def decode(data: bytes) -> Message:
    """Raises ProtocolError for an unknown or malformed message."""
    try:
        name, body = _ENVELOPE.decode(data)
        return _with_plans(_DECODERS[name].decode(body), _join)
    except (msgspec.MsgspecError, LookupError, ValueError, TypeError) as error:
        raise ProtocolError(f"unreadable message: {error}") from error


def _with_plans(message: Message, change: _Change) -> Message:
    """The message with other `token_ids` in its plans, see `_with_turns`."""
    if isinstance(message, Plan | SamePlan) and message.ahead is not None:
        message = replace(message, ahead=_with_groups(message.ahead, change))
    if isinstance(message, Plan):
        message = replace(message, plan=_with_groups(message.plan, change))
    return message


def _with_groups(plan: BatchPlan, change: _Change) -> BatchPlan:
    return replace(plan, groups=tuple(_with_turns(group, change) for group in plan.groups))


def _with_turns(group: EpisodeGroup, change: _Change) -> EpisodeGroup:
    """The group with other `token_ids`: change(own, full length, prefix of the row)."""
    prompt = np.asarray(group.prompt.token_ids, np.int32)
    episodes = []
    for episode in group.episodes:
        whole: list[Array] = []  # of each row, before `_cut` or after `_join`
        turns = []
        for turn in episode.turns:
            rollout = turn.rollout
            before = whole[turn.parents[-1]] if turn.parents else prompt
            tokens = change(rollout.token_ids, len(rollout.loss_mask), before)
            whole.append(max(rollout.token_ids, tokens, key=len))
            turns.append(replace(turn, rollout=replace(rollout, token_ids=tokens)))
        episodes.append(replace(episode, turns=tuple(turns)))
    return replace(group, episodes=tuple(episodes))


def _cut(tokens: Array, _length: int, before: Array) -> Array:
    """Drop the leading tokens that the prompt or the row before has."""
    known = len(before)
    return tokens[known:] if np.array_equal(tokens[:known], before) else tokens


def _join(tokens: Array, length: int, before: Array) -> Array:
    """Raises ProtocolError when the missing tokens are not exactly the prefix."""
    missing = length - len(tokens)
    if missing not in (0, len(before)):
        raise ProtocolError(f"a row of {length} tokens has {len(tokens)} and {len(before)} before")
    return np.concatenate([before, tokens]) if missing else tokens


def encode_value(value: Any) -> bytes:
    """Msgpack of any dataclass of `moerl.core.types` (blobs of the journal, kept records)."""
    return _ENCODER.encode(value)


def decode_value(data: bytes, type_: type) -> Any:
    return msgspec.msgpack.decode(data, type=type_, dec_hook=_dec_hook)


def _enc_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.bool_:
        return (value.dtype.str, value.shape, np.packbits(value).tobytes())
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} is not a wire type")


def _dec_hook(type_: type, value: Any) -> Any:
    if type_ is np.ndarray:
        dtype, shape, data = value
        if dtype == _BITS:
            return _unpack(np.frombuffer(data, np.uint8), math.prod(shape)).reshape(shape)
        return np.frombuffer(data, dtype).reshape(shape)
    raise NotImplementedError(f"{type_} is not a wire type")


def _unpack(packed: Array, count: int) -> Array:
    if len(packed) != -(-count // 8):
        raise ValueError(f"{len(packed)} bytes for {count} bits")
    return np.unpackbits(packed, count=count).view(np.bool_)


_BITS = np.dtype(np.bool_).str
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_ENVELOPE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(cls, dec_hook=_dec_hook) for name, cls in _TYPES.items()
}
