"""Worker of test_gpu_gang: a rank trains in each layout, on the double or on the CPU.

    gang_ranks.py PLATFORM FOLDER LAYOUT...

FOLDER: with the models of `train_once` and the scaled one.  Each rank writes a file of `Numbers`
there for each layout; on the double they include waits, controls, and what the device holds of
scaled models.
"""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from moerl.trainer.model import platform

NAME, WHERE, *NAMES = sys.argv[1:]
RANK = int(os.environ["RANK"])
PLACE = platform.prepare(NAME, local_rank=RANK, impl="local")

import torch  # noqa: E402

from moerl.config.schema import AlgorithmConfig, Config  # noqa: E402
from moerl.core.types import BatchPlan, PolicyVersion  # noqa: E402
from moerl.data.packing import Microbatch  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner import critic, step  # noqa: E402
from moerl.trainer.model import gpt, lora, parallel  # noqa: E402
from moerl.weight_sync.snapshot import WeightSnapshot  # noqa: E402
from tests.double import attention, other_models  # noqa: E402
from tests.double.gang import ADAPTED, LAYOUTS, SCALED_MODEL  # noqa: E402
from tests.double.train_once import (  # noqa: E402
    MODEL,
    REFERENCE,
    TEACHER,
    Numbers,
    Tensors,
    Trained,
    largest_difference,
    without_times,
)
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.rank_server import meet_apart  # noqa: E402
from tests.helpers.trainer_support import make_plan, replan  # noqa: E402

ON_DOUBLE = NAME == "cuda"
FOLDER = Path(WHERE)
STORE = BlobStore(FOLDER / f"blobs-{NAME}-{RANK}", "n0")
MAX_TOKENS = 48
P, R = ParamSpec("P"), TypeVar("R")


def main() -> None:
    if not ON_DOUBLE:
        attention.replace(everywhere=True)
    plan = make_plan(STORE)
    for number, name in enumerate(NAMES):
        meet_apart(number)
        layout = {**LAYOUTS, **ADAPTED}[name]
        ranks = parallel.start(layout.parallel, PLACE, timeout_s=patience(60))
        own = replan(plan, ranks.dp_size, MAX_TOKENS)
        has_critic = name not in ADAPTED
        settings = algorithm(REFERENCE, TEACHER, critic=has_critic)
        config = layout.config(FOLDER / MODEL, "fp32", settings)
        trained = Trained(learner(config, ranks), own)
        found = numbers(trained) if has_critic else of_adapters(trained)
        if ON_DOUBLE:
            settings = algorithm(*[SCALED_MODEL] * 2, critic=has_critic)
            config = layout.config(FOLDER / SCALED_MODEL, "bf16", settings)
            found["bytes"] = held_bytes(config, ranks, own)
        torch.save(found, FOLDER / f"{NAME}-{name}-{RANK}.pt")
        parallel.stop()


def algorithm(reference: str, teacher: str, *, critic: bool) -> AlgorithmConfig:
    """One that needs all models that there are, or all but the critic."""
    settings = other_models.ref_settings(FOLDER / reference, FOLDER / teacher)
    return other_models.critic_settings(settings) if critic else settings


def learner(config: Config, ranks: parallel.Parallel) -> step.Learner:
    source = HfFolder(config.model.path)
    model = gpt.build(source.spec, config.trainer, ranks, with_replay=True, lora=config.lora)
    load_hf(model.tensors, model.tiles, source)
    if config.lora.rank:
        model.keep_base()
        return step.Learner(model, ranks, config, STORE)
    made = critic.Critic(config, ranks, STORE)
    other_models.fill_head(made)
    return step.Learner(model, ranks, config, STORE, made)


# --- numbers --------------------------------------------------------------------------------------
def numbers(trained: Trained) -> Numbers:
    """Of this rank: gradients of the plan, then metrics and weights of its step."""
    found: Numbers = {"gradients": trained.gradients()}
    if ON_DOUBLE:
        right = found["gradients"]
        found["other routes"] = largest_difference(with_other_routes(trained), right)
        found["unfinished"] = unfinished(trained, right)
    valued = other_models.critic_of(trained)
    found["values"] = other_models.by_row(valued.values(trained.plan))
    with watched(found):
        found["metrics"] = without_times(trained.learner.step(trained.plan))
    found["weights"] = trained.weights() | {
        f"critic.{name}": parameter.detach().cpu().clone()
        for name, parameter in valued.model.gpt.named_parameters()
    }
    found["microbatches"] = trained.plan.num_microbatches
    return found


