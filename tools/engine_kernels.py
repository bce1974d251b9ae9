"""Compile what an engine of a recipe compiles at its first start, on a machine without a GPU.

    .venv/bin/python -m tools.engine_kernels [RECIPE...] [--arch 90 100] [--out FOLDER]

In an environment of `tools/setup.sh --gpu`.  RECIPE is a name or "NAME cluster=gpu1".  Without it:
all that start on GPUs as they are shipped or with cluster=gpu1, one of each engine.
FOLDER is .venv/cuda/kernels, where engines of this environment look; copied to the same place of an
environment with the same packages and C++ compiler, it saves them the compiler.  A module that the
folder has is not compiled again: SGLang and FlashInfer name it by a hash of compiler, flags and
sources, so an interrupted call goes on where it was.

The list of modules is SGLang's: its model runner is made with the arguments of the recipe's engine,
as rank 0 of its world, with two layers, captures its graphs and samples once, over a GPU that
answers questions and does nothing else (tools/idle_gpu.py).  Compiled and linked are the modules of
`load_jit` and FlashInfer's; kernels of the CUTLASS DSL, which every start compiles in memory; and
the first shape of each product of DeepGEMM.  Listed, not compiled: Triton's kernels, attention that
FlashInfer fetches from NVIDIA at a start on sm_100a (rows `download`), and kernels of the CUTLASS
DSL inside operators (rows `operator`).  Further shapes of a kernel are not listed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moerl.config import load_config, resolve
from moerl.config.clusters import placement
from moerl.config.schema import Config
from moerl.runtime.cuda_folder import FOLDER, KERNELS, compiler_environment, kernel_caches
from tools import stub_driver

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURES = (90, 100)  # sm_90a and sm_100a
_WORKER_S = 3000.0
_LISTED = ("triton", "download", "operator")  # kinds of rows that nothing is compiled for
_DRIVEN = ("sgl_kernel", "torch/lib", "deep_gemm", "flash_mla", "deep_ep")
# DeepGEMM asks the runtime library itself.
_DEVICE = """#include <cstring>
#include <cuda_runtime_api.h>
extern "C" int cublasLtCreate(void** handle) { *handle = nullptr; return 0; }
extern "C" int cublasLtDestroy(void*) { return 0; }
extern "C" cudaError_t cudaFree(void*) { return cudaSuccess; }
extern "C" cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int) {
  std::memset(found, 0, sizeof *found);
  found->major = CAPABILITY / 10;
  found->minor = CAPABILITY % 10;
  found->multiProcessorCount = CAPABILITY == 90 ? 132 : 148;
  found->sharedMemPerBlockOptin = 232448;
  found->l2CacheSize = 50 << 20;
  return cudaSuccess;
}
"""


# --- all recipes ----------------------------------------------------------------------------------
def gpu_recipes() -> list[str]:
    """Recipes that start on GPUs, one of each engine: others ask for the same modules."""
    from tools.gpu_choices import planned

    found: dict[str, str] = {}
    for name, config, _, shapes in sorted(
        planned(), key=lambda one: one[0] != "quickstart cluster=gpu1"
    ):
        engine, slots = config.engine, config.lora if config.lora.serves_adapters else None
        key = repr((shapes, engine.dtype, engine.tp, engine.nodes, engine.args, slots))
        found.setdefault(key, name)
    return sorted(found.values())


def compile_all(
    recipes: Sequence[str], architectures: Sequence[int], out: Path, workers: int
) -> list[dict[str, Any]]:
    """Rows of all recipes: recipe, arch, kind, name, seconds, error, and whether it was kept."""
    with tempfile.TemporaryDirectory(prefix="engine-kernels-") as folder:
        (site,) = Path(sys.prefix).glob("lib/python3.*/site-packages")
        libraries = [library for part in _DRIVEN for library in (site / part).rglob("*.so")]
        stub_driver.write(Path(folder), libraries, succeed=("cuTensorMapEncodeTiled",))
        for arch in architectures:
            _write_device(Path(folder), arch)
        pairs = [(recipe, arch) for recipe in recipes for arch in architectures]
        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda pair: _of_recipe(pair[0], pair[1], out, Path(folder)), pairs)
            rows = []
            for (recipe, arch), each in zip(pairs, found, strict=True):
                print(f"{recipe}, sm_{arch}a: {len(each)} modules", file=sys.stderr, flush=True)
                rows += each
            return rows


def _write_device(folder: Path, arch: int) -> None:
    source = folder / f"device{arch}.cpp"
    source.write_text(_DEVICE)
    include = Path(sys.prefix, FOLDER, "include")
    command = ["c++", "-shared", "-fPIC", f"-DCAPABILITY={arch}", f"-I{include}", str(source)]
    subprocess.run([*command, "-o", str(source.with_suffix(".so"))], check=True)


def _of_recipe(recipe: str, arch: int, out: Path, folder: Path) -> list[dict[str, Any]]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_HOME", "CUDA_PATH", "CPATH", "LIBRARY_PATH")
    }
    environment = inherited | compiler_environment(inherited) | kernel_caches(out)
    environment |= {
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / f"device{arch}.so"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "DG_USE_TEMP_CUBLASLT_WORKSPACE": "1",
        "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",  # of 16384 lengths of a batch
        "PYTHONPATH": str(ROOT),
    }
    words = [sys.executable, "-m", "tools.engine_kernels", recipe, "--arch", str(arch)]
    found = folder / f"{recipe}-{arch}.json"  # NCCL and SGLang write to standard output
    found.touch()
    with (folder / f"{recipe}-{arch}.log").open("w+") as log:
        done = subprocess.run(
            [*words, "--rows", str(found)],
            env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=_WORKER_S, check=False,
        )  # fmt: skip
        rows = [json.loads(line) for line in found.read_text().splitlines()]
        if done.returncode:
            log.seek(0)
            rows.append({"kind": "start", "name": recipe, "error": log.read()[-3000:]})
    shared = {"recipe": recipe, "arch": arch, "seconds": 0.0, "error": ""}
    return [shared | row for row in rows]


def report(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One line per module, then the count by kind."""
    modules: dict[tuple[str, int, str], dict[str, Any]] = {}
    for row in rows:
        kept = modules.setdefault((row["kind"], row["arch"], row["name"]), row | {"recipes": []})
        kept["recipes"].append(row["recipe"])
        kept["seconds"] = max(kept["seconds"], row["seconds"])
        kept["error"] = kept["error"] or row["error"]
    for (kind, arch, name), row in sorted(modules.items()):
        recipes = ", ".join(sorted(set(row["recipes"])))
        seconds = "not compiled" if kind in _LISTED else f"{row['seconds']:10.1f} s"
        yield f"{kind:11} sm_{arch}a {seconds}  {name}  ({recipes})"
        if row["error"]:
            error = row["error"].strip()
            yield f"FAILED {error if len(error) < 2000 else f'{error[:500]} ... {error[-1500:]}'}"
    for kind in sorted({kind for kind, _, _ in modules}):
        mine = [row for (one, _, _), row in modules.items() if one == kind]
        seconds, failed = sum(r["seconds"] for r in mine), sum(bool(r["error"]) for r in mine)
        done = "not compiled" if kind in _LISTED else f"{seconds:.0f} s"
        yield f"{len(mine)} of {kind}: {done}, {failed} failed"


