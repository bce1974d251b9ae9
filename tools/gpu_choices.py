"""Makes configs/gpu_choices.json and docs/evidence/gpu-choices.md, without a GPU.

    PYTHONPATH=$PWD .venv/bin/python tools/gpu_choices.py --te build/gpu-profile

Engines: SGLang's own resolution of its server arguments, with the questions to the device answered
as the card of the recipe would (memory, compute capability, driver, FlashInfer installed).
Trainer ranks: `get_attention_backend` of Transformer Engine's Python sources.  Its compiled part is
replaced: cuDNN is taken to have a kernel, which is known on a GPU only.  A recipe is in the table
when it starts on CUDA as it is shipped, or with `cluster=gpu1`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import pkgutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from enum import IntEnum
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from moerl.config import Config, load_config, resolve
from moerl.config.clusters import Placement, placement, starts_on_cuda, takes_turns
from moerl.config.load import CONFIG_ROOT
from moerl.core.errors import ConfigError
from moerl.engine.weight_layout import engine_layout
from moerl.layout import ModelSpec, model_spec
from moerl.planning import gpu_choices
from moerl.planning.estimates import model_shapes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/evidence/gpu-choices.md"
SGLANG, TE = "0.5.23", "2.20.2"
ABOUT = f"SGLang {SGLANG}, Transformer Engine {TE}: docs/evidence/gpu-choices.md"
CUDNN = (9, 24, 0)  # of requirements/gpu.lock
# Name, MiB as nvidia-smi prints them, compute capability
DEVICES = {
    "H100": ("NVIDIA H100 80GB HBM3", 81559, (9, 0)),
    "H200": ("NVIDIA H200", 143771, (9, 0)),
    "B200": ("NVIDIA B200", 183359, (10, 0)),
}
Planned = tuple[str, Config, Placement, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--te", type=Path, required=True, help="folder with Transformer Engine")
    table = made(parser.parse_args().te)
    gpu_choices.FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(table), encoding="utf-8")


def made(te: Path) -> dict[str, Any]:
    every = list(planned())
    return {"about": ABOUT, "engines": engines(every), "trainers": trainers(every, te)}


def planned() -> Iterator[Planned]:
    """(name, settings, placement, config.json) of every recipe that starts on CUDA."""
    shared = (CONFIG_ROOT / "clusters/gpu1.yaml").exists()
    for file in sorted((CONFIG_ROOT / "recipes").glob("*.yaml")):
        for more in ((), ("cluster=gpu1",)) if shared else ((),):
            try:
                config = resolve(load_config(file.stem, more))
                placed = placement(config)
            except ConfigError:
                if more:
                    continue  # too large for one GPU
                raise
            if starts_on_cuda(config, placed) and not takes_turns(config.cluster):
                yield " ".join((file.stem, *more)), config, placed, model_shapes(config)


# --- engines -----------------------------------------------------------------------------------
def engines(every: list[Planned]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, config, placed, shapes in every:
        card = gpu_choices.card_of(placed.engines[0].node.group)
        for tp in sorted(set(config.engine.sizes.values())):
            args = gpu_choices.engine_arguments(config, placed, tp, Path(), shapes)
            key = gpu_choices.engine_key(card, args, shapes)
            if key not in rows:
                found = choices(resolved(card, args, shapes))
                rows[key] = {"recipes": [], "card": card, "tp": tp, "choices": found}
            rows[key]["recipes"].append(name)
    return rows


def choices(args: Mapping[str, Any]) -> dict[str, str]:
    """What an engine would run with.  args: resolved."""
    both = args["attention_backend"]
    graphs = args["cuda_graph_config"]
    return {
        "prefill": args["prefill_attention_backend"] or both,
        "decode": args["decode_attention_backend"] or both,
        "experts": args["moe_runner_backend"],
        "fp8 products": args["fp8_gemm_runner_backend"],
        "sampling": args["sampling_backend"],
        "KV cache": args["kv_cache_dtype"],
        "page": str(args["page_size"]),
        "prefill chunk": str(args["chunked_prefill_size"]),
        "decode graphs": _graphs(graphs["decode"]),
        "prefill graphs": _graphs(graphs["prefill"]),
    }


def _graphs(phase: Mapping[str, Any]) -> str:
    if phase["backend"] == "disabled":
        return "off"
    return f"{phase['backend']}: {len(phase['bs'])} sizes to {phase['max_bs']}"


def resolved(card: str, args: Mapping[str, Any], shapes: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's arguments after its own resolution.  Raises ConfigError for an unknown layout."""
    answer(card)
    import sglang
    from sglang.srt.server_args import ServerArgs

    numbers: dict[str, Any] = {"port": 30000, "nccl_port": 30001}
    numbers |= {"dist_init_addr": "127.0.0.1:30002"} if "dist_init_addr" in args else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shapes), encoding="utf-8")
        asked = ServerArgs(**{**args, **numbers, "model_path": folder})
        asked.resolve_once()
        found: dict[str, Any] = asked.resolved_dict()
    engine_layout(found, {}, shapes, release=sglang.__version__)
    return found


