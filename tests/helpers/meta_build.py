"""Worker of test_gpu_meta and test_gpu_profile: ranks of a recipe's trainer, built without memory.

    python -m tests.helpers.meta_build local|te RANK[,RANK...] RECIPE [OVERRIDE...]

Process groups are torch's fake ones, parameters and gradient buffers are meta tensors, so a rank
of any recipe is built in one process.  Prints a JSON object per rank: what was built, and what the
dry run says.  te: layers of Transformer Engine, which must be installed; no GPU is needed.
stand-in: the same over tests.helpers.te_modules.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moerl.config import load_config, resolve
from moerl.config.schema import Config
from moerl.layout import ModelSpec, model_spec
from moerl.layout.shards import LayerSpec
from moerl.planning.estimates import model_shapes
from moerl.planning.memory import trainer_memory, training_of
from moerl.trainer.model import cpu_patches, platform
from tests.helpers import te_modules
from tests.helpers.patience import patience

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from moerl.trainer.model.gpt import Model

META = "meta"


@dataclass(frozen=True)
class Built:
    """What one rank has, in bytes; `updated` and `padding` are counted from the real buffers."""

    parameters: int  # a count
    weights: int
    gradients: int
    base: int  # W0 of adapters
    updated: int  # a count: parameters that this rank's optimizer updates
    padding: int  # of the gradient buffers
    unknown: list[str]  # names or shapes that the layout tables do not have, and the reverse
    fused: int  # modules of Transformer Engine


def main() -> None:
    layers, ranks, recipe, *overrides = sys.argv[1:]
    config = resolve(load_config(recipe, overrides))
    if layers == "stand-in":
        te_modules.make_package()
    place = _without_memory("local" if layers == "local" else "te")
    if layers == "stand-in":
        te_modules.leave_out_kernels()
    for rank in map(int, ranks.split(",")):
        print(json.dumps(build(config, place, rank)), flush=True)


def build(config: Config, place: platform.Platform, rank: int) -> dict[str, object]:
    from moerl.trainer.model import gpt, parallel

    trainer, spec = config.trainer, model_spec(model_shapes(config))
    rank %= trainer.parallel.world_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(trainer.parallel.world_size)}
    fields = trainer.megatron if place.layers == "te" else {}
    trainer = replace(
        trainer,
        megatron=fields | {"perform_initialization": False},
        packing=trainer.packing and place.layers == "te",
    )
    ranks = parallel.start(trainer.parallel, place, timeout_s=patience(60))
    model = gpt.build(spec, trainer, ranks, with_replay=True, lora=config.lora)
    built = _measured(model, gpt.wrap(model, trainer, place))
    parallel.stop()
    told = _told(config, spec, place.layers)[ranks.pp_rank]
    return {"number": rank, "built": asdict(built), "told": told}


def _told(config: Config, spec: ModelSpec, layers: LayerSpec) -> list[dict[str, int]]:
    training = training_of(config, gpu=layers == "te")
    return [asdict(stage) for stage in trainer_memory(spec, config.trainer.parallel, training)]


def _measured(model: Model, ddp: list[DistributedDataParallel]) -> Built:
    chunks = [chunk.gpt for chunk in model.chunks]
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    buffers = [b for chunk in ddp for b in chunk.buffers + chunk.expert_parallel_buffers]
    gradients = sum(p.main_grad.nbytes for p in parameters if p.requires_grad)
    factors = sum(tensor.nbytes for tensor in model.factors().values())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.tensors.items()}
    known = {name: local.shape for name, local in model.tiles.items()}
    return Built(
        parameters=sum(p.numel() for p in parameters),
        weights=sum(tensor.nbytes for tensor in model.tensors.values()) + factors,
        gradients=gradients,
        base=sum(weight.nbytes for one in model.adapters for weight in one.adapted),
        updated=sum(_numel(b.params) // b.data_parallel_world_size for b in buffers),
        padding=sum(b.grad_data.nbytes for b in buffers) - gradients,
        unknown=sorted(f"{name} {shape}" for name, shape in shapes.items() ^ known.items()),
        fused=sum("transformer_engine" in type(m).__module__ for c in chunks for m in c.modules()),
    )


def _numel(parameters: Iterable[Any]) -> int:
    return sum(p.numel() for p in parameters)


def _without_memory(layers: LayerSpec) -> platform.Platform:
    """The platform of a GPU whose tensors have shapes only."""
    if layers == "te":
        cpu_patches.apply("cuda")
        _seem_like_a_gpu()
    else:
        platform.prepare("cpu")
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moerl.trainer.model import parallel

    real = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **(kwargs | {"backend": "fake", "pg_options": None, "timeout": None}))

    device = torch.device(META)
    vars(parallel)["rank_store"] = lambda _timeout: FakeStore()
    for module in (dist, dist.distributed_c10d):
        vars(module)["new_group"] = new_group
    vars(torch.cuda)["current_device"] = lambda: device
    return platform.Platform("cuda", device, "fake", layers)


def _seem_like_a_gpu() -> None:
    """Transformer Engine's modules ask for one when they are made."""
    import torch

    hopper = SimpleNamespace(major=9, minor=0, name="H100", multi_processor_count=132)
    answers = {"is_available": True, "get_device_properties": hopper}
    answers |= {"get_device_capability": (9, 0), "set_device": None, "device_count": 1}
    for name, answer in answers.items():
        vars(torch.cuda)[name] = lambda *_args, answer=answer, **_kwargs: answer


if __name__ == "__main__":
    main()
