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
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moerl.config.load import load_saved
from moerl.config.schema import AlgorithmConfig, Config, RefModelsConfig, ReplayConfig
from moerl.config.task_mixture import entries_of
from moerl.core.errors import LineError, MoerlError
from moerl.core.types import Prompt
from moerl.data.demonstrations import AnswerEnd, demonstration_plan
from moerl.data.prompt_mixture import PromptMixture, usable
from moerl.data.row_cost import pair_cost
from moerl.data.tasks import load_tokenizer
from moerl.data.value_rows import labelled_row, learnable, value_plan
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.trainer.model import platform

if TYPE_CHECKING:
    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.learner.step import Learner
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
        config.trainer.platform, local_rank=int(os.environ.get("LOCAL_RANK", "0"))
    )
    torch.set_num_threads(platform.rank_threads(config.trainer, place))
    # `prepare` must run before any import of megatron
    from moerl.algorithms.loss import bce_loss, value_loss
    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.hf_io.hf_save import value_config
    from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
    from moerl.trainer.learner.critic import Critic
    from moerl.trainer.live_adapters import save_live_adapters
    from moerl.trainer.model import parallel

    trainer, kind = config.trainer, config.sft.value_head
    ranks = parallel.start(trainer.parallel, place, timeout_s=trainer.step_timeout_s)
    torch.manual_seed(config.run.seed)
    source = HfFolder(config.model.path)
    store = BlobStore(run.root / "blobs", "none")
    tokenizer = load_tokenizer(config.model.path)
    stream = PromptMixture(entries_of(config), tokenizer, config.run.seed)
    templates = {entry.label: one.template for entry, one in stream.streams}
    encode = partial(tokenizer.encode, add_special_tokens=False)
    end = AnswerEnd(tokenizer, templates)
    cut: dict[str, Any] = {
        "dp_size": ranks.dp_size,
        "max_tokens_per_microbatch": trainer.max_tokens_per_microbatch,
        "pair": pair_cost(source.spec),
    }
    if kind == "off":
        learner = _learner(config, source, ranks, store)
        model, bad = learner.model, learner.bad
    else:
        loss = bce_loss if kind == "bce" else value_loss
        rate = trainer.optimizer.lr
        critic = Critic(config, ranks, store, loss=loss, bias=True, lr=rate)
        model, bad = critic.model, critic.bad
    if ranks.is_first:
        bad.report = lambda step: print(step.text, file=sys.stderr, flush=True)

    def train(step: int, prompts: Sequence[Prompt]) -> dict[str, float]:
        if kind == "off":
            metrics = learner.step(demonstration_plan(step, prompts, encode, end.of, **cut))
            kept = {name: value for name, value in metrics.items() if name.startswith(_KEPT)}
            return {"loss/nll": metrics["loss/pg"]} | kept
        rows = [labelled_row(prompt, encode, end.of(prompt)) for prompt in prompts]
        plan = value_plan([row for row, _ in rows], step=step, **cut)
        return critic.fit(plan, [rows[place.group][1] for place in plan.rows])

    check = learnable(kind)

    def drawn(index: int) -> Prompt:
        try:
            return check(stream.prompt(index))
        except LineError as error:
            if ranks.is_first:
                print(f"set aside: {error}", file=sys.stderr, flush=True)
            raise

    prompts = usable(drawn)
    for step in range(config.run.steps):
        metrics = train(step, list(islice(prompts, config.rollout.groups_per_step)))
        if ranks.is_first:
            print(STEP + json.dumps(metrics), flush=True)
    held = every_rank(model.spec, ranks.sizes, "te" if place.name == "cuda" else "local")
    group = RankGroup(ranks.rank, ranks.control)
    form = None if kind == "off" else value_config(source.config, kind)
    HfShards(lambda: model.tensors, held, group, source.path, config=form).save(run.hf)
    if model.adapters:
        lora, served = config.lora, run.served_adapter
        save_live_adapters(run.adapter, model, lora, ranks, source.path, served=served)
    dist.barrier(ranks.control)
    parallel.stop()


def _learner(config: Config, source: HfFolder, ranks: Parallel, store: BlobStore) -> Learner:
    from moerl.trainer.hf_io.adapter_files import start_factors
    from moerl.trainer.hf_io.hf_folder import load_hf
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.gpt import build

    model = build(
        source.spec,
        config.trainer,
        ranks,
        with_replay=False,
        lora=config.lora,
        fp32_head=config.model.fp32_lm_head,
    )
    load_hf(model.tensors, model.tiles, source)
    model.keep_base()
    if config.lora.start:
        model.set_factors(start_factors(config.lora, source))
    return Learner(model, ranks, config, store)


if __name__ == "__main__":
    main()