def answer(card: str) -> None:
    """Answer SGLang's questions to the device for the rest of this process."""
    _imported()
    import sglang.srt.utils.common as common
    import torch

    name, mib, capability = DEVICES[card]
    known = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=mib << 20,
        multi_processor_count=132,
    )  # fmt: skip
    for question, reply in {
        "is_available": True,
        "device_count": 8,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": known,
        "mem_get_info": (mib << 20, mib << 20),
    }.items():
        setattr(torch.cuda, question, lambda *_, reply=reply: reply)
    torch.version.cuda = "13.0"
    for probe in vars(common).values():
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()
    common.is_flashinfer_available = lambda: True
    common.get_nvgpu_memory_capacity = lambda: mib
    common.get_nvidia_driver_version_str = lambda: "580.95.05"


def _imported() -> None:
    """Import SGLang without a device, since with one it would load kernels."""
    from moerl.engine.plugin import entry_points

    entry_points.activate = lambda: "sglang.srt.platforms.cuda.CudaSRTPlatform"
    import sglang.srt.arg_groups as groups

    for module in pkgutil.walk_packages(groups.__path__, f"{groups.__name__}."):
        importlib.import_module(module.name)


# --- trainer ranks -------------------------------------------------------------------------------
def trainers(every: list[Planned], te: Path) -> dict[str, Any]:
    utils = te_utils(te)
    rows: dict[str, Any] = {}
    for name, config, placed, shapes in every:
        card = gpu_choices.card_of(placed.trainers[0].node.group)
        key = gpu_choices.trainer_key(card, config, shapes)
        if key not in rows:
            spec, sizes = model_spec(shapes), config.trainer.parallel
            found = te_backend(utils, card, config, spec)
            rows[key] = {"recipes": [], "card": card, "tp": sizes.tp, "cp": sizes.cp}
            rows[key] |= {"backend": found}
        rows[key]["recipes"].append(name)
    return rows


def te_backend(utils: ModuleType, card: str, config: Config, spec: ModelSpec) -> str:
    """Attention of a rank's layers; several where layers with a window differ from the others.

    Sizes as `TEDotProductAttention` of megatron-core 0.19.2 passes them on.
    """
    windows = {(-1, 0)}
    if spec.sliding_layers:
        windows.add((spec.sliding_window - 1, 0))
    return " and ".join(sorted({_backend(utils, card, config, spec, one) for one in windows}))


