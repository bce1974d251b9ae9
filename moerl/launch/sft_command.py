"""`moerl sft`: supervised training on a task's answers, for a warm start.

No Ray, no engine: one trainer through torchrun; each step is a row of metrics.jsonl.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

from moerl.config import Config, load_config, save_config
from moerl.config.task_mixture import entries_of
from moerl.core.errors import TrainerError
from moerl.data.tasks import PromptMixture
from moerl.data.value_rows import learnable
from moerl.distributed.torchrun import TorchrunJob
from moerl.launch.line_checks import LineChecks
from moerl.launch.run_context import RunContext, supervised_command, trainer_environment
from moerl.launch.train import prepare
from moerl.observe.metrics import MetricsWriter
from moerl.runtime.process_tree import run_command
from moerl.runtime.run_dir import RunDir
from moerl.trainer.sft import STEP, supervised


def sft(config: Config) -> RunDir:
    """Train all steps; returns the run directory, with the model in hf/.  Raises MoerlError."""
    run = RunDir(Path(config.run.root) / config.run.name)
    run.create()
    context = prepare(supervised(config), run, resume=False)
    stream = PromptMixture(entries_of(config), context.tokenizer(), config.run.seed)
    lines = LineChecks([stream], learnable(config.sft.value_head))
    lines.begin(lambda line: print(f"moerl: {line}", file=sys.stderr, flush=True))
    save_config(context.config, run.config)
    log = run.logs / "trainer.log"
    writer = MetricsWriter(run.metrics)
    job = TorchrunJob(supervised_command(context), trainer_environment(context), log, pipe=True)
    with log.open("a", encoding="utf-8") as file:
        for line in io.TextIOWrapper(job.output, encoding="utf-8", errors="replace"):
            if line.startswith(STEP):
                _report(context, writer, json.loads(line.removeprefix(STEP)))
            else:
                file.write(line)
    writer.close()
    if job.wait():
        raise TrainerError(f"supervised training failed: {job.cause()}")
    return run


def _report(context: RunContext, writer: MetricsWriter, metrics: dict[str, float]) -> None:
    last = writer.last_step
    step = 0 if last is None else last + 1
    writer.write(step, f"0.{step + 1}", metrics)
    name = "nll" if "loss/nll" in metrics else "value"
    loss = f"{name} {metrics[f'loss/{name}']:.4f}"
    speed = metrics.get("perf/train_tokens_per_s")
    shown = "" if speed is None else f"  tok/s {speed:.0f}"
    print(f"step {step + 1}/{context.config.run.steps}  {loss}{shown}", flush=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    run = sft(load_config(request["recipe"], request["overrides"]))
    print(f"trained model  {run.hf}")


if __name__ == "__main__":
    sys.exit(run_command(main))
