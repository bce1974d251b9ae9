"""One run of TRL's GRPOTrainer on a model folder, for `against_trl.py`; TRL's own environment.

    build/reference/bin/python bench/trl_grpo.py JOB.json

JOB: model, prompts (a JSONL file of prompt and answer), out, steps, groups, group_size, max_tokens,
temperature, top_p, top_k, lr, warmup, seed.  Writes a line per step to `out`: seconds since the
trainer began, mean reward.  Generation is transformers', as TRL does it without a server.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if "--help" in sys.argv:  # before the packages of the reference environment
    sys.exit(print(__doc__))

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def right_positions(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Share of characters that stand where the answer has them, as in the task sort_digits."""
    return [
        sum(a == b for a, b in zip(text, want, strict=False)) / max(len(text), len(want), 1)
        for text, want in zip(completions, answer, strict=True)
    ]


class Keep(TrainerCallback):  # type: ignore[misc]
    """Writes what TRL logs after each step."""

    def __init__(self, out: Path) -> None:
        self.begin, self._out = time.monotonic(), out

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" not in logs:
            return
        row = {"seconds": time.monotonic() - self.begin, "reward": logs["reward"]}
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = Path(job["prompts"]).read_text(encoding="utf-8").splitlines()
    samples = job["groups"] * job["group_size"]
    config = GRPOConfig(
        output_dir=str(Path(job["out"]).with_suffix(".trl")),
        per_device_train_batch_size=samples,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        top_p=job["top_p"],
        top_k=job["top_k"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup"],
        beta=0.0,
        max_steps=job["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=right_positions,
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[Keep(Path(job["out"]))],
    )
    trainer.train()


if __name__ == "__main__":
    main()
