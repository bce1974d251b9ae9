"""Torch code in place of SGLang's kernels, by family: against plain formulas, and its table.

Also the tiny models of all families.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from importlib.metadata import entry_points as entry_points_of
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from moerl.config.schema import EngineConfig, TinyModel
from moerl.core.errors import ConfigError, EngineError
from moerl.engine.host import cpu_kernels
from moerl.engine.host.server_args import arguments, check_planned_layout
from moerl.engine.plugin import entry_points
from moerl.engine.plugin.hooks import When
from moerl.engine.protocol import model_type_of
from moerl.layout import FAMILIES, model_spec
from moerl_cpu_sglang import (
    all_heads_norm,
    attention_sinks,
    delta_net_kernels,
    llama4,
    registry,
    shared_expert_gate,
)
from tests.helpers.tiny_families import (
    FAMILY_FIELDS,
    family_config,
    make_family_model,
    recipe_shape,
)


# --- functions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("two_dimensional", [False, True])
def test_gate_of_a_shared_expert(two_dimensional: bool) -> None:
    torch.manual_seed(0)
    x, shared, output = torch.randn(3, 5, 8)
    gate = torch.randn(1, 8) if two_dimensional else torch.randn(8)
    want = torch.stack(
        [
            o + s / (1 + torch.exp(-(row * gate).sum()))
            for o, s, row in zip(output, shared, x, strict=True)
        ]
    )
    shared_expert_gate.add_gated(x, gate, shared, output)
    torch.testing.assert_close(output, want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_over_all_heads(ranks: int) -> None:
    torch.manual_seed(ranks)
    q, k, q_weight, k_weight = torch.randn(5, 8), torch.randn(5, 4), torch.randn(8), torch.randn(4)
    parts = list(zip(*(x.chunk(ranks, -1) for x in (q, k, q_weight, k_weight)), strict=True))
    sums = sum(all_heads_norm.sums_of_squares(*part[:2]) for part in parts)
    assert len(sums) == 12, "padded to a multiple of four"
    found = [all_heads_norm.normalise(*part, sums, ranks, 1e-6) for part in parts]
    for x, weight, *pieces in zip((q, k), (q_weight, k_weight), *found, strict=True):
        want = torch.nn.functional.rms_norm(x, x.shape[1:], weight, 1e-6)
        torch.testing.assert_close(torch.cat(pieces, -1), want)


class Chosen(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def test_an_expert_of_llama4_reads_scaled_tokens() -> None:
    torch.manual_seed(0)
    x, weights, ids = torch.randn(5, 8), torch.rand(5, 1), torch.arange(5)[:, None]
    seen: list[Chosen] = []

    def experts(hidden: torch.Tensor, chosen: Chosen) -> torch.Tensor:
        seen.append(chosen)
        return hidden.square() * chosen.topk_weights

    experts.moe_runner_config = SimpleNamespace(apply_router_weight_on_input=True)
    moe = SimpleNamespace(
        router=lambda hidden: (hidden, None),
        topk=lambda _hidden, _logits: Chosen(weights, ids),
        experts=experts,
        shared_expert=lambda hidden: hidden + 1,
    )
    llama4.weigh_outside(None, moe)
    assert experts.moe_runner_config.apply_router_weight_on_input is False
    shared, routed = llama4.run_experts(moe, x)
    torch.testing.assert_close(routed, (x * weights).square())
    torch.testing.assert_close(shared, x + 1)
    assert torch.equal(seen[0].topk_ids, ids)
    assert (routed - x.square() * weights).abs().max() > 0.1, "not what an expert returns"


G, H, K, V, WIDTH = 2, 4, 6, 5, 4  # key and value heads, their sizes, width of the convolution


def test_projections_of_a_delta_net() -> None:
    """Per key head a file holds q, k, its value heads' v and gate; step and decay likewise."""
    each = H // G
    qkvz, ba = torch.randn(7, G * (2 * K + 2 * each * V)), torch.randn(7, G * 2 * each)
    mixed, gate, step, decay = delta_net_kernels.split_projections(qkvz, ba, G, H, K, V)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("q", "k", "v", "z", "b", "a")}
    for head in qkvz.chunk(G, 1):
        q, k, v, z = head.split([K, K, each * V, each * V], 1)
        for name, part in (("q", q), ("k", k), ("v", v), ("z", z)):
            parts[name].append(part)
    for head in ba.chunk(G, 1):
        for name, part in zip("ba", head.split(each, 1), strict=True):
            parts[name].append(part)
    whole = {name: torch.cat(found, 1) for name, found in parts.items()}
    assert torch.equal(mixed, torch.cat([whole[name] for name in "qkv"], 1))
    assert torch.equal(gate.flatten(1), whole["z"])
    assert gate.shape == (7, H, V)
    assert torch.equal(step, whole["b"])
    assert torch.equal(decay, whole["a"])


