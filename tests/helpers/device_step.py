"""Gradients and metrics of one step on the CPU, for a device to be compared with.

    python -m tests.helpers.device_step FILE

A tiny MoE in fp32 with megatron-core's local layers and both replays; the file holds the weights,
their gradients, and the metrics of the step.  CUDA must be hidden from the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.helpers.device_trainer import TINY, gradients_of, make_learner, make_plan


def main(file: Path) -> None:
    learner = make_learner(TINY, file.parent / "cpu", dtype="fp32", where="cpu")
    plan = make_plan(TINY, learner)
    named = learner.model.gpt.named_parameters()
    weights = {name: parameter.detach().clone() for name, parameter in named}
    gradients = gradients_of(learner, plan)
    torch.save(
        {"weights": weights, "gradients": gradients, "metrics": learner.step(plan)},
        file,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
