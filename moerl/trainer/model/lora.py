"""LoRA inside Megatron's linear layers: frozen weights that hold W0 + s B A, gradients for A and B.

The forward pass runs on the merged weight itself, in its own dtype: an engine gets by the same
merge the very bits that were trained on, and a forward pass costs the same as without LoRA.
`Adapters.merge` computes it after each update from W0, which `BaseWeights` keeps; the previous
product is never subtracted from rounded weights (that drifts).  A hook on each linear layer, of
megatron-core or of Transformer Engine (`adapted_layers`), sends the gradient of its output straight
through the rounding to the factors; `moerl.algorithms.head_logprob` does so for the head, whose
logits it has by blocks:

    h = x A'          dB = s dy' h          dh = s dy B          dA = dh' x

No gradient of W is computed and W has no gradient buffer.  A rank's part of a factor follows from
the tiles of its weights; only tensors of width `rank` are communicated:

    layer               A on a rank   B on a rank   h                        summed over TP
    column parallel     whole         its rows      gathered                 A
    row parallel        its columns   whole         reduce-scattered         B
    head                whole         its rows      of sampled tokens        A
    router              whole         whole         -                        A and B
    whole on each rank  whole         whole         -                        A and B
    expert              as cut by ETP               -                        the whole one, if cut
    shared by experts   whole         whole         -                        it, over TP and DP

Ideas: Megatron-Bridge (where to communicate), straight-through estimation, Bengio 2013.
Legend: T tokens (and batch), R rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from moerl.algorithms.head_logprob import HeadFactors
from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout import (
    ModelSpec,
    Named,
    at,
    hf_shapes,
    megatron_tiles,
    padded_vocab,
    transposed_stacks,
)
from moerl.layout.adapters import Projection, adapter_shapes, projections
from moerl.trainer.model.adapted_layers import (
    LAYERS,
    Factors,
    Gating,
    GradientHook,
    GroupedHook,
    Linear,
    has_experts,
    is_grouped,
    tensor_group,
)
from moerl.trainer.model.parallel import Parallel
from moerl.weight_sync.adapters.base_weights import BaseWeights
from moerl.weight_sync.adapters.low_rank import merge_into
from moerl.weight_sync.adapters.sglang_adapter import sglang_refusal

PREFIX = "lora."  # of the factors' names in a GPTModel
HEAD = "lm_head"


@dataclass(slots=True)
class Changes:
    """Elements of adapted tensors on this rank, and how many a merge changed.

    Rounding swallows updates below half a step of the dtype.
    """

    weights: int = 0
    changed: Tensor | int = 0  # on the device of the weights: a merge does not wait for it

    def share(self, group: dist.ProcessGroup) -> float:
        """Of all ranks together; collective over a group of gloo."""
        both = torch.tensor([self.weights, int(self.changed)], dtype=torch.float64)
        dist.all_reduce(both, group=group)
        return float(both[1] / both[0])


class Adapters(torch.nn.Module):
    """All factors of a model chunk, as `gpt.lora`: names of the weights stay as in the layout.

    A factor's parameter name is its Hugging Face name with `/` for dots, which torch forbids.
    """

    def __init__(self, lora: LoraConfig) -> None:
        super().__init__()
        self.scale, self._place = lora.scale, lora.base
        self.tiles: Named = {}  # by parameter name
        self.head: HeadFactors | None = None
        self._merged: list[tuple[torch.nn.Parameter, tuple[Factors, ...]]] = []
        self._base: BaseWeights | None = None

    def adopt(self, linear: Linear, weights: Mapping[str, tuple[Projection, ...]]) -> None:
        """Give a linear layer factors, and a hook unless it is the head.

        weights: projections in each of its weights, by parameter name; experts have several.
        """
        every = {
            name: tuple(self._factors(linear, linear.get_parameter(name), part) for part in parts)
            for name, parts in weights.items()
        }
        self._merged += [(linear.get_parameter(name), factors) for name, factors in every.items()]
        if is_grouped(linear):
            experts = {int(name.removeprefix("weight")): every[name] for name in every}
            linear.register_forward_hook(GroupedHook(experts, self.scale))
            return
        (factors,) = every.values()
        if factors[0].projection.module == HEAD:
            (one,) = factors
            whole = len(linear.get_parameter("weight"))
            assert len(one.b) <= whole, "factors of the head's own entries, in their order"
            self.head = HeadFactors(one.a, one.b, self.scale)
            return
        hook = self.hook(linear, factors)
        if isinstance(linear, TopKRouter):  # its output is a choice; the gradient is the logits'
            linear.gating = Gating(linear.gating, hook)
        else:
            linear.register_forward_hook(hook)

    def hook(self, linear: Linear, factors: tuple[Factors, ...]) -> GradientHook:
        return GradientHook(linear, factors, self.scale)

    @property
    def adapted(self) -> tuple[torch.nn.Parameter, ...]:
        """The weights that have factors, each with a W0 of the same size."""
        return tuple(weight for weight, _ in self._merged)

    @property
    def base_bytes(self) -> int:
        """Of W0, once it is kept."""
        return 0 if self._base is None else self._base.num_bytes

    def keep_base(self) -> None:
        """The weights as they are now are W0.  Call once, after they were loaded."""
        assert self._base is None, "the base is kept once"
        self._base = BaseWeights(self.adapted, self._place)
        self.merge()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Within it the weights are W0 + s B A: they always are."""
        yield

    def drop_base(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # its memory may still be copied from
        self._base = None

    @torch.no_grad()
    def unmerge(self) -> None:
        """Set every adapted weight to W0, until the next `merge`."""
        assert self._base is not None, "keep_base comes first"
        for weight, base in zip(self.adapted, self._base, strict=True):
            weight.copy_(base)

    @torch.no_grad()
    def merge(self) -> Changes:
        """Set every adapted weight to W0 + s B A, computed in fp32 and rounded once.

        Rows of a fused tensor without factors keep W0.
        """
        assert self._base is not None, "keep_base comes first"
        changes = Changes()
        for (weight, every), base in zip(self._merged, self._base, strict=True):
            before = weight.detach().clone()
            for part in every:
                if part.index is None:
                    merge_into(weight, base, part.a, part.b, self.scale)
                    continue
                rows = base.new_empty(len(part.index), base.shape[1])
                merge_into(rows, base[part.index], part.a, part.b, self.scale)
                weight[part.index] = rows
            changes.weights += weight.numel()
            changes.changed += (weight != before).sum()
        return changes

    def factors(self) -> dict[str, Tensor]:
        """Factors, or their parts on this rank, by Hugging Face name."""
        named = self.named_parameters()
        return {self.tiles[name].tiles[0].hf: param.detach() for name, param in named}

    @torch.no_grad()
    def set_factors(self, values: Mapping[str, Tensor]) -> None:
        """Take whole factors by Hugging Face name, and merge."""
        parts = self.parts_of(values)
        for name, factor in self.factors().items():
            factor.copy_(parts[name])
        self.merge()

    def parts_of(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole factors, by Hugging Face name."""
        tiles = [local.tiles[0] for local in self.tiles.values()]
        return {tile.hf: values[tile.hf][at(tile.hf_box)] for tile in tiles}

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Factors by Hugging Face name, in whole coordinates: any layout can load them."""
        return {
            prefix + name: self._sharded(name, param) for name, param in self.named_parameters()
        }

    def _sharded(self, name: str, param: torch.nn.Parameter) -> ShardedTensor:
        (tile,) = self.tiles[name].tiles
        held = zip(tile.hf_box, getattr(param, "whole_shape"), strict=True)  # noqa: B009
        offsets = [
            (dim, part.start // len(part), whole // len(part))
            for dim, (part, whole) in enumerate(held)
            if len(part) < whole
        ]
        return ShardedTensor.from_rank_offsets(
            PREFIX + tile.hf, param, *offsets, replica_id=_replica(param)
        )

    def _factors(self, linear: Linear, weight: torch.nn.Parameter, part: Projection) -> Factors:
        for hf, local in part.factors.items():
            name = hf.replace(".", "/")
            if name in self.tiles:
                continue  # experts share it
            param = torch.nn.Parameter(_first_value(hf, part).to(weight.device, weight.dtype))
            self.register_parameter(name, param)
            self.tiles[name] = local
            _mark(param, linear, weight, part, hf)
        a, b = (self.get_parameter(hf.replace(".", "/")) for hf in part.names)
        index = _index(part)
        same = torch.equal(index, torch.arange(weight.shape[0]))
        return Factors(part, a, b, None if same else index.to(weight.device))


def attach_adapters(
    gpt: GPTModel,
    chunk: int,
    spec: ModelSpec,
    adapters: Adapters,
    lora: LoraConfig,
    parallel: Parallel,
) -> Adapters:
    """Freeze a model chunk and give its targets factors, as `gpt.lora`.  Raises ConfigError.

    A starts as U(-1, 1) / sqrt(in), equal under every layout; B as 0.
    """
    check_lora_model(spec, lora, parallel.sizes)
    gpt.requires_grad_(False)
    modules = dict(gpt.named_modules())
    for path, weights in _targets(spec, chunk, lora, parallel).items():
        linear, module = modules.get(path), next(iter(weights.values()))[0].module
        is_known = path.startswith("decoder.layers.") or module == HEAD
        if not isinstance(linear, LAYERS) or not is_known:
            raise _no_adapter(module, lora)
        adapters.adopt(linear, weights)
    if not adapters.tiles:
        raise ConfigError(
            "lora.targets", lora.targets, "a pipeline stage has no target; every stage needs one"
        )
    gpt.lora = adapters
    if gpt.pre_process:  # the layers' inputs need a gradient, or recomputed layers run no backward
        gpt.embedding.register_forward_hook(_needs_grad)
    return adapters


def _targets(
    spec: ModelSpec, chunk: int, lora: LoraConfig, parallel: Parallel
) -> dict[str, dict[str, tuple[Projection, ...]]]:
    """Factors of a model chunk by layer and by parameter of the layer."""
    sizes, shapes = parallel.sizes, hf_shapes(spec)
    prefix = f"chunk{chunk}." if sizes.vpp > 1 else ""
    found: dict[str, dict[str, tuple[Projection, ...]]] = {}
    tiles = megatron_tiles(spec, sizes, parallel.rank, parallel.platform.layers)
    for name, local in tiles.items():
        if name.startswith(prefix) and (
            parts := projections(local, lora.rank_of, shapes, shared=lora.shares)
        ):
            path, _, weight = name.removeprefix(prefix).rpartition(".")
            found.setdefault(path, {})[weight] = parts
    return found


def _no_adapter(module: str, lora: LoraConfig) -> ConfigError:
    return ConfigError(
        "lora.targets",
        lora.targets,
        f"{module} is not a layer that can have an adapter; choose projections of attention, of "
        "dense and shared blocks, and of experts, routers, and a head that is not the embedding",
    )


def check_lora_model(spec: ModelSpec, lora: LoraConfig, sizes: ParallelConfig) -> None:
    """Refuse unsupported models and layers.  Raises ConfigError, LayoutError."""
    odd = (
        ("linear attention", spec.linear_layers),
        ("sparse attention", spec.index_topk),
        ("biases in its experts", spec.o_bias),
        ("experts stored as [E, in, out]", transposed_stacks(spec)),
    )
    for what, has in odd:
        if has:
            raise ConfigError(
                "lora.rank", lora.rank, f"{spec.family} has {what}: not compared with peft; use 0"
            )
    if lora.rank_of(HEAD) and sizes.tp > 1:
        rows = padded_vocab(spec, sizes.tp, sizes.vocab_divisible_by)
        if rows != spec.vocab_size:
            raise ConfigError(
                "trainer.parallel.vocab_divisible_by",
                sizes.vocab_divisible_by,
                f"with an adapter of the head tp must cut {spec.vocab_size} entries without "
                f"padding, they become {rows}; use a divisor, or tp 1",
            )
    if lora.serves_adapters and (refusal := sglang_refusal(spec, lora)):
        raise ConfigError("lora.delivery", lora.delivery, f"{refusal}; use merged")
    if sizes.etp not in (1, sizes.tp):
        raise ConfigError("trainer.parallel.etp", sizes.etp, f"with lora it is 1 or tp, {sizes.tp}")
    shapes = hf_shapes(spec)
    adapter_shapes(shapes, lora.rank_of, shared=lora.shares)  # raises for several ranks
    for pattern in (*lora.targets, *lora.ranks):
        one = LoraConfig(rank=1, targets=[pattern])
        if not adapter_shapes(shapes, one.rank_of) and pattern not in LoraConfig().targets:
            raise ConfigError(
                "lora.ranks" if pattern in lora.ranks else "lora.targets",
                pattern,
                f"it matches no weight of {spec.family}; names are like "
                + next(iter(adapter_shapes(shapes, LoraConfig(rank=1).rank_of))).rpartition(".")[0],
            )


def _needs_grad(module: torch.nn.Module, args: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


# --- one factor's parameter -----------------------------------------------------------------------
def _mark(
    param: torch.nn.Parameter,
    linear: Linear,
    weight: torch.nn.Parameter,
    part: Projection,
    name: str,
) -> None:
    """Set the marks that Megatron's reductions, gradient norm and checkpoints read.

    A factor that experts share has a part of its gradient on every rank of the stage, as a dense
    factor under sequence parallelism has: ranks with other experts are data-parallel ranks of it.
    """
    factor = name[-1]
    held = part.rows if factor == "B" else part.cols
    whole = part.shape[0] if factor == "B" else part.shape[1]
    is_cut = len(held) < whole
    is_own = name.startswith(part.module)  # not of all experts
    is_expert = has_experts(linear) and is_own
    group = tensor_group(linear) if is_own else None
    size = parallel_state.get_tensor_model_parallel_world_size() if group is None else group.size()
    # a whole factor of a cut layer, or of one that sees a part of the positions, has a part of
    # its gradient on each rank
    marks = {
        "allreduce": getattr(weight, "allreduce", True) if is_expert else True,
        "sequence_parallel": not is_cut and size > 1,
        # else only the first rank of the group counts it in the norm
        "tensor_model_parallel": is_cut or (is_expert and size == 1),
        "partition_dim": 0 if factor == "B" else 1,
        "partition_stride": 1,
        "is_expert_factor": is_expert,
        "is_cut_factor": is_cut,
        "whole_shape": (whole, part.rank) if factor == "B" else (part.rank, whole),
    }
    for name, value in marks.items():
        setattr(param, name, value)


def _replica(param: torch.nn.Parameter) -> tuple[int, int, int]:
    """Which copy of its part this rank has; the first copy is written."""
    is_expert, is_cut = getattr(param, "is_expert_factor"), getattr(param, "is_cut_factor")  # noqa: B009
    if is_expert:
        among = parallel_state.get_expert_tensor_parallel_rank()
        copies = parallel_state.get_expert_data_parallel_rank()
    else:
        among = parallel_state.get_tensor_model_parallel_rank()
        copies = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return 0, 0 if is_cut else among, copies


def _first_value(name: str, part: Projection) -> Tensor:
    """This rank's part of a factor at the start."""
    if name.endswith("lora_B"):
        return torch.zeros(len(part.rows), part.rank)
    chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.empty(part.rank, part.shape[1]).uniform_(-1, 1, generator=chance)
    bound: float = part.shape[1] ** -0.5
    return whole[:, part.cols.start : part.cols.stop] * bound


def _index(part: Projection) -> Tensor:
    """Rows of the local weight, in the order of the Hugging Face rows."""
    index = torch.empty(len(part.rows), dtype=torch.long)
    for rows, local in part.places:
        index[torch.tensor(rows) - part.rows.start] = torch.tensor(local)
    return index
