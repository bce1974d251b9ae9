"""Each fusion that is on by default on CUDA, against the same model without it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.device_figures import Figure, on_double
from tests.helpers.device_trainer import (
    TINY,
    differs_by,
    gradients_of,
    make_learner,
    make_plan,
    seconds_of,
)

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner

_CORE = "megatron.core."
# Fusion -> what it calls: a comparison of two unfused passes would prove nothing.
CALLS = {
    "bias_activation_fusion": (
        ("transformer.mlp", "weighted_bias_swiglu_impl"),
        ("transformer.moe.experts", "weighted_bias_swiglu_impl"),
    ),
    "bias_dropout_fusion": (("fusions.fused_bias_dropout", "bias_dropout_add_fused_train"),),
    "apply_rope_fusion": (
        ("models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb"),
        ("models.common.embeddings.rope_utils", "fused_apply_rotary_pos_emb_thd"),
    ),
    "moe_permute_fusion": (
        ("transformer.moe.moe_utils", "fused_permute"),
        ("transformer.moe.moe_utils", "fused_permute_with_probs"),
        ("transformer.moe.moe_utils", "fused_permute_and_pad_with_probs"),
    ),
}
NEED_TE = ("apply_rope_fusion", "moe_permute_fusion")
# Of a tensor's largest gradient, in fp32.  Transformer Engine's products round to TF32, on both
# sides alike, and carry a difference on; routes of other tokens give more than 0.1.
BOUND, BOUND_TE = 1e-5, 1e-3


@pytest.mark.parametrize("name", CALLS)
def test_fusion_agrees(
    name: str, tmp_path: Path, figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a batch with both replays, and the time of a step with and without it."""
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if name in NEED_TE and not has_te:
        pytest.skip("Transformer Engine is not installed")
    learner = make_learner(TINY, tmp_path, dtype="fp32", layers="te" if has_te else "local")
    plan, calls = make_plan(TINY, learner), counted(name, monkeypatch)
    found, seconds = {}, {}
    for value in (False, True):
        set_field(learner, name, value)
        before = len(calls)
        found[value] = gradients_of(learner, plan)
        assert (len(calls) > before) is value, f"{name} = {value}: {len(calls) - before} calls"
    worst = differs_by(found[True], found[False])
    figure(f"{name}, gradients differ by", worst, "of a tensor's largest")
    assert worst <= (BOUND_TE if has_te else BOUND)
    if not on_double():  # after the comparison: a step moves the weights
        for value in (False, True):
            set_field(learner, name, value)
            seconds_of(learner, plan, 1)
            seconds[value] = seconds_of(learner, plan, 3)[0]
        figure(f"{name}, a step without / with", seconds[False] / seconds[True], "x")


def counted(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one with each call of a fused function."""
    calls: list[str] = []
    for place, function in CALLS[name]:
        module = importlib.import_module(_CORE + place)
        fused = getattr(module, function, None)
        if fused is None:
            continue

        def spy(*args: Any, fused: Any = fused, **kwargs: Any) -> Any:
            calls.append(name)
            return fused(*args, **kwargs)

        monkeypatch.setattr(module, function, spy)
    return calls


def set_field(learner: Learner, name: str, value: bool) -> None:
    """In every copy of the configuration; modules read it at each call."""
    owners = list(learner.model.gpt.modules())
    owners += [one.token_dispatcher for one in owners if hasattr(one, "token_dispatcher")]
    configs = {id(one.config): one.config for one in owners if hasattr(one, "config")}
    held = [config for config in configs.values() if hasattr(config, name)]
    assert held, f"no module has {name}"
    for config in held:
        setattr(config, name, value)
