"""A stand-in for Transformer Engine 2.20.2 in plain torch: what megatron-core's layers build on.

`install` makes the package `transformer_engine`, so that megatron-core's own classes of layers, its
layer specs and its grouped experts run on the CPU.  Arguments, names of parameters, their marks,
what is returned, what is communicated and which gradients are computed are those of Transformer
Engine's source (`transformer_engine/pytorch/module`); tests/multi/test_gpu_profile.py compares the
signatures with the package itself.  Kernels, fp8, overlap and dropout are absent: nothing here
shows that Transformer Engine's own products are right.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

VERSION = "2.20.2"
Bias = Tensor | None
# Whose signatures are not in a file of their own name there.
_INHERITED = ("RMSNorm.forward", "LayerNorm.")


class LinearProduct(Function):
    """x W' + b; what a frozen weight does not need is neither kept nor computed."""

    weight_gradients = 0  # how many were computed

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Bias) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.has_bias = bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            LinearProduct.weight_gradients += 1
            dweight = dy.flatten(0, -2).T @ x.flatten(0, -2)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = dy.flatten(0, -2).sum(0)
        return dy @ weight if ctx.needs_input_grad[0] else None, dweight, dbias


class _Gathered(Function):
    """All ranks' positions; backward: each rank's share of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.group), None


class _Scattered(Function):
    """This rank's share of the sum; backward: all ranks' positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=group)
    return whole.chunk(group.size())[group.rank()].clone()


