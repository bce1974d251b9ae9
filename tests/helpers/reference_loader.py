"""What a trainer rank and an engine rank hold, written without tiles, rules or plans.

Whole numpy tensors are reshaped, concatenated and split; a rank finds its place by its position in
an arange of the mesh.  Two families that between them have everything a plan must handle: grouped
queries with shared kv heads, tied embeddings, latent attention, a dense layer, shared experts, an
expert bias.  Nothing of moerl.layout is used but the two records of sizes that describe a case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from moerl.config.schema import ParallelConfig
from moerl.layout import ModelSpec
from moerl.weight_sync.held_shards import EngineLayout

Arrays = dict[str, np.ndarray]
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def rows(weight: np.ndarray, parts: int, i: int) -> np.ndarray:
    return np.split(weight, parts)[i]


def cols(weight: np.ndarray, parts: int, i: int) -> np.ndarray:
    return np.split(weight, parts, axis=1)[i]


def vocab(weight: np.ndarray, padded: int, parts: int, i: int) -> np.ndarray:
    pad = np.zeros((padded - len(weight), weight.shape[1]), weight.dtype)
    return rows(np.concatenate([weight, pad]), parts, i)


def trainer_rank(hf: Arrays, m: ModelSpec, mesh: ParallelConfig, rank: int) -> Arrays:
    """Parameters and expert biases of one Megatron rank."""
    dense = np.arange(mesh.world_size).reshape(mesh.pp, mesh.dp, mesh.cp, mesh.tp)
    stage, _, _, t = map(int, np.argwhere(dense == rank)[0])
    per_replica = mesh.ep * mesh.etp
    experts = np.arange(mesh.world_size).reshape(
        mesh.pp, mesh.tp * mesh.cp * mesh.dp // per_replica, mesh.ep, mesh.etp
    )
    _, _, e, x = map(int, np.argwhere(experts == rank)[0])
    padded = math.ceil(m.vocab_size / (mesh.vocab_divisible_by * mesh.tp))
    padded *= mesh.vocab_divisible_by * mesh.tp
    slices = np.split(np.arange(m.layers), mesh.pp * mesh.vpp)
    out: Arrays = {}
    for chunk in range(mesh.vpp):
        prefix = f"chunk{chunk}." if mesh.vpp > 1 else ""
        starts = stage == 0 and chunk == 0
        ends = stage == mesh.pp - 1 and chunk == mesh.vpp - 1
        if starts:
            embed = vocab(hf[EMBED], padded, mesh.tp, t)
            out[prefix + "embedding.word_embeddings.weight"] = embed
        for i, layer in enumerate(slices[chunk * mesh.pp + stage]):
            to = f"{prefix}decoder.layers.{i}."
            w = layer_of(hf, int(layer))
            out |= {to + n: v for n, v in trainer_attention(w, m, mesh.tp, t)}
            out |= {to + n: v for n, v in trainer_mlp(w, m, mesh, (t, e, x))}
        if ends:
            out[prefix + "decoder.final_layernorm.weight"] = hf[NORM]
            if not (m.tied and starts):
                head = hf[EMBED if m.tied else HEAD]
                out[prefix + "output_layer.weight"] = vocab(head, padded, mesh.tp, t)
    return out


def layer_of(hf: Arrays, layer: int) -> Arrays:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): v for name, v in hf.items() if name.startswith(prefix)}


def trainer_attention(w: Arrays, m: ModelSpec, tp: int, t: int) -> Iterator[tuple[str, np.ndarray]]:
    a = "self_attention."
    yield "input_layernorm.weight", w["input_layernorm.weight"]
    yield "pre_mlp_layernorm.weight", w["post_attention_layernorm.weight"]
    yield a + "linear_proj.weight", cols(w["self_attn.o_proj.weight"], tp, t)
    if not m.kv_lora:
        q, k, v = (w[f"self_attn.{n}_proj.weight"] for n in "qkv")
        groups = [part.reshape(m.kv_heads, -1, m.hidden) for part in (q, k, v)]
        fused = np.concatenate(groups, axis=1).reshape(-1, m.hidden)
        yield a + "linear_qkv.weight", rows(fused, tp, t)
        for n in "qk":
            yield f"{a}{n}_layernorm.weight", w[f"self_attn.{n}_norm.weight"]
        return
    yield a + "linear_kv_down_proj.weight", w["self_attn.kv_a_proj_with_mqa.weight"]
    yield a + "kv_layernorm.weight", w["self_attn.kv_a_layernorm.weight"]
    yield a + "linear_kv_up_proj.weight", rows(w["self_attn.kv_b_proj.weight"], tp, t)
    if m.q_lora:
        yield a + "linear_q_down_proj.weight", w["self_attn.q_a_proj.weight"]
        yield a + "q_layernorm.weight", w["self_attn.q_a_layernorm.weight"]
        yield a + "linear_q_up_proj.weight", rows(w["self_attn.q_b_proj.weight"], tp, t)
    else:
        yield a + "linear_q_proj.weight", rows(w["self_attn.q_proj.weight"], tp, t)


def trainer_mlp(
    w: Arrays, m: ModelSpec, mesh: ParallelConfig, at: tuple[int, int, int]
) -> Iterator[tuple[str, np.ndarray]]:
    t, e, x = at

    def glu(of: str, to: str, parts: int, i: int) -> Iterator[tuple[str, np.ndarray]]:
        gate, up = (rows(w[f"{of}.{n}_proj.weight"], parts, i) for n in ("gate", "up"))
        yield f"{to}.linear_fc1.weight", np.concatenate([gate, up])
        yield f"{to}.linear_fc2.weight", cols(w[f"{of}.down_proj.weight"], parts, i)

    if "mlp.gate.weight" not in w:
        yield from glu("mlp", "mlp", mesh.tp, t)
        return
    yield "mlp.router.weight", w["mlp.gate.weight"]
    if m.expert_bias:
        yield "mlp.router.expert_bias", w["mlp.gate.e_score_correction_bias"]
    if m.shared_ffn:
        yield from glu("mlp.shared_experts", "mlp.shared_experts", mesh.tp, t)
    for slot, expert in enumerate(np.split(np.arange(m.experts), mesh.ep)[e]):
        of, to = f"mlp.experts.{expert}", f"mlp.experts.local_experts.{slot}"
        yield from glu(of, to, mesh.etp, x)


def engine_rank(hf: Arrays, m: ModelSpec, engine: EngineLayout, rank: int) -> Arrays:
    """Parameters of one SGLang rank; vocabulary padding is 0, as its loader leaves it."""
    attention = engine.tp // engine.dp
    a = rank % attention
    out = {
        EMBED: vocab(hf[EMBED], sglang_vocab(m, attention), attention, a),
        NORM: hf[NORM],
    }
    if not (m.tied and m.kv_lora):  # DeepSeek's class shares the tied head, Qwen's does not
        head = hf[EMBED if m.tied else HEAD]
        out[HEAD] = vocab(head, sglang_vocab(m, engine.tp), engine.tp, rank)
    for layer in range(m.layers):
        w, to = layer_of(hf, layer), f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[to + norm] = w[norm]
        out |= {to + n: v for n, v in engine_attention(w, m, attention, a)}
        out |= {to + n: v for n, v in engine_mlp(w, m, engine, rank)}
    return out


def sglang_vocab(m: ModelSpec, parts: int) -> int:
    padded = math.ceil(m.vocab_size / 64) * 64
    return padded if padded % parts == 0 else math.ceil(m.vocab_size / (64 * parts)) * 64 * parts


def engine_attention(
    w: Arrays, m: ModelSpec, parts: int, i: int
) -> Iterator[tuple[str, np.ndarray]]:
    s = "self_attn."
    yield s + "o_proj.weight", cols(w[s + "o_proj.weight"], parts, i)
    if not m.kv_lora:
        kv = []
        for n in "kv":
            heads = w[f"{s}{n}_proj.weight"].reshape(m.kv_heads, m.head_dim, m.hidden)
            if parts > m.kv_heads:  # neighbours share a head
                kv.append(heads[i // (parts // m.kv_heads)])
            else:
                kv.append(rows(heads, parts, i).reshape(-1, m.hidden))
        q = rows(w[s + "q_proj.weight"], parts, i)
        yield s + "qkv_proj.weight", np.concatenate([q, *kv])
        for n in "qk":
            yield f"{s}{n}_norm.weight", w[f"{s}{n}_norm.weight"]
        return
    kv_a = w[s + "kv_a_proj_with_mqa.weight"]
    yield s + "kv_a_layernorm.weight", w[s + "kv_a_layernorm.weight"]
    yield s + "kv_b_proj.weight", rows(w[s + "kv_b_proj.weight"], parts, i)
    if m.q_lora:
        fused = np.concatenate([w[s + "q_a_proj.weight"], kv_a])
        yield s + "fused_qkv_a_proj_with_mqa.weight", fused
        yield s + "q_a_layernorm.weight", w[s + "q_a_layernorm.weight"]
        yield s + "q_b_proj.weight", rows(w[s + "q_b_proj.weight"], parts, i)
    else:
        yield s + "q_proj.weight", rows(w[s + "q_proj.weight"], parts, i)
        yield s + "kv_a_proj_with_mqa.weight", kv_a


def engine_mlp(
    w: Arrays, m: ModelSpec, engine: EngineLayout, rank: int
) -> Iterator[tuple[str, np.ndarray]]:
    def glu(of: str, parts: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        gate, up = (rows(w[f"{of}.{n}_proj.weight"], parts, i) for n in ("gate", "up"))
        return np.concatenate([gate, up]), cols(w[f"{of}.down_proj.weight"], parts, i)

    whole = ["mlp.shared_experts"] if m.shared_ffn else []
    if "mlp.gate.weight" not in w:
        whole = ["mlp"]
    for of in whole:
        gate_up, down = glu(of, engine.tp, rank)
        yield f"{of}.gate_up_proj.weight", gate_up
        yield f"{of}.down_proj.weight", down
    if whole == ["mlp"]:
        return
    yield "mlp.gate.weight", w["mlp.gate.weight"]
    if m.expert_bias:
        name = "mlp.gate.e_score_correction_bias"
        yield name, w[name]
    inner = engine.tp // engine.ep
    mine = np.split(np.arange(m.experts), engine.ep)[rank // inner]
    both = [glu(f"mlp.experts.{expert}", inner, rank % inner) for expert in mine]
    yield "mlp.experts.w13_weight", np.stack([w13 for w13, _ in both])
    yield "mlp.experts.w2_weight", np.stack([w2 for _, w2 in both])
