"""The passes of `moerl mismatch` on the double: the CPU's numbers, and no wait per layer or row."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.double.other_models import SOUND_VARIANTS, audit
from tests.double.train_once import Numbers, Tensors, Trained, largest_difference
from tests.double.watch import PAGEABLE, WAITS, watch

pytest_plugins = ("tests.double.trainer_fixtures",)

VARIANTS = len(SOUND_VARIANTS) + 2
# In a microbatch: ids and margins of the live pass, executed experts of three replayed ones; scores
# of each variant.
PER_MICROBATCH = {
    "moerl/algorithms/device_copies.py": 5,
    "moerl/audit/score_ranks.py": VARIANTS,
}


def of_variant(found: Numbers, variant: str) -> Tensors:
    return {n.partition("/")[2]: t for n, t in found["logprobs"].items() if n.startswith(variant)}


def test_scores_are_those_of_the_cpu(trained: Trained, folder: Path, on_cpu: Numbers) -> None:
    with watch() as seen:
        found = audit(trained, folder)
    want = on_cpu["audit"]
    assert largest_difference(found["logprobs"], want["logprobs"]) == 0
    assert largest_difference(found["pairs"], want["pairs"]) == 0
    assert torch.equal(found["margins"], want["margins"])
    assert found["counts"] == want["counts"]
    assert found["counts"]["executed"] == found["counts"]["slots"]
    both = of_variant(found, "both/")
    for control in ("both_rotated/", "both_prompt_live/", "routing/", "mask/"):
        assert largest_difference(of_variant(found, control), both) > 1e-3, control
    num = trained.plan.num_microbatches
    loading = ("moerl/trainer/hf_io", "moerl/trainer/model/gpt.py")
    own = {f: n for f, n in seen.own_files(*WAITS).items() if not f.startswith(loading)}
    pageable = {f: n for f, n in seen.own_files(PAGEABLE).items() if not f.startswith(loading)}
    print("waits:", own, "pageable:", pageable)
    assert own == {file: times * num for file, times in PER_MICROBATCH.items()}
    assert not pageable
