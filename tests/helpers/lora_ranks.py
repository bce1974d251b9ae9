"""Worker of the LoRA tests: supervised steps on factors alone; rank 0 writes what it found.

    lora_ranks.py --model DIR --factors FILE --out FILE --settings JSON

settings: `parallel`, `lora`, `distributed` (optimizer), `megatron`, `packing`, `broken` (a
control); `load` and `save` (folders of checkpoints), `first` and `until` (steps), `adapter` (folder
of peft, to write), `dtype`, `scores`.  With `lora.start` the factors of FILE are not taken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moerl.trainer.model import platform
from tests.helpers.rank_server import PLATFORM

PLACE = platform.prepare(os.environ.get(PLATFORM, "cpu"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from moerl.config.lora_settings import LoraConfig  # noqa: E402
from moerl.config.schema import (  # noqa: E402
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
from moerl.core.types import PolicyVersion  # noqa: E402
from moerl.data.packing import by_row  # noqa: E402
from moerl.layout import at, hf_shapes  # noqa: E402
from moerl.layout.adapters import adapter_shapes  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.runtime.run_dir import RunDir  # noqa: E402
from moerl.runtime.trace import Tracer  # noqa: E402
from moerl.trainer.checkpoints import checkpoint  # noqa: E402
from moerl.trainer.checkpoints.checkpoint_writer import CheckpointWriter  # noqa: E402
from moerl.trainer.hf_io.adapter_files import gather_factors, note_base, save_adapter, start_factors  # noqa: E402  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.adapted_layers import GradientHook, GroupedHook  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.passes.schedule import Batches, score  # noqa: E402
from moerl.trainer.sft import supervised  # noqa: E402
from tests.helpers.lora_oracle import demonstrations  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.te_modules import LinearProduct  # noqa: E402

# factors that tp cuts, by the control that takes those of the other rank
OTHERS = {"other_a": "o_proj/lora_A", "other_b": ("q_proj/lora_B", "q_b_proj/lora_B")}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--factors", "--out", "--settings"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    settings = json.loads(options.settings)
    sizes = ParallelConfig(**settings["parallel"])
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    learner = make_learner(Path(options.model), ranks, settings)
    if not learner.config.lora.start:
        set_factors(learner, load_file(options.factors))
    break_on_purpose(learner, settings.get("broken", ""))
    base = frozen_sums(learner)
    scores = scored(learner) if settings.get("scores") else {}
    step = settings.get("first", 0)
    if settings.get("load"):
        path = Path(settings["load"]) / "checkpoints" / "step-000001"
        step = checkpoint.load(path, learner, ranks).version.step
    for index in range(step, settings.get("until", 1)):
        metrics = learner.step(demonstrations(sizes.dp, step=index))
        if settings.get("save") and index == 0:
            save(learner, Path(settings["save"]))
    if settings.get("adapter"):
        save_peft(learner, Path(settings["adapter"]), options.model)
    whole = not settings.get("broken")  # else the copies of a factor step by other gradients
    modules = [m for chunk in learner.model.chunks for m in chunk.gpt.modules()]
    params = [p for chunk in learner.model.chunks for p in chunk.gpt.parameters()]
    found: dict[str, object] = {
        **scores,
        "loss": metrics["loss/pg"],
        "norm": metrics["loss/grad_norm"],
        "values": gather(learner, lambda param: param.detach(), equal=whole),
        "base_unchanged": base == frozen_sums(learner),
        "buffered": sum(
            buffer.numel_unpadded for ddp in learner.ddp for buffer in all_buffers(ddp)
        ),
        "trained": sum(p.numel() for p in params if p.requires_grad),
        "adam": adam_elements(learner),
        "te_layers": sum(map(is_te_layer, modules)),
        "te_products": LinearProduct.weight_gradients,
    }
    if not settings.get("distributed"):  # there, a rank has the sum of its own shard only
        found["grads"] = gather(learner, lambda param: param.main_grad, equal=whole)
    if ranks.is_first:
        torch.save(found, options.out)
    dist.barrier()


def scored(learner: Learner) -> dict[str, Tensor]:
    """Log-probabilities of all answers, in the order of the plan's rows."""
    ranks, plan = learner.parallel, demonstrations(learner.parallel.dp_size)
    batches = Batches(plan, learner.config, ranks, learner.store)
    found = by_row(plan, ranks.dp_rank, score(learner.model, batches, Mode.OFF))
    return {"scores": torch.cat([torch.from_numpy(found[row]) for row in sorted(found)])}


def save(learner: Learner, folder: Path) -> None:
    run = RunDir(folder)
    if learner.parallel.is_first:
        run.create()
    tracer = Tracer(run.trace, "trainer")
    writer = CheckpointWriter(run, CheckpointConfig(), learner.parallel, tracer, 0)
    progress = checkpoint.Progress(PolicyVersion(0, 1), ((1, 3),))
    checkpoint.save(writer, learner, progress, learner.parallel)
    writer.finish()


def save_peft(learner: Learner, folder: Path, base: str) -> None:
    model, lora, ranks = learner.model, learner.config.lora, learner.parallel
    factors = gather_factors(model.factors(), model.spec, lora, ranks.sizes, ranks.control)
    if factors is not None:
        save_adapter(folder, factors, model.spec, lora, base)
        note_base(folder, Path(base))


