"""Worker of tests/multi/test_engine_kernels: record the modules that an engine's start loads.

    python -m tests.helpers.recorded_kernels RECIPE CAPABILITY [OVERRIDE...]

SGLang's own model runner is made with the arguments of the recipe's engine, for its rank 0, with few
layers, and runs a prefill and a decode step, with every question about the device answered for the
capability (90 or 100).  Tensors are on the CPU and say that they are on the GPU; kernels do nothing.
Prints one JSON object: the requests for modules, in the words of `load_jit` and of FlashInfer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MEMORY = 80 * 2**30
GPU = torch.device("cuda", 0)
NAMES = {90: "NVIDIA H100 80GB HBM3", 100: "NVIDIA B200"}


# --- a device that is the CPU ---------------------------------------------------------------------
def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class Pretend(TorchFunctionMode):
    """Every tensor says that it is on the GPU, and everything asked for there is made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if name == "__get__":
            if owner is torch.Tensor.is_cuda:
                return args[0].device.type != "meta"
            if owner is torch.Tensor.device:
                found = func(*args, **kwargs)
                return GPU if found.type == "cpu" else found
            if owner is torch.Tensor.is_cpu:
                return False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.get_device:
            return 0
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        return func(*map(_on_cpu, args), **kwargs)


class Idle(TorchDispatchMode):
    """Compiled operators of others have no kernel for the CPU: they give what they were given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("aten", "prim", "prims"):
            return func(*args, **(kwargs or {}))
        returns = func._schema.returns
        given = [one for one in args if isinstance(one, torch.Tensor)]
        log(f"operator {func}")
        made = tuple(torch.zeros_like(given[0]) for _ in returns) if given else ()
        return made[0] if len(returns) == 1 else made if returns else None


def log(line: str) -> None:
    if os.environ.get("RECORD_LOG"):
        print(line, file=sys.stderr, flush=True)


class Whatever:
    """An object of the device that does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device, self.cuda_stream, self.stream_id, self.device_index = GPU, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> Whatever:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def query(self) -> bool:
        return True


def answer_for(capability: int) -> None:
    """Answer questions about the device before anybody asks."""
    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(
        name=NAMES[capability], major=major, minor=minor, total_memory=MEMORY,
        multi_processor_count=132 if capability == 90 else 148, uuid="GPU-0", warp_size=32,
        gcnArchName="", L2_cache_size=50 * 2**20, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        max_threads_per_multi_processor=2048,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_capability": lambda _device=None: (major, minor),
        "get_device_name": lambda _device=None: NAMES[capability],
        "get_device_properties": lambda _device=None: properties,
        "mem_get_info": lambda _device=None: (MEMORY, MEMORY),
        "memory_allocated": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "current_stream": lambda _device=None: Whatever(),
        "default_stream": lambda _device=None: Whatever(),
        "stream": lambda _stream: Whatever(),
        "device": lambda _device: Whatever(),
        "can_device_access_peer": lambda *_pair: True,
        "Stream": Whatever,
        "Event": Whatever,
    }
    for name in ("synchronize", "empty_cache", "_lazy_init", "init", "manual_seed",
                 "manual_seed_all", "ipc_collect", "reset_peak_memory_stats", "set_stream"):  # fmt: skip
        answers[name] = lambda *_args, **_kwargs: None
    for name, value in answers.items():
        setattr(torch.cuda, name, value)
    torch.cuda.streams.Stream = torch.Stream = Whatever  # type: ignore[misc]


def fake_groups(world: int) -> None:
    """Process groups of one process that stands for rank 0 of them."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, group = dist.init_process_group, dist.new_group

    def init(*_args: Any, **_kwargs: Any) -> None:
        begin("fake", store=FakeStore(), rank=0, world_size=world)

    def new(ranks: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return group(ranks, backend="fake")

    dist.init_process_group, dist.new_group = init, new


# --- recording ------------------------------------------------------------------------------------
class Module:
    """A compiled module whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def record_modules(found: list[dict[str, Any]]) -> None:
    """Make load_jit give idle modules and note what it was asked for, before anybody imports it."""
    from sglang.kernels.jit import utils
    from sglang.kernels.jit.utils import compile as package
    from sglang.kernels.jit.utils.compile import loader

    site = str(Path(utils.__file__).parents[4])

    def load_jit(*args: Any, **kwargs: Any) -> Module:
        request = {"args": list(map(str, args)), **{k: v for k, v in kwargs.items() if v}}
        if kwargs.get("header_only") is False:
            request["header_only"] = False
        request = json.loads(json.dumps(request).replace(site, "<site>"))
        if request not in found:
            found.append(request)
            log(f"module {' '.join(request['args'])}")
        return Module()

    for place in (utils, package, loader):
        place.load_jit = load_jit


def record_flashinfer(found: list[str]) -> None:
    from flashinfer.jit import core

    def build_and_load(self: Any, *_args: Any, **_kwargs: Any) -> Module:
        if self.name not in found:
            found.append(self.name)
            log(f"flashinfer {self.name}")
        return Module()

    core.JitSpec.build_and_load = build_and_load


def model_folder(config: Any, folder: Path) -> Path:
    """The recipe's config.json with few layers: one dense one where the model has some, one other."""
    from moerl.planning.dry_run import model_shapes

    model = dict(model_shapes(config))
    layers = 2
    model["num_hidden_layers"] = layers
    if model.get("first_k_dense_replace"):
        model["first_k_dense_replace"] = 1
    if "layer_types" in model:
        model["layer_types"] = model["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def run(config: Any, folder: Path) -> None:
    """A start of rank 0 and one step of each kind."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    from moerl.engine.host.server_args import arguments
    from moerl.engine.protocol import model_type_of

    given = arguments(
        config.engine, folder, routing=True, version="0.0", port=30000, nccl_port=30001, cuda=True,
        model_type=model_type_of(folder),
    )  # fmt: skip
    given |= {"load_format": "dummy", "nnodes": config.engine.nodes, "device": "cuda"}
    if config.engine.nodes > 1:
        given["dist_init_addr"] = "127.0.0.1:30002"
    server = ServerArgs(**given)
    server.resolve_once()
    one_batch.publish(server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server, PortArgs.init_new(server), 0, 0)
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(2, 16)
    tokens, _, batch = runner.extend(requests)
    runner.decode(tokens, batch)


def main() -> None:
    recipe, capability, *overrides = sys.argv[1:]
    answer_for(int(capability))
    fake_groups(64)
    from moerl.config import load_config, resolve

    modules: list[dict[str, Any]] = []
    flashinfer: list[str] = []
    record_modules(modules)
    record_flashinfer(flashinfer)
    config = resolve(load_config(recipe, overrides))
    with tempfile.TemporaryDirectory() as folder, Pretend(), Idle():
        run(config, model_folder(config, Path(folder)))
    print(json.dumps({"modules": modules, "flashinfer": flashinfer}))


if __name__ == "__main__":
    main()