def test_a_convolution_in_pieces() -> None:
    """Two requests, prefilled in two chunks and then decoded, against one pass over all tokens."""
    torch.manual_seed(0)
    channels, lengths = 5, (9, 11)
    weight, states = torch.randn(channels, WIDTH), torch.randn(6, channels, WIDTH - 1)
    slots, inputs = torch.tensor([4, 2]), [torch.randn(channels, n) for n in lengths]
    found: list[list[torch.Tensor]] = [[], []]
    for first, last, known in ((0, 2, False), (2, 7, True)):
        parts = [x[:, first:last] for x in inputs]
        sizes, seen = [last - first] * 2, torch.tensor([known] * 2)
        output = delta_net_kernels.convolve(
            torch.cat(parts, 1),
            weight,
            None,
            conv_states=states,
            seq_lens_cpu=sizes,
            cache_indices=slots,
            has_initial_state=seen,
        )
        for pieces, part in zip(found, output.chunk(2, 1), strict=True):
            pieces.append(part)
    for t in (7, 8):
        now = torch.stack([x[:, t] for x in inputs])
        output = delta_net_kernels.convolve_next(
            now, states, weight, None, "silu", conv_state_indices=slots
        )
        for pieces, part in zip(found, output, strict=True):
            pieces.append(part[:, None])
    for x, pieces in zip(inputs, found, strict=True):
        padded = torch.nn.functional.pad(x[:, :9], (WIDTH - 1, 0))
        want = torch.stack([(padded[:, t : t + WIDTH] * weight).sum(1) for t in range(9)], 1)
        torch.testing.assert_close(torch.cat(pieces, 1), want * want.sigmoid())


def test_a_gated_norm() -> None:
    x, gate, weight = torch.randn(7, V), torch.randn(7, V), torch.randn(V)
    found = delta_net_kernels.gated_norm(x, gate, weight, None, eps=1e-6)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(found, normed * gate / (1 + (-gate).exp()))


