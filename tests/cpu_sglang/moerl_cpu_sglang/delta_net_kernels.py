"""A gated delta net (Qwen3-Next) on a plain CPU: SGLang has Triton kernels for it only.

One token after another, which short prompts allow.  A state is a matrix per value head: it decays,
forgets what it holds under a key, and stores a value there (https://arxiv.org/abs/2412.06464).

Legend: T tokens of all requests, B requests, C channels of the convolution, W its width, G key
heads, H value heads (a multiple of G), K and V sizes of a key and a value head.
SGLang keeps states as [slots, H, V, K] and the last inputs of the convolution as [slots, C, W - 1].
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_EPS = 1e-6  # of the length of queries and keys


def split_projections(
    qkvz: Tensor, ba: Tensor, heads_G: int, heads_H: int, size_K: int, size_V: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In place of fused_qkvzba_split_reshape_cat: (q, k, v of all heads), gate, step, decay."""
    values = heads_H // heads_G * size_V
    q, k, v, gate = qkvz.unflatten(1, (heads_G, -1)).split([size_K, size_K, values, values], -1)
    step, decay = ba.unflatten(1, (heads_G, -1)).chunk(2, -1)
    mixed = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    gate_THV = gate.reshape(-1, heads_H, size_V)
    return mixed, gate_THV, step.flatten(1), decay.flatten(1)


def convolve(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    seq_lens_cpu: list[int],
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
    **_options: Any,
) -> Tensor:
    """In place of causal_conv1d_fn: requests end to end, each behind what its slot holds."""
    kept, outputs = weight_CW.shape[1] - 1, []
    parts = x_CT[:, : sum(map(int, seq_lens_cpu))].split([int(n) for n in seq_lens_cpu], 1)
    for row, part in enumerate(parts):
        slot = int(cache_indices[row])
        before = conv_states[slot, :, :kept].to(part.dtype) * bool(has_initial_state[row])
        seen = torch.cat([before, part], 1)
        outputs.append(F.conv1d(seen[None], weight_CW[:, None], bias, groups=len(weight_CW))[0])
        conv_states[slot, :, :kept] = seen[:, -kept:].to(conv_states.dtype)
    found = torch.cat(outputs, 1)
    found = F.silu(found) if activation else found
    return F.pad(found, (0, x_CT.shape[1] - found.shape[1]))


def convolve_next(
    x_BC: Tensor,
    conv_state: Tensor,
    weight_CW: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    _lengths: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    **_options: Any,
) -> Tensor:
    """In place of causal_conv1d_update: one token of each request."""
    kept = weight_CW.shape[1] - 1
    before = conv_state[conv_state_indices][..., :kept].to(x_BC.dtype)
    seen_BCW = torch.cat([before, x_BC[..., None]], -1)
    conv_state[conv_state_indices, :, :kept] = seen_BCW[..., 1:].to(conv_state.dtype)
    found = (seen_BCW * weight_CW).sum(-1)
    found = found if bias is None else found + bias
    return F.silu(found) if activation else found


def gates(
    a_log_H: Tensor, decay_TH: Tensor, step_TH: Tensor, dt_bias_H: Tensor, *_options: Any
) -> tuple[Tensor, Tensor]:
    """In place of fused_gdn_gating: (log of the decay, step size), [1, T, H] each."""
    rate = F.softplus(decay_TH.float() + dt_bias_H.float())
    return (-a_log_H.float().exp() * rate)[None], step_TH.float().sigmoid()[None]


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    bias: None,
    activation: str = "swish",
    residual: None = None,
    eps: float = _EPS,
    **_options: Any,
) -> Tensor:
    """In place of rms_norm_gated: RMS norm, then silu of the gate."""
    assert bias is None, "Qwen3-Next has none"
    assert residual is None, "the residual is added elsewhere"
    assert activation in ("swish", "silu"), f"{activation} is not Qwen3-Next's"
    y = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y * F.silu(gate.float())).to(x.dtype)


def decode(
    self: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    **_options: Any,
) -> Tensor:
    """In place of TritonGDNKernel.packed_decode: one token of each request, [1, B, H, V]."""
    heads_H, size_V, size_K = ssm_states.shape[1:]
    values, scale = heads_H * size_V, size_K**-0.5
    keys = (mixed_qkv.shape[1] - values) // 2
    q, k, v = mixed_qkv.float().split([keys, keys, values], 1)
    q_BHK, k_BHK = (_unit(x.unflatten(1, (-1, size_K)), heads_H) for x in (q, k))
    decay, step = gates(A_log, a, b, dt_bias)
    state, output_BHV = advance(
        ssm_states[cache_indices].float(),
        q_BHK * scale,
        k_BHK,
        v.unflatten(1, (heads_H, size_V)),
        decay[0],
        step[0],
    )
    ssm_states[cache_indices] = state.to(ssm_states.dtype)
    return output_BHV.to(mixed_qkv.dtype)[None]


def prefill(
    self: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_options: Any,
) -> tuple[Tensor, None, None]:
    """In place of TritonGDNKernel.extend: q and k [1, T, G, K], v [1, T, H, V], others [1, T, H].

    Returns (output [1, T, H, V], no states of chunks).
    """
    heads_H, scale = v.shape[2], q.shape[-1] ** -0.5
    q_THK, k_THK = (_unit(x[0].float(), heads_H) for x in (q, k))
    output = torch.zeros_like(v[0])
    starts = query_start_loc.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        slot = int(cache_indices[row])
        state = ssm_states[slot].float()
        for t in range(first, last):
            now = (q_THK[t] * scale, k_THK[t], v[0, t].float(), g[0, t], beta[0, t])
            state, found = advance(state, *now)
            output[t] = found.to(output.dtype)
        ssm_states[slot] = state.to(ssm_states.dtype)
    return output[None], None, None


def advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: state [.., V, K], q and k [.., K], v [.., V], log decay and step [..]."""
    state = state * decay.exp()[..., None, None]
    change = (v - torch.einsum("...vk,...k->...v", state, k)) * step[..., None]
    state = state + change[..., None] * k[..., None, :]
    return state, torch.einsum("...vk,...k->...v", state, q)


def _unit(x: Tensor, heads_H: int) -> Tensor:
    """Queries or keys of length one, repeated for every value head."""
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    return x.repeat_interleave(heads_H // x.shape[-2], -2)