def make_learner(folder: Path, ranks: parallel.Parallel, settings: dict[str, object]) -> Learner:
    optimizer = OptimizerConfig(
        lr=1e-2,
        min_lr=1e-2,
        eps=1e-4,
        clip_grad=0.0,
        distributed=bool(settings.get("distributed")),
    )
    trainer = TrainerConfig(
        parallel=ranks.sizes,
        dtype=settings.get("dtype", "fp32"),
        optimizer=optimizer,
        megatron=settings.get("megatron", {}),
        packing=bool(settings.get("packing")),
    )
    lora = LoraConfig(**settings["lora"])
    source = HfFolder(folder)
    model = build(source.spec, trainer, ranks, with_replay=False, lora=lora)
    load_hf(model.tensors, model.tiles, source)
    model.keep_base()
    if lora.start:
        model.set_factors(start_factors(lora, source))
    config = supervised(Config(model=ModelConfig(path=str(folder)), trainer=trainer, lora=lora))
    return Learner(model, ranks, config, BlobStore(Path("/nonexistent"), "none"))


def set_factors(learner: Learner, values: dict[str, Tensor]) -> None:
    for adapters in learner.model.adapters:
        adapters.set_factors(values)
    learner.optimizer.reload_model_params()


def break_on_purpose(learner: Learner, how: str) -> None:
    """A mistake that the comparison must notice."""
    for adapters in learner.model.adapters:
        params = dict(adapters.named_parameters())
        if how == "scale":
            adapters.scale *= 1.01
            adapters.merge()
        if how == "next_expert":  # each expert gets the adapter of its neighbour
            own = [n for n in params if "/experts/" in n and n.endswith("down_proj/lora_B")]
            values = [params[name].detach().clone() for name in own]
            for name, value in zip(own, values[1:] + values[:1], strict=True):
                params[name].data.copy_(value)
            adapters.merge()
        if how in OTHERS:
            group = learner.parallel.tp
            for name, param in params.items():
                if name.endswith(OTHERS[how]):
                    every = [torch.empty_like(param) for _ in range(group.size())]
                    dist.all_gather(every, param.detach(), group=group)
                    param.data.copy_(every[1 - group.rank()])
            adapters.merge()
        if how == "no_tp_sum":
            for param in params.values():
                setattr(param, "sequence_parallel", False)  # noqa: B010
        if how == "next_rows":
            for hook in hooks_of(learner, GroupedHook):
                hook._rows = next_rows(hook._rows)
        if how == "before_norm":
            for hook in hooks_of(learner, GradientHook):
                if hook._is_normed:
                    hook.__class__ = BeforeNorm
        if how == "no_ep_sum":
            drop_other_experts(params)
    if how:
        learner.optimizer.reload_model_params()


class BeforeNorm(GradientHook):
    """Of a norm with a projection: A multiplies what the norm gets."""

    def __call__(self, linear: torch.nn.Module, args: Any, output: Any) -> tuple[Tensor, Any]:
        (y, _normed), bias = output
        return self.through(args[0], y), bias


def next_rows(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Each expert's factors meet the rows of the next one."""
    return lambda x, counts: plain(x, [*counts[1:], counts[0]])


def hooks_of(learner: Learner, kind: type) -> list[Any]:
    modules = [m for chunk in learner.model.chunks for m in chunk.gpt.modules()]
    found = [hook for m in modules for hook in m._forward_hooks.values() if isinstance(hook, kind)]
    assert found, kind
    return found


def drop_other_experts(params: dict[str, torch.nn.Parameter]) -> None:
    """Gradients of shared factors from the experts of the first rank alone."""
    for name, param in params.items():
        if re.search(r"/experts/\D", name) and parallel_state.get_expert_model_parallel_rank():
            param.register_hook(torch.zeros_like)


def gather(
    learner: Learner, view: Callable[[torch.nn.Parameter], Tensor], *, equal: bool
) -> dict[str, Tensor]:
    """Whole tensors by name on every rank.  equal: copies of one part must be."""
    mine = [
        (*adapters.tiles[name].tiles[0][:2], view(param).clone())
        for adapters in learner.model.adapters
        for name, param in adapters.named_parameters()
    ]
    every: list[list[tuple[str, tuple[range, ...], Tensor]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    spec, lora = learner.model.spec, learner.config.lora
    whole = {
        name: torch.full(shape, float("nan"))
        for name, shape in adapter_shapes(hf_shapes(spec), lora.rank_of, shared=lora.shares).items()
    }
    for hf, box, value in (part for parts in every for part in parts):
        place = whole[hf][at(box)]
        if equal and not place.isnan().any():
            torch.testing.assert_close(place, value, rtol=1e-6, atol=1e-9, msg=f"copies of {hf}")
        place.copy_(value)
    return whole


def frozen_sums(learner: Learner) -> list[float]:
    """Of the weights that have no adapter."""
    return [
        float(tensor.double().sum())
        for name, tensor in learner.model.tensors.items()
        if "norm" in name or "router" in name or name.startswith(("embedding", "output_layer"))
    ]


def is_te_layer(module: torch.nn.Module) -> bool:
    return type(module).__module__ == "megatron.core.extensions.transformer_engine"


def all_buffers(ddp: torch.nn.Module) -> list[object]:
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def adam_elements(learner: Learner) -> int:
    inner = getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
    return sum(
        value.numel()
        for one in inner
        for state in one.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    )


if __name__ == "__main__":
    main()