def _backend(
    utils: ModuleType, card: str, config: Config, spec: ModelSpec, window: tuple[int, int]
) -> str:
    import torch

    trainer, sizes = config.trainer, config.trainer.parallel
    packed = trainer.packing
    utils.get_device_compute_capability = lambda: DEVICES[card][2]  # type: ignore[attr-defined]
    utils.get_cudnn_version = lambda: CUDNN  # type: ignore[attr-defined]
    tokens = config.trainer.max_tokens_per_microbatch
    asked = utils.AttentionParams(
        qkv_dtype=torch.bfloat16 if trainer.dtype == "bf16" else torch.float32,
        qkv_layout="thd_thd_thd" if packed else "sbhd_sbhd_sbhd",
        num_heads=spec.heads // sizes.tp,
        num_gqa_groups=(spec.heads if spec.kv_lora else spec.kv_heads) // sizes.tp,
        max_seqlen_q=tokens,
        max_seqlen_kv=tokens,
        num_tokens_q=tokens,
        num_tokens_kv=tokens,
        head_dim_qk=spec.qk_nope + spec.qk_rope if spec.kv_lora else spec.head_dim,
        head_dim_v=spec.v_head if spec.kv_lora else spec.head_dim,
        attn_mask_type="padding_causal" if packed else "causal",
        window_size=window,
        softmax_type="learnable" if spec.sinks else "vanilla",
        context_parallel=sizes.cp > 1,
        cp_size=sizes.cp,
    )
    _, _, fused, _, unfused, _ = utils.get_attention_backend(asked)
    return "FusedAttention (cuDNN)" if fused else "unfused" if unfused else "none"


class FusedBackends(IntEnum):
    """Of Transformer Engine's compiled part."""

    No_Backend = -1
    F16_max512_seqlen = 0
    F16_arbitrary_seqlen = 1
    FP8 = 2


def te_utils(te: Path) -> ModuleType:
    """`transformer_engine.pytorch.attention.dot_product_attention.utils` of a folder.

    Its imports are stubs but for context_parallel.py beside it.  Raises SystemExit.
    """
    part = "transformer_engine/pytorch/attention/dot_product_attention/utils.py"
    places = (te, *te.glob("lib/python3.*/site-packages"))
    file = next((place / part for place in places if (place / part).is_file()), None)
    if file is None:
        raise SystemExit(f"tools/gpu_choices.py: {te} has no {part}")
    sys.meta_path.insert(0, _Stubs(file.parent))
    return importlib.import_module(f"{_DPA}.utils")


_DPA = "transformer_engine.pytorch.attention.dot_product_attention"


class _Stubs(Loader):
    """Finds Transformer Engine's modules: two as they are, the others as stubs."""

    def __init__(self, folder: Path) -> None:
        self._real = {f"{_DPA}.{name}": folder / f"{name}.py" for name in _REAL}

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> Any:
        if name in self._real:
            return importlib.util.spec_from_file_location(name, self._real[name])
        if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        return


_REAL = ("utils", "context_parallel")


class _Stub(ModuleType):
    FusedAttnBackend = FusedBackends
    __version__ = TE

    @staticmethod
    def get_fused_attn_backend(_asked: object) -> tuple[FusedBackends, str]:
        """As if cuDNN had a kernel for whatever Transformer Engine lets through."""
        return FusedBackends.F16_arbitrary_seqlen, ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


# --- the page ------------------------------------------------------------------------------------
def page(table: Mapping[str, Any]) -> str:
    columns = list(next(iter(table["engines"].values()))["choices"])
    lines = [
        "# Choices of SGLang and Transformer Engine on a GPU",
        "",
        "Made by `tools/gpu_choices.py`, without a GPU; a test makes it again. No GPU has run it.",
        "",
        f"SGLang {SGLANG}, by its own resolution of the server arguments that a recipe passes; the",
        "questions to the device are answered as this card would:",
        "",
        f"| recipe | card | tp | {' | '.join(columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
    ]
    for row in table["engines"].values():
        cells = [row["choices"][name] for name in columns]
        lines.append(f"| {_names(row)} | {row['card']} | {row['tp']} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Transformer Engine {TE}, by its own `get_attention_backend`. Whether cuDNN has the",
        "kernel that it is asked for is known on a GPU only:",
        "",
        "| recipe | card | tp | cp | attention |",
        "|---|---|---|---|---|",
    ]
    for row in table["trainers"].values():
        where = f"{row['card']} | {row['tp']} | {row['cp']}"
        lines.append(f"| {_names(row)} | {where} | {row['backend']} |")
    return "\n".join(lines) + "\n"


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}`" for name in row["recipes"])


if __name__ == "__main__":
    main()
