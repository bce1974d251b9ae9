"""SkyRL 0.4's projection onto kept vocabulary rows, from its wheel, for `head_logprob.py`.

Of the wheel only `sample_support_replay` and what it imports is loaded: its packages' own
`__init__` files want other environments.  The wheel is for Python 3.12; these modules run on 3.11:

    pip download --no-deps --python-version 3.12 --only-binary=:all: -d build/wheels skyrl==0.4.0
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.utils",
    "skyrl.backends.skyrl_train.distributed",
    "skyrl.backends.skyrl_train.distributed.megatron",
)
_CHUNK = 1024  # its default, `trainer.logprobs_chunk_size`


@cache
def _scores() -> Any:
    wheel = os.environ["SKYRL_WHEEL"]  # of head_logprob.py
    for name in _PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
    found = importlib.import_module("skyrl.backends.skyrl_train.utils.sample_support_replay")
    return found.sample_support_scores


def support_of(offsets: Tensor, ids: Tensor) -> Tensor:
    """Sampling masks as SkyRL keeps them: [tokens, largest mask] i32, -1 behind the last."""
    counts = offsets.diff()
    support = torch.full((len(counts), int(counts.max())), -1, dtype=torch.int32)
    support[torch.arange(support.shape[1]) < counts[:, None]] = ids.int()
    return support


def logprobs(
    hidden: Tensor, weight: Tensor, sampled: Tensor, support: Tensor, temperature: float
) -> Tensor:
    """[tokens] fp32."""
    scores = _scores()(
        hidden,
        sampled.to(hidden.device),
        support.to(hidden.device),
        vocab_start_index=0,
        vocab_end_index=len(weight),
        tp_group=None,
        lm_head_weight=weight,
        temperature=temperature,
        chunk_size=_CHUNK,
    )
    found: Tensor = scores.logprobs
    return found