def reference_delta_net(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """One head and one token at a time, in fp64; state [K, V]."""
    output = torch.zeros(len(parts["v"]), H, V, dtype=torch.float64)
    for head in range(H):
        state = torch.zeros(K, V, dtype=torch.float64)
        for t in range(len(output)):
            q, k = (parts[name][t, head * G // H].double() for name in "qk")
            q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
            v = parts["v"][t, head].double()
            rate = (1 + (parts["a"][t, head] + parts["dt"][head]).double().exp()).log()
            state = state * (-parts["A_log"][head].double().exp() * rate).exp()
            step = 1 / (1 + (-parts["b"][t, head].double()).exp())
            state = state + step * torch.outer(k, v - k @ state)
            output[t, head] = q @ state * K**-0.5
    return output.float()


def test_a_delta_net_in_pieces() -> None:
    """Prefilled in two chunks, then decoded."""
    torch.manual_seed(0)
    tokens, slot = 8, 3
    parts = {
        "q": torch.randn(tokens, G, K),
        "k": torch.randn(tokens, G, K),
        "v": torch.randn(tokens, H, V),
        "a": torch.randn(tokens, H),
        "b": torch.randn(tokens, H),
        "A_log": torch.randn(H),
        "dt": torch.randn(H),
    }
    states, found = torch.zeros(5, H, V, K), []
    where = {"ssm_states": states, "cache_indices": torch.tensor([slot])}
    g, beta = delta_net_kernels.gates(parts["A_log"], parts["a"], parts["b"], parts["dt"])
    for first, last in ((0, 2), (2, 5)):
        now = slice(first, last)
        chunk = [parts[name][None, now] for name in "qkv"]
        output, *_ = delta_net_kernels.prefill(
            None,
            *chunk,
            g[:, now],
            beta[:, now],
            query_start_loc=torch.tensor([0, last - first]),
            **where,
        )
        found.append(output[0])
    for t in range(5, tokens):
        mixed = torch.cat([parts[name][t].flatten() for name in "qkv"])[None]
        found.append(
            delta_net_kernels.decode(
                None,
                mixed,
                parts["a"][t : t + 1],
                parts["b"][t : t + 1],
                A_log=parts["A_log"],
                dt_bias=parts["dt"],
                scale=K**-0.5,
                num_v_heads=H,
                head_v_dim=V,
                **where,
            )[0]
        )
    torch.testing.assert_close(torch.cat(found), reference_delta_net(parts))
    assert not states[:slot].any(), "other slots are left alone"


def test_a_trainer_in_bf16_has_the_gates_of_the_engine() -> None:
    """The engine rounds neither the rate of the decay nor the step size, megatron-core does."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    from moerl.trainer.model.gated_delta_net import DeltaNet

    torch.manual_seed(0)
    a_log, dt_bias = torch.randn(2, H).bfloat16()
    decay, step = torch.randn(2, 50, H).bfloat16()
    want = delta_net_kernels.gates(a_log, decay, step, dt_bias)
    found = DeltaNet._compute_g_and_beta(None, a_log, dt_bias, decay, step)
    rounded = inspect.unwrap(GatedDeltaNet._compute_g_and_beta)  # compiling it takes minutes
    megatrons = rounded(None, a_log, dt_bias, decay, step)
    for ours, engines, theirs in zip(found, want, megatrons, strict=True):
        torch.testing.assert_close(ours, engines[0], rtol=0, atol=0)
        off = ((theirs.float() - engines[0]) / engines[0]).abs().max()
        assert off > 5e-4, "control: rounded as megatron-core rounds"


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One query and one head at a time, in fp64."""
    (tokens, heads, size), length = q.shape, len(k)
    output = torch.zeros(tokens, heads, v.shape[2], dtype=torch.float64)
    for t in range(tokens):
        own = length - tokens + t
        first = 0 if window is None or window < 0 else max(0, own - window)
        for h in range(heads):
            group = h * k.shape[1] // heads
            scores = k[first : own + 1, group].double() @ q[t, h].double() * size**-0.5
            weights = scores.exp() / (scores.exp().sum() + sinks[h].double().exp())
            output[t, h] = weights @ v[first : own + 1, group].double()
    return output.float()


@pytest.mark.parametrize("window", [None, -1, 0, 3])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_attention_with_sinks(tokens: int, window: int | None) -> None:
    torch.manual_seed(tokens)
    q, k, v = torch.randn(tokens, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    sinks = torch.randn(4)
    found = attention_sinks.attend(q, k, v, sinks, 8**-0.5, window)
    torch.testing.assert_close(found, reference_attention(q, k, v, sinks, window))
    without = attention_sinks.attend(q, k, v, torch.full((4,), -1e9), 8**-0.5, window)
    assert (found - without).abs().max() > 0.05, "a sink takes part of the weight"


def test_sinks_have_the_dtype_of_the_model() -> None:
    for dtype, want in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)):
        linear = torch.nn.Linear(2, 2, dtype=dtype)
        sinks = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        attention = SimpleNamespace(qkv_proj=linear, sinks=sinks)
        attention_sinks.full_sinks(None, attention)
        assert attention.sinks.dtype == want
        assert not attention.sinks.requires_grad


def test_only_the_check_of_arguments_is_told_of_another_backend() -> None:
    found = ("torch_native", "torch_native")
    scope = {"__name__": "sglang.srt.arg_groups.model_hook", "ask": attention_sinks.name_backend}
    exec("def wrapper(found): return ask(found)\ndef check(found): return wrapper(found)", scope)
    assert scope["check"](found) == ("triton", "triton")
    assert (lambda: attention_sinks.name_backend(found))() == found


# --- the table ------------------------------------------------------------------------------------
def test_a_family_gets_its_own_stand_ins_only() -> None:
    assert registry.hooks_of("qwen3_moe") == registry.hooks_of("") == ()
    sinks = [hook.symbol.rpartition(".")[2] for hook in registry.hooks_of("gpt_oss")]
    assert sinks == ["attention_backends_of", "forward_extend", "forward_decode", "__init__"]
    assert registry.hooks_of("deepseek_v2") == registry.hooks_of("deepseek_v3") != ()
    for row in registry.FAMILY_HOOKS:
        assert set(row.model_types) <= set(FAMILIES), row
        assert all(hook.when is When.CPU for hook in row.hooks)


def test_the_table_of_needed_kernels_is_that_of_the_hooks() -> None:
    hooked = {name for row in registry.FAMILY_HOOKS for name in row.model_types}
    assert hooked == cpu_kernels.FAMILIES
    named = {entry.name for entry in entry_points_of(group=cpu_kernels.GROUP)}
    assert named == hooked | {cpu_kernels.FP8, cpu_kernels.ATTENTION_DP}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("family", "more", "args", "says"),
    [
        ("gpt_oss", {}, {}, "gpt_oss"),
        ("deepseek_v3", {"quantization_config": FP8}, {}, "deepseek_v3 and weights in fp8 blocks"),
        ("qwen3_moe", {"quantization_config": FP8}, {}, "weights in fp8 blocks"),
        ("qwen3_moe", {}, {"attn_dp_size": 2}, "data-parallel attention"),
        ("qwen3_moe", {}, {}, ""),
        ("mixtral", {}, {}, ""),
        ("olmoe", {}, {}, ""),
        ("glm4_moe", {}, {}, ""),
    ],
)
def test_an_engine_without_kernels_is_refused_on_a_cpu(
    family: str,
    more: dict[str, Any],
    args: dict[str, Any],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineConfig(args=args, tp=2 if args else 1)
    model = family_config(family, TinyModel(head_dim=64), 128) | more
    check_planned_layout(engine, model, cuda=False, routing=True)  # control: kernels are installed
    monkeypatch.setattr(cpu_kernels, "entry_points", lambda **_: ())
    check_planned_layout(replace(engine, dtype="bfloat16"), model, cuda=True, routing=False)
    if not says:
        check_planned_layout(engine, model, cuda=False, routing=True)
        return
    want = f"has no kernels for {says}; use GPUs, or .* set PYTHONPATH=.PWD/tests/cpu_sglang"
    with pytest.raises(ConfigError, match=want):
        check_planned_layout(engine, model, cuda=False, routing=True)


def test_the_model_of_a_folder(tmp_path: Path) -> None:
    assert model_type_of(tmp_path) == ""
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    assert model_type_of(tmp_path) == "olmoe"


def server(model_type: str, *, cuda: bool, **args: bool) -> dict[str, Any]:
    return arguments(
        EngineConfig(args=args),
        Path("model"),
        routing=True,
        version="0.0",
        port=1,
        nccl_port=2,
        cuda=cuda,
        model_type=model_type,
    )


def test_a_server_gets_the_arguments_of_its_family() -> None:
    assert server("gpt_oss", cuda=False)["disable_hybrid_swa_memory"] is True
    assert server("gpt_oss", cuda=False, disable_hybrid_swa_memory=True)
    for model_type, cuda in (("gpt_oss", True), ("qwen3_moe", False)):
        assert "disable_hybrid_swa_memory" not in server(model_type, cuda=cuda)
    assert server("gpt_oss", cuda=True, disable_hybrid_swa_memory=False)
    with pytest.raises(ConfigError, match="engine of gpt_oss needs True; leave it out"):
        server("gpt_oss", cuda=False, disable_hybrid_swa_memory=False)
    assert cpu_kernels.environment_of("gpt_oss") == {"TORCHDYNAMO_DISABLE": "1"}
    assert cpu_kernels.environment_of("qwen3_moe") == {}


def test_a_hook_that_was_not_installed_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def before(symbols: dict[str, object]) -> None:
        monkeypatch.setattr(entry_points, "_before", symbols)

    before({"json.dumps": "another function", "json.JSONEncoder.encode": "another one"})
    entry_points.check_installed()
    before({"json.dumps": "another function", "json.loads": json.loads})
    with pytest.raises(EngineError, match=r"hook of json\.loads was not installed"):
        entry_points.check_installed()
    before({"json.gone": None})  # register_hooks ended at it
    with pytest.raises(EngineError, match=r"hook of json\.gone was not installed"):
        entry_points.check_installed()
    before({})
    with pytest.raises(EngineError, match="did not load the plug-in moerl_hooks"):
        entry_points.check_installed()


# --- tiny models ----------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILY_FIELDS)
def test_a_family_has_a_tiny_model(family: str) -> None:
    spec = model_spec(family_config(family, recipe_shape(family), 128))
    assert spec.moe_layers
    assert spec.experts > spec.experts_per_token
    assert spec.moe_ffn % 64 == 0, "on a CPU SGLang pads experts of other widths"


def test_norms_of_a_tiny_model_scale_by_one(tmp_path: Path) -> None:
    for family in ("qwen2_moe", "qwen3_next"):
        make_family_model(tmp_path / family, family, TinyModel(num_layers=4))
        weights = load_file(tmp_path / family / "model.safetensors")
        norms = {name: w for name, w in weights.items() if name.endswith("norm.weight")}
        added = {name for name in norms if family == "qwen3_next" and "linear_attn" not in name}
        assert len(norms) > len(added)
        for name, weight in norms.items():
            assert torch.all(weight + (name in added) == 1), name


def test_tiny_models_cover_what_their_names_say() -> None:
    specs = {name: model_spec(family_config(name, TinyModel(), 128)) for name in FAMILY_FIELDS}
    assert [name for name, spec in specs.items() if spec.yarn] == [
        "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v32", "kimi_k2", "gpt_oss",
    ]  # fmt: skip
    assert [name for name, spec in specs.items() if spec.groups > 1] == [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
    ]
    assert [name for name, spec in specs.items() if spec.index_topk] == ["deepseek_v32"]
    assert [name for name, s in specs.items() if s.direct_q] == ["deepseek_v2_lite", "moonlight"]
    assert specs["gpt_oss"].sliding_layers
    assert specs["gpt_oss"].sinks
    assert specs["qwen2_moe"].shared_gate
