"""Adapters as folders of peft: gathered from all ranks, written, read.

Linear layers have `MODULE.lora_A.weight` and `.lora_B.weight` in a folder.  transformers keeps a
layer's experts in two parameters, and peft packs their factors (`target_parameters`): A [E * R, in]
with the expert slowest, B [out, R * E] with the expert fastest.  gate and up are one parameter,
whose factors are theirs on a diagonal: R is the sum of both ranks, and B is 0 off the diagonal.
rsLoRA and ranks of their own are written as alpha, so that a reader that knows alpha / r alone is
right.
Read at peft 0.21.2, tuners/lora/layer.py, and transformers 5.19.0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import fingerprint
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, ModelError
from moerl.core.json_files import read_json
from moerl.layout import ModelSpec, Op, at, hf_shapes, join, num_elements
from moerl.layout.adapters import (
    adapter_shapes,
    adapter_tiles,
    factor_names,
    module_of,
    whole_factors,
)
from moerl.layout.shards import stacked_forms
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import replace_folder, write_json
from moerl.weight_sync.adapters.sglang_adapter import sglang_form

_ROOT = "base_model.model."
_CONFIG, _FILE = "adapter_config.json", "adapter_model.safetensors"
_BASE_FILE = "base.json"  # of a folder that moerl wrote: its W0 by name and fingerprint
_ROUTER = (".mlp.gate", ".block_sparse_moe.gate")
_BLOCK = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")


class _Block(NamedTuple):
    """One weight of an expert inside the stack of its layer."""

    expert: int
    rows: slice  # of the stacked parameter
    module: str


@torch.no_grad()
def gather_factors(
    held: Mapping[str, Tensor],
    spec: ModelSpec,
    lora: LoraConfig,
    layout: ParallelConfig,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor] | None:
    """Whole factors on rank 0, None on the others; collective.  held: by Hugging Face name.

    group: of gloo; its ranks are numbered as in the layout.
    """
    rank = 0 if group is None else dist.get_rank(group)
    every = range(layout.world_size)
    shared = lora.shares
    sources = {r: adapter_tiles(spec, layout, r, lora.rank_of, shared=shared) for r in every}
    sinks = {0: whole_factors(spec, lora.rank_of, shared=shared)}
    plan: dict[int, list[Op]] = defaultdict(list)
    for op in join(sources, sinks, same_ranks=True):
        plan[op.src].append(op)
    dtype = next(iter(held.values())).dtype
    if rank:
        pieces = [held[op.src_name][at(op.src_box)].flatten() for op in plan[rank]]
        if pieces:
            dist.send(torch.cat(pieces).cpu().view(torch.uint8), group=group, group_dst=0)
        return None
    whole = {name: torch.empty(local.shape, dtype=dtype) for name, local in sinks[0].items()}
    for op in plan.pop(0):
        whole[op.dst_name][at(op.dst_box)] = held[op.src_name][at(op.src_box)].cpu()
    for src, ops in sorted(plan.items()):
        sizes = [num_elements(op.src_box) for op in ops]
        flat = torch.empty(sum(sizes), dtype=dtype)
        dist.recv(flat.view(torch.uint8), group=group, group_src=src)
        for op, piece in zip(ops, flat.split(sizes), strict=True):
            whole[op.dst_name][at(op.dst_box)] = piece.view([len(r) for r in op.dst_box])
    return whole


def save_adapter(
    folder: Path, factors: Mapping[str, Tensor], spec: ModelSpec, lora: LoraConfig, base: str
) -> None:
    """Write a folder that peft opens, replacing an old folder.  base: the model's folder.

    Raises ConfigError for ranks that peft cannot express.
    """
    factors = _by_expert(factors, spec, lora)
    stacks, forms = dict(_stacks(spec, lora)), stacked_forms(spec)
    stacked = {block.module for blocks in stacks.values() for block in blocks}
    linear = dict.fromkeys(name.rpartition(".")[0] for name in factors)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for module in linear.keys() - stacked:
        tensors |= {f"{_ROOT}{module}.lora_{x}.weight": factors[f"{module}.lora_{x}"] for x in "AB"}
        ranks[module] = len(factors[f"{module}.lora_A"])
    for name, blocks in stacks.items():
        packed = _pack(blocks, forms[name][0][1], factors, spec)
        tensors |= {f"{_ROOT}{_wrapper(name, stacks)}.lora_{x}.weight": packed[x] for x in "AB"}
        ranks[name] = sum(lora.rank_of(block.module) for block in blocks if block.expert == 0)
    parameters = [f"{m}.weight" for m in linear if m not in stacked and _is_named(m, spec)]
    ranks |= {name: ranks[module_of(name)] for name in parameters}
    modules = [m for m in linear if m not in stacked and not _is_named(m, spec)]
    config = _peft_config(modules, [*parameters, *stacks], ranks, lora, base)
    write_adapter(folder, tensors, config)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Replace a folder by one with these tensors and this adapter_config.json."""
    fresh = folder.with_name(f".{folder.name}.new")
    fresh.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, fresh / _FILE, {"format": "pt"})
    write_json(fresh / _CONFIG, dict(config))
    replace_folder(folder, fresh)