def _rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Statistics and scale in fp32, cast once."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (weight.float() + zero_centered_gamma)).to(x.dtype)


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        assert normalized_shape is not None
        self.weight = _parameter(normalized_shape, dtype=params_dtype, device=kwargs.get("device"))
        if sequence_parallel is not None:
            setattr(self.weight, "sequence_parallel", sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("no model of the tests has one")


class _Base(torch.nn.Module):
    """What the layers with weights have in common."""

    def place(
        self,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        parallel_mode: str | None,
        sequence_parallel: bool,
    ) -> None:
        assert parallel_mode in (None, "column", "row")
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def cut(self, in_features: int, out_features: int) -> None:
        columns = self.tp_size if self.parallel_mode == "row" else 1
        rows = self.tp_size if self.parallel_mode == "column" else 1
        self.in_features, self.out_features = in_features // columns, out_features // rows

    def weights(self, *names: str, bias: bool, dtype: Any, device: Any) -> None:
        """Named as there, with the marks of a weight that is cut."""
        for name in names:
            weight = _parameter(self.out_features, self.in_features, dtype=dtype, device=device)
            dim = 1 if self.parallel_mode == "row" else 0
            marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
            for mark, value in marks.items():
                setattr(weight, mark, value)
            setattr(self, name, weight)
            if bias:
                own = _parameter(self.out_features, dtype=dtype, device=device)
                if self.parallel_mode == "row":
                    setattr(own, "sequence_parallel", self.sequence_parallel)  # noqa: B010
                setattr(self, name.replace("weight", "bias"), own)

    def product(self, x: Tensor, weight: Tensor, bias: Bias) -> Tensor:
        if self.parallel_mode and self.tp_size > 1:
            assert self.sequence_parallel, "moerl has no tensor parallelism without it"
            assert self.tp_group is not None
        if self.parallel_mode == "column" and self.sequence_parallel:
            x = _Gathered.apply(x, self.tp_group)
        y = LinearProduct.apply(x, weight, bias)
        if self.parallel_mode == "row" and self.sequence_parallel:
            y = _Scattered.apply(y, self.tp_group)
        return y


class Linear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self.place(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.cut(in_features, out_features)
        self.weights("weight", bias=bias, dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        bias = self.bias if self.use_bias else None
        y = self.product(inp, self.weight, None if self.return_bias else bias)
        return (y, bias) if self.return_bias else y


class LayerNormLinear(_Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        assert normalization == "RMSNorm"
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.use_bias, self.return_bias = bias, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.place(tp_group, tp_size, parallel_mode, sequence_parallel)
        self.cut(in_features, out_features)
        self.layer_norm_weight = _parameter(in_features, dtype=params_dtype, device=device)
        setattr(self.layer_norm_weight, "sequence_parallel", self.sequence_parallel)  # noqa: B010
        self.weights("weight", bias=bias, dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """With `return_layernorm_output` also the norm's output: this rank's positions of it."""
        assert not self.return_layernorm_output_gathered
        normed = _rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        bias = self.bias if self.use_bias else None
        y = self.product(normed, self.weight, None if self.return_bias else bias)
        found = (y, bias) if self.return_bias else (y,)
        found += (normed,) if self.return_layernorm_output else ()
        return found if len(found) > 1 else y


class GroupedLinear(_Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation
        assert not single_grouped_weight
        assert not bias, "no adapter has one"
        self.num_gemms, self.use_bias = num_gemms, bias
        self.save_original_input = save_original_input
        self.place(tp_group, tp_size, parallel_mode, sequence_parallel)
        assert self.tp_size == 1, "experts communicate outside"
        self.cut(in_features, out_features)
        names = [f"weight{number}" for number in range(num_gemms)]
        self.weights(*names, bias=False, dtype=params_dtype, device=device)

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        counts = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        assert len(counts) == self.num_gemms
        assert sum(counts) == len(inp)
        parts = [
            LinearProduct.apply(x, self.get_parameter(f"weight{number}"), None)
            for number, x in enumerate(inp.split(counts))
        ]
        return torch.cat(parts)


class DotProductAttention(torch.nn.Module):
    """Causal attention; of rows end to end, each within itself."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: dist.ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        assert not attention_dropout
        assert softmax_type == "vanilla"
        sizes = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.scale = sizes[0] ** -0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_layer: Any = None,
        key_layer: Any = None,
        value_layer: Any = None,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """[S, B, H, D] -> [S, B, H * D], or rows end to end without B."""
        qkv = (query_layer, key_layer, value_layer)
        if qkv_format != "thd":
            assert attn_mask_type == "causal"
            return self._attend(*qkv).flatten(2)
        ends = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        assert ends is not None
        rows = zip(*(x.split(ends.diff().tolist()) for x in qkv), strict=True)
        return torch.cat([self._attend(*(x[:, None] for x in row))[:, 0] for row in rows]).flatten(
            1
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key).float() * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bhst,tbhd->sbhd", weights, value)


def _parameter(*shape: int, dtype: Any, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(*shape, dtype=dtype, device=device))


class _Never:
    """A class or function that a test must not reach."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the stand-in has no fp8")


class _NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


@contextmanager
def fp8_autocast(enabled: bool = True, **_: Any) -> Iterator[None]:
    assert not enabled, "the stand-in has no fp8"
    yield


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Around a forward pass that is made again: it keeps scales of fp8, of which there are none."""
    yield


# --- the package ----------------------------------------------------------------------------------
MODULES: dict[str, dict[str, Any]] = {
    "": {"__version__": VERSION},
    "common": {},
    "common.recipe": {"DelayedScaling": type("DelayedScaling", (_Never,), {})},
    "pytorch": {
        kind.__name__: kind
        for kind in (
            DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm,
        )
    } | {"ops": SimpleNamespace()},
    "pytorch.fp8": {
        "FP8GlobalStateManager": _NoFp8, "fp8_autocast": fp8_autocast, "fp8_model_init": _Never,
    },
    "pytorch.distributed": {
        "CudaRNGStatesTracker": type("CudaRNGStatesTracker", (_Never,), {}),
        "activation_recompute_forward": activation_recompute_forward,
    },
    "pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (_Never,), {})},
    "pytorch.router": dict.fromkeys((
        "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    )),
}  # fmt: skip


def make_package() -> None:
    """Call it before megatron is imported."""
    for name, content in MODULES.items():
        full = ".".join(filter(None, ("transformer_engine", name)))
        module = ModuleType(full)
        module.__spec__ = ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[full] = module
        parent, _, own = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)


def leave_out_kernels() -> None:
    """Two fusions that are on by default are kernels of Transformer Engine."""
    from moerl.trainer.model import transformer

    fused = transformer.fused_fields
    absent = {"apply_rope_fusion": False, "moe_permute_fusion": False}
    vars(transformer)["fused_fields"] = lambda spec: fused(spec) | absent


def install() -> None:
    """Make the package, and its layers the ones that `platform.prepare` chooses, on the CPU.

    Call it before megatron is imported.
    """
    make_package()
    from moerl.trainer.model import cpu_patches, platform

    cpu_patches.apply("cuda")
    chosen = platform.Platform("cpu", torch.device("cpu"), "gloo", "te")
    vars(platform)["prepare"] = lambda *_args, **_kwargs: chosen
    leave_out_kernels()


# --- what it imitates -----------------------------------------------------------------------------
def differences(package: Path) -> list[str]:
    """Arguments of the stand-in that the package, a folder of its source, does not have, or has
    with another default or place.
    """
    files = (*package.glob("pytorch/module/*.py"), *package.glob("pytorch/attention/**/*.py"))
    theirs = {name: found for file in sorted(files) for name, found in _signatures(file).items()}
    wrong = []
    for name, own in _signatures(Path(__file__)).items():
        if name.partition(".")[0] not in MODULES["pytorch"] or name.startswith(_INHERITED):
            continue
        known = theirs.get(name, {})
        wrong += [f"{name}: {arg}" for arg, given in own.items() if known.get(arg) != given]
        order = [arg for arg in known if arg in own]
        wrong += [f"{name}: order"] if order != list(own) else []
    return wrong


def _signatures(file: Path) -> dict[str, dict[str, str]]:
    """Arguments and defaults of each class's own __init__ and forward."""
    return {
        f"{kind.name}.{method.name}": _arguments(method.args)
        for kind in ast.walk(ast.parse(file.read_text()))
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "forward")
    }


def _arguments(found: ast.arguments) -> dict[str, str]:
    names = [one.arg for one in found.args if one.arg != "self"]
    defaults = ["required"] * (len(names) - len(found.defaults))
    return dict(zip(names, defaults + [ast.unparse(one) for one in found.defaults], strict=True))
