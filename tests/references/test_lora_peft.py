"""peft on transformers against ranks of the trainer, its folders against ours.

Each layout is compared with peft itself, not with a single rank of ours.  More layouts and forms
are compared with the oracle of tests/multi/test_lora_parity.py, which is peft's here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.core.errors import ModelError
from moerl.trainer.hf_io.adapter_files import load_adapter, save_adapter
from tests.helpers.lora_oracle import (
    FAMILIES,
    LIMIT,
    LORA,
    Found,
    Trained,
    by_autograd,
    mean_nll,
    open_transformers,
    random_factors,
    read_spec,
    write_model,
)

EXACT = torch.float64  # in fp32 two orders of the same sums are 3e-5 apart in latent attention
SHARED = LoraConfig(rank=4, alpha=8, experts="shared")
SETTINGS = {
    "ranks": LORA,
    "one rank": LoraConfig(rank=4, alpha=8),
    "rslora": LoraConfig(rank=4, alpha=8, rslora=True),
    "attention": LoraConfig(rank=4, alpha=8, targets=["*.self_attn.*_proj*"]),
    "routers and head": LoraConfig(rank=4, alpha=8, targets=["*_proj", "*.mlp.gate", "lm_head"]),
    "down": LoraConfig(rank=2, targets=["*.down_proj"]),
}


RANKS = ("tp2", "ep2", "pp2", "cp2", "pp2-tp2-ep2", "cp2-ep2-tp2")
WRONG = {"scale": "ep2", "next_expert": "ep2", "other_a": "tp2", "other_b": "tp2"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_model(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def _opened(model: Path, adapter: Path) -> PeftModel:
    return PeftModel.from_pretrained(
        open_transformers(model, EXACT), adapter, is_trainable=True, autocast_adapter_dtype=False
    ).to(EXACT)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_opens_the_folder_and_has_loss_and_gradients(
    models: dict[str, Path], tmp_path: Path, family: str, settings: str
) -> None:
    model, lora = models[family], SETTINGS[settings]
    spec, factors = read_spec(model), random_factors(model, lora)
    loss, grads = by_autograd(model, factors, lora.scale, EXACT)
    ones = {name: torch.ones_like(value) for name, value in grads.items()}
    for name, values in (("adapter", factors), ("grads", grads), ("ones", ones)):
        save_adapter(tmp_path / name, values, spec, lora, str(model))
    theirs = Theirs.of(model, tmp_path / "adapter")
    assert abs(theirs.loss - loss) <= LIMIT * loss
    gaps = theirs.gaps(_tensors(tmp_path / "grads"), _tensors(tmp_path / "ones"))
    assert max(gaps.values()) <= LIMIT, max(gaps, key=gaps.__getitem__)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    return {name: Compared(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


class Compared:
    """Ranks of the trainer in fp32, and peft in fp64 with the same factors."""

    def __init__(self, folder: Path, family: str) -> None:
        self.case, self.folder = Trained(folder, family), folder
        self._save("adapter", self.case.factors)
        self._save("ones", {n: torch.ones_like(v) for n, v in self.case.factors.items()})
        self.theirs = Theirs.of(self.case.model, folder / "adapter")

    def gaps(self, layout: str, **settings: str) -> dict[str, float]:
        """Of the loss and of each of peft's parameters, relative."""
        found: Found = self.case.run(layout, **settings)
        self._save("grads", found["grads"])
        gaps = self.theirs.gaps(_tensors(self.folder / "grads"), _tensors(self.folder / "ones"))
        return gaps | {"loss": abs(found["loss"] - self.theirs.loss) / self.theirs.loss}

    def _save(self, name: str, values: dict[str, Tensor]) -> None:
        model = self.case.model
        save_adapter(self.folder / name, values, read_spec(model), self.case.lora, str(model))


@dataclass(frozen=True)
class Theirs:
    """Loss of peft, and the gradients of its parameters."""

    loss: float
    grads: dict[str, Tensor]

    @classmethod
    def of(cls, model: Path, adapter: Path) -> Theirs:
        opened = _opened(model, adapter)
        loss = mean_nll(opened)
        loss.backward()
        named = [(name, param) for name, param in opened.named_parameters() if "lora_" in name]
        grads = {name.replace(".default", ""): param.grad for name, param in named}
        return cls(float(loss.detach()), grads)

    def gaps(self, grads: dict[str, Tensor], mask: dict[str, Tensor]) -> dict[str, float]:
        """Relative to the largest gradient of all.  mask: 0 where a parameter has no factor."""
        assert self.grads.keys() == grads.keys()
        largest = max(float((g * mask[name]).abs().max()) for name, g in self.grads.items())
        return {
            name: float((self.grads[name] * mask[name] - value).abs().max()) / largest
            for name, value in grads.items()
        }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", RANKS)
def test_ranks_have_the_loss_and_gradients_of_peft(
    ranks: dict[str, Compared], layout: str, family: str
) -> None:
    """Attention and each expert, grouped-query and latent attention."""
    gaps = ranks[family].gaps(layout)
    loss = gaps.pop("loss")
    experts = max(gap for name, gap in gaps.items() if ".experts." in name)
    attention = max(gap for name, gap in gaps.items() if ".self_attn." in name)
    worst = max(gaps, key=gaps.__getitem__)
    print(f"{family} {layout}: loss {loss:.1e}, attention {attention:.1e}, experts {experts:.1e}")
    assert loss <= LIMIT
    assert gaps[worst] <= LIMIT, f"{worst}: {gaps[worst]:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", WRONG)
