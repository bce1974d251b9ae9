"""Worker of test_gpu_meta: one rank of a recipe's trainer, built without memory.

    python -m tests.helpers.meta_build RECIPE RANK

Process groups are torch's fake ones, parameters and gradient buffers are meta tensors, so a rank
of any recipe is built in one process.  Prints a JSON object: what was built, and what the dry run
says.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from typing import Any

from moerl.config import load_config, resolve
from moerl.layout import model_spec
from moerl.planning.dry_run import model_shapes
from moerl.planning.fit import training_of
from moerl.planning.memory import trainer_memory
from moerl.trainer.model import platform

META = "meta"


def main() -> None:
    recipe, rank = sys.argv[1], int(sys.argv[2])
    config = resolve(load_config(recipe))
    trainer, spec = config.trainer, model_spec(model_shapes(config))
    trainer = replace(trainer, megatron={"perform_initialization": False}, packing=False)
    world = trainer.parallel.world_size
    os.environ |= {"RANK": str(rank % world), "WORLD_SIZE": str(world)}
    place = _without_memory()
    from moerl.trainer.model import gpt, parallel

    ranks = parallel.start(trainer.parallel, place, timeout_s=60)
    model = gpt.build(spec, trainer, ranks, with_replay=True)
    ddp = gpt.wrap(model, trainer, place)
    parameters = [p for chunk in model.chunks for p in chunk.gpt.parameters()]
    buffers = [b for chunk in ddp for b in chunk.buffers + chunk.expert_parallel_buffers]
    built = {
        "parameters": sum(p.numel() for p in parameters),
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.main_grad.nbytes for p in parameters),
        "padding": sum(b.grad_data.nbytes for b in buffers),
        "shard": sum(b.numel // b.data_parallel_world_size for b in buffers),
    }
    built["padding"] -= built["gradients"]
    told = trainer_memory(spec, trainer.parallel, training_of(config, gpu=False))[ranks.pp_rank]
    print(json.dumps({"built": built, "told": asdict(told)}))


def _without_memory() -> platform.Platform:
    """The platform of a GPU whose tensors have shapes only."""
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
    return platform.Platform("cuda", device, "fake", "local")


if __name__ == "__main__":
    main()