def of_adapters(trained: Trained) -> Numbers:
    """Gradients of the factors, none of which is 0, and the merged weights after a step."""
    model = trained.learner.model
    for name, factor in model.factors().items():
        if name.endswith("lora_B"):
            chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            factor.copy_(0.02 * torch.randn(factor.shape, generator=chance))
    model.merge()
    trained.learner.optimizer.reload_model_params()
    trained.learner.gradients(trained.plan)
    named = model.gpt.named_parameters()
    found = {name: p.main_grad.cpu().clone() for name, p in named if p.requires_grad}
    trained.learner.step(trained.plan)
    merged = {name: tensor.detach().cpu().clone() for name, tensor in model.tensors.items()}
    return {"gradients": found, "weights": merged}


@contextmanager
def watched(found: Numbers) -> Iterator[None]:
    """Of a step on the double: waits of our lines by file, copies from pageable memory by line."""
    if not ON_DOUBLE:
        yield
        return
    from tests.double.watch import PAGEABLE, WAITS, watch

    with watch() as seen:
        yield
    found["waits"], found["pageable"] = dict(seen.own_files(*WAITS)), dict(seen.own_lines(PAGEABLE))


def with_other_routes(trained: Trained) -> Tensors:
    """Negative control: on the second rank each route is moved by one token."""
    routes = Microbatch.routes

    def moved(self: Microbatch, *args: tuple[int, int]) -> dict[int, torch.Tensor]:
        return {layer: rows.roll(1, 0) for layer, rows in routes(self, *args).items()}

    setattr(Microbatch, "routes", moved if RANK == 1 else routes)  # noqa: B010
    try:
        return trained.gradients()
    finally:
        setattr(Microbatch, "routes", routes)  # noqa: B010


def unfinished(trained: Trained, right: Tensors) -> str:
    """Negative control: how gradients show that their reduction was not finished; "" = not."""
    config = trained.learner.model.config
    finish = config.finalize_model_grads_func
    config.finalize_model_grads_func = lambda *_args, **_kwargs: None
    try:
        difference = largest_difference(trained.gradients(), right)
        return f"{difference} of the largest" if difference > 1e-3 else ""
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        config.finalize_model_grads_func = finish
        for ddp in trained.learner.ddp:
            ddp.finish_grad_sync()


# --- bytes ----------------------------------------------------------------------------------------
def held_bytes(config: Config, ranks: parallel.Parallel, plan: BatchPlan) -> dict[str, int]:
    """Of the scaled models after a step, by purpose; and of a snapshot, in host memory."""
    from tests.double.watch import OPS, memory

    gc.collect()
    before = {name: memory(name, RANK).live for name in ("", *PURPOSES)}
    with by_purpose():
        made = learner(config, ranks)
        made.step(plan)
    for optimizer in (made.optimizer, made.critic and made.critic.optimizer):
        if optimizer is not None:
            optimizer.zero_grad()
    gc.collect()
    held = {name: memory(name, RANK).live - live for name, live in before.items()}
    buffers = [b for ddp in made.ddp for b in ddp.buffers + ddp.expert_parallel_buffers]
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    OPS.reset_peak(RANK)
    snapshot, peak = WeightSnapshot(), memory(device=RANK).live
    sent = made.model.tensors | made.model.factors()
    snapshot.store(sent, PolicyVersion(0, 1))
    snapshot.wait()
    return {
        # the distributed optimizer moves weights into buffers like those of the gradients
        "weights": held["weights"] + held["buffers"] - gradients,
        "gradients": gradients,
        "optimizer": held["optimizer"],
        "others": held["others"],
        "device_base": held["W0"],
        "all": held[""],
        "snapshot": sum(snapshot[name].nbytes for name in sent),
        "snapshot on the device": memory(device=RANK).peak - peak,
    }


PURPOSES = {
    "weights": [(gpt, "build")],
    "W0": [(lora, "BaseWeights")],
    "buffers": [(step, "wrap")],
    "optimizer": [(step, "make_optimizer"), (step, "take_step")],
    "others": [(step, "open_ref_models"), (critic, "Critic"), (critic, "take_step")],
}


@contextmanager
def by_purpose() -> Iterator[None]:
    """Book what these functions allocate under its purpose."""
    places = [(name, *place) for name, found in PURPOSES.items() for place in found]
    plain = [getattr(module, function) for _, module, function in places]
    for (name, module, function), was in zip(places, plain, strict=True):
        setattr(module, function, booked(name, was))
    try:
        yield
    finally:
        for (_, module, function), was in zip(places, plain, strict=True):
            setattr(module, function, was)


def booked(name: str, function: Callable[P, R]) -> Callable[P, R]:
    from tests.double.watch import purpose

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with purpose(name):
            return function(*args, **kwargs)

    return call


if __name__ == "__main__":
    main()
