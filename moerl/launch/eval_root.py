"""Root process of `moerl eval` for one model: `python -m moerl.launch.eval_root REQUEST`.

It is the root of a run (`moerl.launch.train`) with the same engines, scorers and controller, and
without a trainer.  The findings go to a file, progress to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from moerl.config import Config
from moerl.core.atomic import atomic_write
from moerl.core.errors import ConfigError, MoerlError, cause_of
from moerl.launch.eval_settings import evaluated
from moerl.launch.line_checks import line_checks
from moerl.launch.model_folders import with_one_model
from moerl.launch.train import own_output, prepare, set_ray_environment
from moerl.observe.console import Console
from moerl.runtime.process_tree import (
    STOP_GRACE_S,
    Interrupted,
    SignalWatch,
    end_descendants,
    leave,
    run_command,
)
from moerl.runtime.run_dir import RunDir


def main() -> None:
    request = json.loads(sys.argv[1])
    scratch = Path(request.pop("scratch"))
    out, keep = Path(request.pop("out")), request.pop("keep")
    run = RunDir(Path(keep or scratch / "run"))
    config = evaluated(**request, folder=run.root)
    set_ray_environment(config)
    run.create()
    logging.basicConfig(filename=run.logs / "root.log", level=logging.INFO)
    try:
        with own_output(run) as (_, err):
            found = _evaluate(config, run, scratch, err)
    except Interrupted:
        raise KeyboardInterrupt from None
    except ConfigError:
        raise
    except Exception as error:
        logging.exception("the evaluation failed")
        hint = "" if keep else "; --keep DIR keeps the logs"
        raise MoerlError(f"{cause_of(error)}{hint}") from error
    atomic_write(out, json.dumps(found), mode=0o600)


def _evaluate(config: Config, run: RunDir, scratch: Path, err: IO[str]) -> dict[str, Any]:
    from moerl.launch.supervision.supervisor import Supervisor

    model = config.checkpoint.start or config.lora.start or config.model.path or "the tiny model"
    print(f"moerl: evaluating {model}", file=err)
    context = prepare(with_one_model(config, run), run, resume=False)
    try:
        lines = line_checks(context.config, context.tokenizer(), context.spec().max_positions)
        lines.begin(lambda line: print("moerl:", line, file=err))
        mode = "quiet" if config.run.console == "quiet" else "lines"
        console, signals = Console(mode, config.run.steps, err), SignalWatch(_end_at_once)
        context = replace(context, scratch=scratch)
        metrics, prompts = Supervisor(context, console, scratch, signals).evaluate()
    finally:
        end_descendants(STOP_GRACE_S)
        for folder in (context.journal_folder, context.blob_dir):
            shutil.rmtree(folder, ignore_errors=True)
    return {"model": model, "metrics": metrics, "prompts": prompts}


def _end_at_once() -> None:
    """A signal came and the main thread hangs.  Called in another thread."""
    end_descendants(STOP_GRACE_S)
    os._exit(130)


if __name__ == "__main__":
    leave(lambda: run_command(main))