# --- one start ------------------------------------------------------------------------------------
class Module:
    """A compiled module whose functions do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:
        pass


class Compiling:
    """Every request for a module is met by the real compiler, and answered by an idle module."""

    def __init__(self, rows: Path) -> None:
        self._rows = rows
        self._asked: set[tuple[str, str]] = set()

    def build(self, kind: str, name: str, make: Callable[[], Any]) -> None:
        if (kind, name) in self._asked:
            return
        self._asked.add((kind, name))
        begin, error = time.monotonic(), ""
        try:
            make()
        except Exception as failure:
            error = str(failure) or repr(failure)
        seconds = round(time.monotonic() - begin, 1)
        row = {"kind": kind, "name": name, "seconds": seconds, "error": error}
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def leave(self, kind: str, name: str) -> None:
        """A row for what is not compiled here."""
        self.build(kind, name, lambda: None)

    def install(self) -> None:
        """Before anybody imports the functions by name."""
        import cutlass.cute
        from flashinfer.jit import core
        from sglang.kernels.jit import utils
        from sglang.kernels.jit.utils import compile as package
        from sglang.kernels.jit.utils.compile import loader

        load_jit, build_and_load = loader.load_jit, core.JitSpec.build_and_load
        compile_cute = cutlass.cute.compile

        def load(*args: Any, **kwargs: Any) -> Module:
            self.build("sglang", "_".join(map(str, args)), lambda: load_jit(*args, **kwargs))
            return Module()

        def build(spec: Any, *args: Any, **kwargs: Any) -> Module:
            self.build("flashinfer", spec.name, lambda: build_and_load(spec, *args, **kwargs))
            return Module()

        def cute(kernel: Any, *args: Any, **kwargs: Any) -> Module:
            name = type(kernel).__name__
            if name == "function":
                name = kernel.__qualname__
            self.build("cutlass-dsl", name, lambda: compile_cute(kernel, *args, **kwargs))
            return Module()

        for place in (utils, package, loader):
            place.load_jit = load
        core.JitSpec.build_and_load = build
        cutlass.cute.compile = cute

    def leave_downloads(self) -> None:
        """FlashInfer's attention for sm_100a is fetched at a start: listed, not compiled."""

        def get() -> Module:
            self.leave("download", "trtllm_gen_fmha")
            return Module()

        for name, module in list(sys.modules.items()):
            if name.startswith("flashinfer") and hasattr(module, "get_trtllm_gen_fmha_module"):
                module.get_trtllm_gen_fmha_module = get  # type: ignore[attr-defined]

    def operator(self, operator: Any, args: Any, kwargs: Any) -> None:
        """Compile what an operator without a kernel for the CPU compiles.

        DeepGEMM's own kernel is called: it compiles, and then finds no device to load it on.
        """
        import torch

        from tools.idle_gpu import on_gpu

        namespace, _, name = operator._schema.name.partition("::")
        if namespace == "sglang":  # its kernel is compiled in the call, which needs a device
            self.leave("operator", name)
        if namespace != "deep_gemm" or "gemm" not in name:
            return

        def make() -> None:
            given = {key: on_gpu(value) for key, value in kwargs.items()}
            try:
                operator._op_dk(torch._C.DispatchKey.CUDA, *map(on_gpu, args), **given)
            except RuntimeError as error:
                if "cuLibraryLoadFromFile" not in str(error):  # to load what was compiled
                    raise

        self.build("deep_gemm", name, make)


