"""Gradients of the new families on one rank against transformers, in fp32.

Logits see a wrong value, not a gradient that is lost on the way to a weight: a router whose choice
is forced, an expert that scales its input, a delta net.  Routes are replayed in both, so the loss
is that of a training step.  Workers are this file run as a program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moerl.layout import model_spec
from tests.helpers.layout_families import FAMILIES, NUM_TOKENS, run, tokens, write
from tests.helpers.nested_model import nest
from tests.helpers.patience import patience

pytestmark = pytest.mark.full

TESTED = ("minimax_m2", "ernie4_5_moe", "llama4", "qwen3_next")
TOLERANCE = 2e-5  # of the largest gradient of the model


def routes_of(family: str, shift: int = 0) -> dict[int, Any]:
    """Layer -> [tokens in the order s * B + b, K] distinct experts, random."""
    import torch

    spec = model_spec(FAMILIES[family])
    generator = torch.Generator().manual_seed(5)
    rows = {}
    for layer in spec.moe_layers:
        scores = torch.rand(2 * NUM_TOKENS, spec.experts, generator=generator)
        rows[layer] = (scores.topk(spec.experts_per_token).indices + shift) % spec.experts
    return rows


def write_gradients(folder: Path) -> None:
    """Models and their gradients by transformers, with forced routes."""
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in TESTED:
        config, spec = FAMILIES[family], model_spec(FAMILIES[family])
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="eager"
        )
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" not in name:
                    centre = float("norm" in name and not spec.zero_centred_norm)
                    tensor.copy_(centre + 0.15 * torch.randn_like(tensor))
        model.save_pretrained(folder / family)
        with forced(routes_of(family)):
            logits = model(tokens(config["vocab_size"]), use_cache=False).logits
        loss(logits, config["vocab_size"]).backward()
        with torch.no_grad():  # a saved model whose values are gradients has the names of a file
            for parameter in model.parameters():
                grad = parameter.grad
                parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
        model.save_pretrained(folder / f"{family}.grads")
        nest(folder / family, config)
        nest(folder / f"{family}.grads", config)
        assert load_file(folder / f"{family}.grads/model.safetensors")
        save_file({"loss": loss(logits, config["vocab_size"]).detach()}, folder / f"{family}.loss")


def loss(logits: Any, vocab: int) -> Any:
    """Of the next tokens; logits [2, tokens, vocabulary, maybe padded]."""
    ids = tokens(vocab)
    return -logits[:, :-1, :vocab].log_softmax(-1).gather(2, ids[:, 1:, None]).sum()


@contextmanager
def forced(routes: dict[int, Any]) -> Iterator[None]:
    """The n-th top-k over all experts in a forward pass is that of the n-th routed layer."""
    import torch
    from torch.overrides import TorchFunctionMode

    pending = list(routes.values())

    class Force(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if func not in (torch.topk, torch.Tensor.topk):
                return found
            ids = pending.pop(0)  # in order s * B + b; transformers has b * S + s
            ids = ids.unflatten(0, (NUM_TOKENS, 2)).transpose(0, 1).flatten(0, 1)
            return torch.return_types.topk((args[0].gather(-1, ids), ids))

    with Force():
        yield
    assert not pending, f"{len(pending)} layers asked for no experts"


def compare_gradients(folder: Path) -> dict[str, dict[str, float]]:
    """Family -> the largest distance, of the largest gradient, with right and with wrong routes."""
    from moerl.trainer.model import platform

    place = platform.prepare("cpu")
    from moerl.config.schema import ParallelConfig
    from moerl.trainer.model import parallel

    ranks = parallel.start(ParallelConfig(), place, timeout_s=patience(60))
    return {
        family: {
            "replayed": gradient_gap(folder, family, ranks, 0),
            "control": gradient_gap(folder, family, ranks, 1),
            "packed": packed_gap(folder, family, ranks) if family == "qwen3_next" else 0.0,
        }
        for family in TESTED
    }


def gradient_gap(folder: Path, family: str, ranks: Any, shift: int) -> float:
    import torch

    from moerl.trainer.hf_io.hf_folder import HfFolder
    from moerl.trainer.model.replay import Mode

    model = loaded(folder, family, ranks)
    vocab = model.spec.vocab_size
    ids = tokens(vocab)
    model.replay.load(0, routes_of(family, shift))
    with model.replay.forward(0, Mode.REPLAY):
        logits = model.module(ids, torch.arange(NUM_TOKENS).expand_as(ids), None)
    model.replay.bind(logits, 0)
    loss(logits, vocab).backward()
    assert model.replay.finish_step() == 1.0
    wants, largest, gap = HfFolder(folder / f"{family}.grads"), 0.0, 0.0
    live = dict(model.gpt.named_parameters())
    for name, local in model.tiles.items():
        if name not in live:
            continue  # a router's bias, which is no parameter
        for tile in local.tiles:
            want = wants.read(tile.hf, tile.hf_box)
            grad = live[name].grad[tuple(slice(r.start, r.stop, r.step) for r in tile.box)]
            largest = max(largest, float(want.abs().max()))
            gap = max(gap, float((grad.reshape(want.shape) - want).abs().max()))
    return gap / largest


def loaded(folder: Path, family: str, ranks: Any) -> Any:
    from moerl.config.schema import TrainerConfig
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.model.gpt import build, live_tensors

    source = HfFolder(folder / family)
    model = build(source.spec, TrainerConfig(parallel=ranks.sizes), ranks, with_replay=True)
    load_hf(live_tensors(model.gpt), model.tiles, source)
    return model


def packed_gap(folder: Path, family: str, ranks: Any) -> float:
    """Two rollouts in one packed row against each alone: logits."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from moerl.trainer.model.replay import Mode

    model = loaded(folder, family, ranks)
    row = tokens(model.spec.vocab_size)[:1]
    lengths = torch.tensor([10, NUM_TOKENS - 10], dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0).int(), (1, 0))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
    )
    positions = torch.cat([torch.arange(int(n)) for n in lengths])[None]
    with torch.no_grad(), model.replay.forward(0, Mode.OFF):
        together = model.module(row, positions, None, packed_seq_params=packed)[0]
    gap, first = 0.0, 0
    for length in map(int, lengths):
        part = row[:, first : first + length]
        with torch.no_grad(), model.replay.forward(0, Mode.OFF):
            alone = model.module(part, torch.arange(length)[None], None)[0]
        gap = max(gap, float((together[first : first + length] - alone).abs().max()))
        first += length
    return gap


@pytest.fixture(scope="module")
def gaps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("gradients")
    write(str(folder), program=__file__)
    found: dict[str, dict[str, float]] = json.loads(run("compare", str(folder), program=__file__))
    return found


@pytest.mark.parametrize("family", TESTED)
def test_gradients_of_replayed_routes_are_those_of_transformers(
    gaps: dict[str, dict[str, float]], family: str
) -> None:
    assert gaps[family]["replayed"] <= TOLERANCE
    assert gaps[family]["control"] > 1000 * TOLERANCE, "other routes have other gradients"


def test_a_packed_row_computes_what_its_rollouts_do(gaps: dict[str, dict[str, float]]) -> None:
    assert gaps["qwen3_next"]["packed"] <= TOLERANCE


if __name__ == "__main__":
    task, target = sys.argv[1:]
    if task == "write":
        write_gradients(Path(target))
    else:
        print(json.dumps(compare_gradients(Path(target))))
