"""The dry run counts what megatron-core builds: ranks of the recipes, on meta tensors.

Layers are megatron-core's own; test_gpu_profile.py builds the same ranks with Transformer Engine.
"""

from __future__ import annotations

import pytest

from moerl.config import load_config
from moerl.config.load import CONFIG_ROOT
from moerl.config.schema import Config
from tests.helpers.meta_ranks import ADAPTED, CASES, check, ranks

NODE8 = "cluster=node8"


def test_a_rank_of_qwen3_30b_is_what_the_dry_run_says() -> None:
    """Control: a figure of the dry run that is off by one does not pass."""
    (found,) = ranks("local", "qwen3-30b-a3b-node8", NODE8, numbers="0")
    check(found)
    for name in ("parameters", "weights", "gradients", "offloaded"):
        with pytest.raises(AssertionError):
            check(found._replace(told=found.told | {name: found.told[name] + 1}))


@pytest.mark.full
def test_every_recipe_of_a_released_model_is_a_case() -> None:
    """Recipes with the model and the trainer of another one need no ranks of their own."""

    def trains(config: Config) -> tuple[object, ...]:
        trainer = config.trainer
        return config.model.path, trainer.parallel, trainer.optimizer_args, config.lora

    cases = {**CASES, **ADAPTED}
    built = [trains(load_config(recipe, words)) for recipe, words in cases.items()]
    recipes = [load_config(path.stem) for path in (CONFIG_ROOT / "recipes").glob("*.yaml")]
    for_gpus = [config for config in recipes if config.trainer.platform == "cuda"]
    assert len(for_gpus) > len(cases)
    assert [config.model.path for config in for_gpus if trains(config) not in built] == []


@pytest.mark.full
@pytest.mark.parametrize("recipe", CASES)
def test_first_and_last_ranks_are_what_the_dry_run_says(recipe: str) -> None:
    for found in ranks("local", recipe, *CASES[recipe]):
        check(found)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ADAPTED)
@pytest.mark.parametrize("layers", ["local", "stand-in"])
def test_adapters_are_what_the_dry_run_says(recipe: str, layers: str) -> None:
    """Weights, gradients and optimizer of the factors, W0 on the host, of each kind of stage.

    stand-in: megatron-core's layers of Transformer Engine, over a stand-in for it.
    Controls: without the factors' bytes; with gradients of all weights.
    """
    for found in ranks(layers, recipe, *ADAPTED[recipe]):
        check(found)
        assert bool(found.built["fused"]) == (layers == "stand-in")
        told = found.told
        for name, other in (("base", 0), ("gradients", 4 * told["parameters"])):
            with pytest.raises(AssertionError):
                check(found._replace(told=told | {name: other}))