def start(recipe: str, capability: int, rows: Path) -> None:
    """The start of the recipe's engine, and one step of prefill and of decoding."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang imports it where it can
    from tools import idle_gpu

    idle_gpu.answer_for(capability)
    compiling = Compiling(rows)
    idle_gpu.idle_triton(capability, lambda name: compiling.leave("triton", name))
    idle_gpu.call_python_directly()
    compiling.install()
    idle_gpu.fake_groups()
    idle_gpu.keep_shapes()
    compiling.leave_downloads()
    name, *more = recipe.split()
    config = resolve(load_config(name, more))
    with (
        tempfile.TemporaryDirectory() as folder,
        idle_gpu.Pretend(),
        idle_gpu.Idle(compiling.operator),
    ):
        _run(config, _model_folder(config, Path(folder)))


def _model_folder(config: Config, folder: Path) -> Path:
    """The recipe's config.json with two layers, one of them dense where the model has such."""
    from moerl.planning.estimates import model_shapes

    model = dict(model_shapes(config)) | {"num_hidden_layers": 2}
    if model.get("first_k_dense_replace"):
        model["first_k_dense_replace"] = 1
    if "layer_types" in model:
        model["layer_types"] = model["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def _run(config: Config, folder: Path) -> None:
    from sglang.benchmark import one_batch
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import PortArgs, ServerArgs

    from moerl.planning.estimates import model_shapes
    from moerl.planning.gpu_choices import engine_arguments

    shapes, placed = model_shapes(config), placement(config)
    given = engine_arguments(config, placed, config.engine.tp, folder, shapes)
    given |= {"load_format": "dummy", "device": "cuda", "port": 30000, "nccl_port": 30001}
    given |= {"cuda_graph_bs_decode": [1, 8], "cuda_graph_bs_prefill": [16, 512]}
    if config.engine.nodes > 1:
        given["dist_init_addr"] = "127.0.0.1:30002"
    loader.initialize_dummy_weights = lambda *_args, **_kwargs: None
    one_batch.get_tokenizer = lambda *_args, **_kwargs: None
    server = ServerArgs(**given)
    server.resolve_once()
    one_batch.publish(server, role="scheduler", ranks=one_batch.SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server, PortArgs.init_new(server), 0, 0)
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(2, 16)
    for request in requests:
        request.rid, sampling = str(request.rid), request.sampling_params
        sampling.temperature, sampling.top_p, sampling.top_k = 1.0, 0.95, 512
    tokens, _, batch = runner.extend(requests)
    runner.decode(tokens, batch)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path, default=Path(sys.prefix, FOLDER, KERNELS))
    parser.add_argument("--workers", type=int, default=2, help="recipes at a time")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # of one start, a process
    chosen = parser.parse_args()
    if chosen.rows:
        start(chosen.recipes[0], chosen.arch[0], chosen.rows)
        return 0
    begin = time.monotonic()
    recipes, architectures = chosen.recipes or gpu_recipes(), chosen.arch or ARCHITECTURES
    rows = compile_all(recipes, architectures, chosen.out.resolve(), chosen.workers)
    print(*report(rows), sep="\n")
    print(f"{len(recipes)} recipes, {time.monotonic() - begin:.0f} s in all, in {chosen.out}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