def save_sglang_adapter(
    folder: Path, factors: Mapping[str, Tensor], spec: ModelSpec, lora: LoraConfig, base: str
) -> None:
    """Write a folder that SGLang opens (`--lora-paths`), replacing a folder of the same name."""
    tensors, config = sglang_form(factors, spec, lora)
    write_adapter(folder, tensors, config | {"base_model_name_or_path": base})


def load_adapter(folder: Path, spec: ModelSpec, lora: LoraConfig) -> dict[str, Tensor]:
    """Whole factors from a folder of peft, also from one where gate and up share A.

    Raises ModelError for a folder that is not an adapter of this model with these settings.
    """
    try:
        found, config = load_file(folder / _FILE), read_json(folder / _CONFIG)
    except OSError as error:
        raise ModelError(f"{folder}: not an adapter of peft: {error}") from error
    _check_scale(folder, config, lora)
    stacks = dict(_stacks(spec, lora))
    factors: dict[str, Tensor] = {}
    for name, blocks in stacks.items():
        path = f"{_ROOT}{_wrapper(name, stacks)}"
        packed = {x: _taken(found, f"{path}.lora_{x}.weight", folder) for x in "AB"}
        factors |= _unpack(folder, blocks, packed, spec, lora)
    wanted = adapter_shapes(hf_shapes(spec), lora.rank_of)
    for name in wanted.keys() - factors.keys():
        factors[name] = _taken(found, f"{_ROOT}{name}.weight", folder)
    for name, shape in wanted.items():
        if tuple(factors[name].shape) != shape:
            raise ModelError(
                f"{folder}: {name} has shape {tuple(factors[name].shape)}, lora.* says {shape}"
            )
    if found:
        raise ModelError(f"{folder}: {min(found)} is no target of lora.targets")
    return _as_kept(folder, {name: factors[name] for name in wanted}, lora)


# --- factors that experts share -------------------------------------------------------------------
def _by_expert(
    factors: Mapping[str, Tensor], spec: ModelSpec, lora: LoraConfig
) -> dict[str, Tensor]:
    """Copy factors that experts share: peft has a pair for each expert."""
    return {
        own: factors[name]
        for module in {n.rpartition(".")[0] for n in adapter_shapes(hf_shapes(spec), lora.rank_of)}
        for own, name in zip(
            factor_names(module, shared=False),
            factor_names(module, shared=lora.shares),
            strict=True,
        )
    }


def _as_kept(folder: Path, factors: Mapping[str, Tensor], lora: LoraConfig) -> dict[str, Tensor]:
    """Raises ModelError where copies of a shared factor differ."""
    kept: dict[str, Tensor] = {}
    for own, factor in factors.items():
        module, _, which = own.rpartition(".lora_")
        name = factor_names(module, shared=lora.shares)["AB".index(which)]
        if not torch.equal(kept.setdefault(name, factor), factor):
            raise ModelError(f"{folder}: {own} differs between experts, lora.experts is shared")
    return kept


# --- packed experts -------------------------------------------------------------------------------
def _stacks(spec: ModelSpec, lora: LoraConfig) -> Iterator[tuple[str, list[_Block]]]:
    """Stacked parameters with their targets, which are the same for every expert."""
    for name, (_, places) in stacked_forms(spec).items():
        blocks = [
            _Block(box[0].start, slice(box[1].start, box[1].stop), module_of(part))
            for part, box in places.items()
            if lora.rank_of(module_of(part))
        ]
        kinds = {
            tuple((b.rows.start, lora.rank_of(b.module)) for b in blocks if b.expert == expert)
            for expert in range(spec.experts)
        }
        if len(kinds) > 1:
            raise ConfigError(
                "lora.ranks",
                lora.ranks,
                f"peft has one rank for all experts of {name}; use the same for each",
            )
        if blocks:
            yield name, blocks


def _wrapper(name: str, stacks: Mapping[str, Any]) -> str:
    """Where peft keeps the factors of a parameter: wrappers are nested, the last one outside."""
    module = name.rpartition(".")[0]
    own = [other for other in stacks if other.rpartition(".")[0] == module]
    return module + ".base_layer" * (len(own) - 1 - own.index(name))


