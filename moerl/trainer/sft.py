"""One rank of a supervised run, started by torchrun from `moerl sft`:

    torchrun ... -m moerl.trainer.sft --run-dir runs/X

The learner of reinforcement learning with advantage 1 and no ratio: its policy term is then the
mean negative log-likelihood of the answers' tokens.  With `sft.value_head` the critic is trained
instead, towards the labels of steps.  Nothing is replayed, routers are live.  Every rank derives
the same plans.  Rank 0 prints one JSON object per step and the trained model is saved in runs/X/hf,
adapters in runs/X/adapter/peft too; no checkpoint is written, as a warm start is short.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from moerl.config.load import load_saved
from moerl.config.schema import AlgorithmConfig, Config, RefModelsConfig, ReplayConfig
from moerl.config.task_mixture import entries_of
from moerl.core.errors import LineError, MoerlError
from moerl.core.types import Prompt
from moerl.data.batching import pair_cost
from moerl.data.demonstrations import AnswerEnd, demonstration_plan
from moerl.data.tasks import PromptMixture, load_tokenizer, usable
from moerl.data.value_rows import labelled_row, learnable, value_plan
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.trainer.model import platform

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.learner.bad_steps import BadSteps
    from moerl.trainer.model.gpt import Model
    from moerl.trainer.model.parallel import Parallel

STEP = "STEP "  # prefix of rank 0's line with a step's metrics
_KEPT = ("loss/grad_norm", "loss/lr", "loss/entropy", "loss/skip", "loss/tokens", "perf/")


def supervised(config: Config) -> Config:
    """The same settings with the supervised loss in place of the algorithm, and no replay."""
    algorithm = AlgorithmConfig(advantage="reward", objective="reinforce", aggregation="token_mean")
    off = ReplayConfig(routing="off", sampling_mask=False)
    trainer = replace(config.trainer, minibatches=1)  # a batch is one optimizer step
    ref_models = RefModelsConfig()  # neither a reference nor a teacher is read
    lora = replace(config.lora, send="weights", delivery="merged")  # to none: no engine is asked
    changed = replace(config, algorithm=algorithm, replay=off, trainer=trainer, lora=lora)
    return replace(changed, ref_models=ref_models)


def main() -> None:
    parser = argparse.ArgumentParser(description="supervised training of one rank")
    parser.add_argument("--run-dir", type=Path, required=True, help="runs/NAME, with config.yaml")
    run = RunDir(parser.parse_args().run_dir)
    warnings.filterwarnings("ignore")  # megatron names every optional package it lacks
    try:
        _train(supervised(load_saved(run.config)), run)
    except MoerlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # peers may hang in a collective: torchrun ends them


def _train(config: Config, run: RunDir) -> None:
    place = platform.prepare(
        config.trainer.platform,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        impl=config.trainer.transformer_impl,
    )
    torch.set_num_threads(platform.rank_threads(config.trainer, place))
    # `prepare` must run before any import of megatron
    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.model import parallel

    trainer, kind = config.trainer, config.sft.value_head
    ranks = parallel.start(trainer.parallel, place, timeout_s=trainer.step_timeout_s)
    torch.manual_seed(config.run.seed)
    source, store = HfFolder(config.model.path), BlobStore(run.root / "blobs", "none")
    tokenizer = load_tokenizer(config.model.path)
    stream = PromptMixture(entries_of(config), tokenizer, config.run.seed)
    make = _answers_trainee if kind == "off" else _values_trainee
    rows = _row_settings(config, source, ranks, stream, tokenizer)
    trainee = make(config, source, ranks, store, rows)
    if ranks.is_first:
        trainee.bad.report = lambda bad: print(bad.text, file=sys.stderr, flush=True)
    prompts = _usable_prompts(stream, kind, shows=ranks.is_first)
    for step in range(config.run.steps):
        metrics = trainee.train(step, list(islice(prompts, config.rollout.groups_per_step)))
        if ranks.is_first:
            print(STEP + json.dumps(metrics), flush=True)
    _save(trainee.model, config, run, source, ranks)
    dist.barrier(ranks.control)
    parallel.stop()


class _RowSettings(NamedTuple):
    """How prompts with answers become rows of a plan."""

    encode: Callable[[str], list[int]]
    end: AnswerEnd
    cut: dict[str, Any]  # arguments that cut a batch into microbatches


class _Trainee(NamedTuple):
    """A model in training on one rank.  train: one batch, by step and prompts; its metrics."""

    model: Model
    bad: BadSteps
    train: Callable[[int, Sequence[Prompt]], dict[str, float]]


def _row_settings(
    config: Config,
    source: HfFolder,
    ranks: Parallel,
    stream: PromptMixture,
    tokenizer: Tokenizer,
) -> _RowSettings:
    templates = {entry.label: one.template for entry, one in stream.streams}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    cut = {
        "dp_size": ranks.dp_size,
        "max_tokens_per_microbatch": config.trainer.max_tokens_per_microbatch,
        "pair": pair_cost(source.spec),
    }
    return _RowSettings(encode, AnswerEnd(tokenizer, templates), cut)


def _answers_trainee(
    config: Config, source: HfFolder, ranks: Parallel, store: BlobStore, rows: _RowSettings
) -> _Trainee:
    """The model learns the tokens of the answers."""
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.policy_model import load_policy

    learner = Learner(load_policy(config, source, ranks), ranks, config, store)

    def train(step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        plan = demonstration_plan(step, prompts, rows.encode, rows.end.of, **rows.cut)
        metrics = learner.step(plan)
        kept = {name: value for name, value in metrics.items() if name.startswith(_KEPT)}
        return {"loss/nll": metrics["loss/pg"]} | kept

    return _Trainee(learner.model, learner.bad, train)


def _values_trainee(
    config: Config, _: HfFolder, ranks: Parallel, store: BlobStore, rows: _RowSettings
) -> _Trainee:
    """A value head learns the labels of steps, and the model below it."""
    from moerl.algorithms.loss import bce_loss, value_loss
    from moerl.trainer.learner.critic import Critic

    loss = bce_loss if config.sft.value_head == "bce" else value_loss
    rate = config.trainer.optimizer.lr
    critic = Critic(config, ranks, store, loss=loss, bias=True, lr=rate)

    def train(step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        labelled = [labelled_row(prompt, rows.encode, rows.end.of(prompt)) for prompt in prompts]
        plan = value_plan([row for row, _ in labelled], step=step, **rows.cut)
        return critic.fit(plan, [labelled[place.group][1] for place in plan.rows])

    return _Trainee(critic.model, critic.bad, train)


def _usable_prompts(stream: PromptMixture, kind: str, *, shows: bool) -> Iterator[Prompt]:
    """Prompts of the task that have an answer, in order.  shows: print lines that are set aside."""
    check = learnable(kind)

    def drawn(index: int) -> Prompt:
        try:
            return check(stream.prompt(index))
        except LineError as error:
            if shows:
                print(f"set aside: {error}", file=sys.stderr, flush=True)
            raise

    return usable(drawn)


def _save(model: Model, config: Config, run: RunDir, source: HfFolder, ranks: Parallel) -> None:
    """Write runs/NAME/hf, and the adapters of LoRA; collective."""
    from moerl.trainer.hf_io.hf_save import value_config
    from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
    from moerl.trainer.policy_model import save_live_adapters

    kind, lora = config.sft.value_head, config.lora
    held = every_rank(model.spec, ranks.sizes, ranks.platform.layers)
    group = RankGroup(ranks.rank, ranks.control)
    form = None if kind == "off" else value_config(source.config, kind)
    HfShards(lambda: model.tensors, held, group, source.path, config=form).save(run.hf)
    if model.adapters:
        served = run.served_adapter
        save_live_adapters(run.adapter, model, lora, ranks, source.path, served=served)


if __name__ == "__main__":
    main()
