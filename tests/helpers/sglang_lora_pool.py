"""What SGLang's own LoRA manager puts into its memory pool from a folder of `adapter/sglang`.

    sglang_lora_pool.py FOLDER          writes FOLDER/found.json

One process plays all ranks, as `tests.helpers.sglang_oracle` does.  An adapter is copied into it
in the first forward pass that needs it; here that copy is called.  Wrong names and shapes raise
there, and end the scheduler of a live engine.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from moerl.config.lora_settings import LoraConfig

LORA = LoraConfig(rank=4, alpha=6, rslora=True, ranks={"*.experts.*": 2})
WIDE = {"moe_intermediate_size": 64}  # on a CPU SGLang pads experts of less than 32 x tp
FAMILIES = ("qwen3_moe", "deepseek_v3")
LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}}


def main(folder: Path) -> None:
    os.environ["SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"] = "0"
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    found = {}
    for family in FAMILIES:
        model = _model(folder / family, family)
        found |= _family(model, family)
    (folder / "found.json").write_text(json.dumps(found))


def _model(folder: Path, family: str) -> Path:
    from tests.helpers.sglang_oracle import MODELS, write_model

    kind, change = MODELS[family]
    write_model(folder, kind, change | WIDE)
    return folder


def _family(model: Path, family: str) -> dict[str, Any]:
    from moerl.trainer.hf_io.adapter_files import save_adapter, write_adapter
    from moerl.weight_sync.adapters.sglang_adapter import sglang_form
    from tests.helpers.lora_oracle import random_factors, read_spec

    spec, factors = read_spec(model), random_factors(model, LORA)
    tensors, config = sglang_form(factors, spec, LORA)
    write_adapter(model / "sglang", tensors, config)
    save_adapter(model / "peft", factors, spec, LORA, str(model))
    short = {
        name: t[:-1] if name.endswith("o_proj.lora_A.weight") else t for name, t in tensors.items()
    }
    write_adapter(model / "short", short, config)
    want = {
        module: LORA.scale * factors[f"{module}.lora_B"] @ factors[f"{module}.lora_A"]
        for module in {name.rpartition(".")[0] for name in factors}
    }
    found: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        for rank in range(sizes.get("tp", 1)):
            found[f"{family}-{layout}-{rank}"] = _filled(model, "sglang", config, sizes, rank, want)
    for control in ("peft", "short"):
        found[f"{family}-{control}"] = _filled(model, control, config, {}, 0, want)
    return found


def _filled(
    model: Path,
    name: str,
    config: dict[str, Any],
    sizes: dict[str, int],
    rank: int,
    want: dict[str, Any],
) -> dict[str, Any]:
    """The error of a copy into the pool, or how far its products are from those wanted."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.lora_registry import LoRARef

    from moerl.engine.plugin.adapter_hooks import NoPinnedMemory
    from tests.helpers.sglang_oracle import Case, opened

    args = Case(model.name, sizes.get("tp", 1), sizes.get("ep", 1), dtype="float32").server_args
    more = {"enable_lora": True, "lora_backend": "torch_native", "max_lora_rank": config["r"]}
    more["lora_target_modules"] = config["target_modules"]
    try:
        with opened(model, args | more, rank) as engine, NoPinnedMemory():
            manager = LoRAManager(
                engine.model,
                engine.config.hf_config,
                2,
                LoadConfig(),
                engine.config.dtype,
                engine.server_args,
                lora_backend="torch_native",
                max_lora_rank=config["r"],
                target_modules=config["target_modules"],
            )
            ref = LoRARef(lora_name="policy", lora_path=str(model / name), pinned=False)
            told = manager.load_lora_adapter(ref)
            if not told.success:
                return {"error": f"load: {told.error_message}"}
            manager.fetch_new_loras({ref.lora_id})
            if sizes:
                return {"error": ""}
            more_scale = {module: 1.01 * product for module, product in want.items()}
            gaps = [_gap(manager.memory_pool, ref.lora_id, w, config) for w in (want, more_scale)]
            return {"error": "", "gap": gaps[0], "wrong_scale": gaps[1]}
    except (ValueError, AssertionError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _gap(pool: Any, uid: str, want: dict[str, Any], config: dict[str, Any]) -> float:
    """Largest difference of the products in the pool, over all modules; each must be there."""
    slot, rank = pool.get_buffer_id(uid), config["r"]
    scale, gaps = config["lora_alpha"] / rank, []
    for module, product in want.items():
        layer = int(module.split(".")[2])
        target, place, parts = _where(module)
        a, b = pool.A_buffer[target][layer][slot], pool.B_buffer[target][layer][slot]
        if ".experts." in module:  # B holds the scale
            expert = int(module.split(".experts.")[1].split(".")[0])
            a, b, factor = a[expert], b[expert], 1.0
        else:
            factor = scale
        rows = [len(want[part]) if part in want else 0 for part in parts]
        first = sum(rows[:place])
        part_a = a[place * rank : (place + 1) * rank]
        part_b = b[first : first + rows[place], :rank]
        gaps.append(float((factor * part_b @ part_a - product).abs().max()))
    return max(gaps)


def _where(module: str) -> tuple[str, int, list[str]]:
    """Name of the buffer of a module, its place in the stack, and the modules of the stack."""
    parent, _, leaf = module.rpartition(".")
    stacks = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    for name, stack in stacks.items():
        if leaf in stack:
            target, place, parts = name, stack.index(leaf), [f"{parent}.{one}" for one in stack]
            break
    else:
        target, place, parts = leaf, 0, [module]
    return target + ("_moe" if ".experts." in module else ""), place, parts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