def _pack(
    blocks: list[_Block], rows: int, factors: Mapping[str, Tensor], spec: ModelSpec
) -> dict[str, Tensor]:
    """One expert's factors on a diagonal, then all experts.  rows: of the stacked parameter."""
    every_a, every_b = [], []
    for expert in range(spec.experts):
        own = [block for block in blocks if block.expert == expert]
        every_a.append(torch.cat([factors[f"{block.module}.lora_A"] for block in own]))
        b, first = every_a[-1].new_zeros(rows, len(every_a[-1])), 0
        for block in own:
            part = factors[f"{block.module}.lora_B"]
            b[block.rows, first : first + part.shape[1]] = part
            first += part.shape[1]
        every_b.append(b)
    return {"A": torch.cat(every_a), "B": torch.stack(every_b, -1).flatten(1)}


def _unpack(
    folder: Path,
    blocks: list[_Block],
    packed: Mapping[str, Tensor],
    spec: ModelSpec,
    lora: LoraConfig,
) -> dict[str, Tensor]:
    every_a = packed["A"].unflatten(0, (spec.experts, -1))
    every_b = packed["B"].unflatten(1, (-1, spec.experts))
    ranks = [lora.rank_of(block.module) for block in blocks if block.expert == 0]
    shares = len(ranks) > 1 and set(ranks) == {every_a.shape[1]}
    if not shares and sum(ranks) != every_a.shape[1]:
        raise ModelError(
            f"{folder}: experts have rank {every_a.shape[1]}, lora.* says {sum(ranks)}"
        )
    factors: dict[str, Tensor] = {}
    first = 0
    for block in blocks:
        rank = lora.rank_of(block.module)
        first = 0 if shares or block.rows.start == 0 else first
        cut = slice(first, first + rank)
        b = every_b[block.rows, :, block.expert]
        if not shares and b[:, :first].any() | b[:, first + rank :].any():
            raise ModelError(f"{folder}: {block.module} reads the rank of another projection")
        factors[f"{block.module}.lora_A"] = every_a[block.expert, cut]
        factors[f"{block.module}.lora_B"] = b[:, cut]
        first += rank
    return factors


# --- peft's config --------------------------------------------------------------------------------
def _is_named(module: str, spec: ModelSpec) -> bool:
    """Whether a module is named in `target_parameters`, with the same tensors.

    In `target_modules` peft 0.21.2 would take dense and shared blocks of every model with experts
    for projections of those (`_convert_peft_config_moe`); routers are no linear layers.
    """
    return bool(spec.experts) and module.endswith((*_BLOCK, *_ROUTER))


def _peft_config(
    modules: list[str],
    parameters: list[str],
    ranks: Mapping[str, int],
    lora: LoraConfig,
    base: str,
) -> dict[str, Any]:
    named = {*modules, *parameters}
    other = {name: rank for name, rank in ranks.items() if rank != lora.rank and name in named}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "rank_pattern": other,
        "alpha_pattern": {name: lora.scale * rank for name, rank in other.items()},
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "target_parameters": parameters or None,
    }


def _check_scale(folder: Path, config: Mapping[str, Any], lora: LoraConfig) -> None:
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    for name in ("", *ranks, *alphas):
        rank, alpha = ranks.get(name, config["r"]), alphas.get(name, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isclose(scale, lora.scale, rel_tol=1e-9):
            raise ModelError(
                f"{folder}: its scale is {scale} ({name or 'r and lora_alpha'}), lora.* says "
                f"{lora.scale}"
            )
    for feature in ("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save"):
        if config.get(feature):
            raise ModelError(f"{folder}: {feature} = {config[feature]} is not supported")


def _taken(tensors: dict[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in tensors:
        raise ModelError(f"{folder}: tensor {name} is missing")
    return tensors.pop(name)


# --- which weights an adapter belongs to ----------------------------------------------------------
def note_base(folder: Path, base: Path) -> None:
    """Note the W0 of the adapter in `folder`: other weights would load it silently."""
    write_json(folder / _BASE_FILE, {"model": str(base), "fingerprint": fingerprint(base)})


def check_base(folder: Path, base: Path) -> None:
    """Raises ModelError where the adapter names other weights; folders of others name none."""
    if not (folder / _BASE_FILE).is_file():
        return
    noted, found = read_json(folder / _BASE_FILE), fingerprint(base)
    if noted["fingerprint"] != found:
        raise ModelError(
            f"{folder}: it belongs to weights with the fingerprint {noted['fingerprint']} "
            f"({noted['model']}), {base} has {found}"
        )


def start_factors(lora: LoraConfig, source: HfFolder) -> dict[str, Tensor]:
    """Whole factors of `lora.start`.  source: W0.  Raises ModelError."""
    folder = Path(lora.start)
    check_base(folder, source.path)
    return load_adapter(folder, source.spec, lora)