def test_ranks_with_a_wrong_adapter_do_not(
    ranks: dict[str, Compared], broken: str, family: str
) -> None:
    """The neighbour expert's adapter, A or B of another rank, a scale that is 1 % off."""
    gaps = ranks[family].gaps(WRONG[broken], broken=broken)
    print(f"{family} {broken}: loss {gaps['loss']:.1e}, worst {max(gaps.values()):.1e}")
    assert max(gaps.values()) > 100 * LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_factors_that_experts_share_are_copies_in_peft(
    models: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """The sum of the gradients of the copies is the gradient of the one."""
    model = models[family]
    spec, factors = read_spec(model), random_factors(model, SHARED)
    loss, grads = by_autograd(model, factors, SHARED.scale, EXACT)
    save_adapter(tmp_path / "adapter", factors, spec, SHARED, str(model))
    opened = _opened(model, tmp_path / "adapter")
    found = mean_nll(opened)
    found.backward()
    assert abs(float(found.detach()) - loss) <= LIMIT * loss
    largest = max(float(value.abs().max()) for value in grads.values())
    for name, param in opened.named_parameters():
        layer = name.removeprefix("base_model.model.").partition(".experts.")[0] + ".experts"
        if name.endswith("experts.base_layer.lora_A.default.weight"):
            own = param.grad.unflatten(0, (spec.experts, -1)).sum(0)
            want = torch.cat([grads[f"{layer}.{x}_proj.lora_A"] for x in ("gate", "up")])
        elif name.endswith("experts.lora_B.default.weight"):
            own = param.grad.unflatten(1, (-1, spec.experts)).sum(-1)
            want = grads[f"{layer}.down_proj.lora_B"]
        else:
            continue
        assert float((own - want).abs().max()) <= LIMIT * largest, name


@pytest.mark.parametrize("lora", [LORA, SHARED], ids=["per expert", "shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_comes_back_as_it_was(
    models: dict[str, Path], tmp_path: Path, family: str, lora: LoraConfig
) -> None:
    spec, factors = read_spec(models[family]), random_factors(models[family], lora)
    save_adapter(tmp_path / "adapter", factors, spec, lora, "base")
    back = load_adapter(tmp_path / "adapter", spec, lora)
    assert back.keys() == factors.keys()
    assert all(torch.equal(back[name], factors[name]) for name in factors)


def test_experts_that_differ_are_no_shared_factor(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["qwen3_moe"]
    each = replace(SHARED, experts="per_expert")
    save_adapter(tmp_path / "a", random_factors(model, each), read_spec(model), each, "base")
    with pytest.raises(ModelError, match=r"differs between experts, lora\.experts is shared"):
        load_adapter(tmp_path / "a", read_spec(model), SHARED)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_peft_trained_is_read(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    """peft's own form: gate and up of an expert share A."""
    lora = replace(SETTINGS["one rank"], targets=["*.self_attn.*_proj*", "*.mlp.experts.*"])
    spec = read_spec(models[family])
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if family == "deepseek_v3":
        modules = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    config = PeftConfig(
        r=4,
        lora_alpha=8,
        target_modules=modules,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    theirs = get_peft_model(open_transformers(models[family]), config)
    for name, param in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.2)
    theirs.save_pretrained(tmp_path)
    assert get_peft_model_state_dict(theirs)
    factors = load_adapter(tmp_path, spec, lora)
    loss, _ = by_autograd(models[family], factors, lora.scale)
    want = float(mean_nll(theirs))
    assert abs(loss - want) <= LIMIT * want
    plain = float(mean_nll(open_transformers(models[family])))
    assert abs(plain - want) > 100 * LIMIT


def test_a_wrong_folder_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["qwen3_moe"]
    spec, factors = read_spec(model), random_factors(model)
    save_adapter(tmp_path / "adapter", factors, spec, LORA, str(model))
    with pytest.raises(ModelError, match=r"its scale is 2\.0"):
        load_adapter(tmp_path / "adapter", spec, replace(LORA, alpha=4))
    with pytest.raises(ModelError, match=r"lora\.\* says"):
        load_adapter(tmp_path / "adapter", spec, replace(LORA, ranks={}))
    with pytest.raises(ModelError, match="is no target"):
        load_adapter(tmp_path / "adapter", spec, replace(LORA, targets=["*.q_proj"]))
    tensors = _tensors(tmp_path / "adapter")
    tensors.popitem()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="is missing"):
        load_adapter(tmp_path / "adapter", spec, LORA)


def test_experts_packed_in_another_order_are_noticed(
    models: dict[str, Path], tmp_path: Path
) -> None:
    model = models["qwen3_moe"]
    factors = random_factors(model)
    loss, _ = by_autograd(model, factors, LORA.scale)
    save_adapter(tmp_path / "adapter", factors, read_spec(model), LORA, str(model))
    tensors = _tensors(tmp_path / "adapter")
    for name, value in tensors.items():
        if ".experts." in name and "lora_B" in name:  # the expert slowest, as in A
            tensors[name] = value.unflatten(1, (-1, 8)).mT.flatten(1).contiguous()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    found = float(mean_nll(_opened(model, tmp_path / "adapter")))
    assert abs(found - loss) > 100 * LIMIT * loss
