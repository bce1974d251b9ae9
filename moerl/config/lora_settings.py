"""`lora`: which weights get low-rank factors, of which rank, and how they are scaled.

W = W0 + scale * B A, A [rank, in], B [out, rank].  One scale holds for all weights, also where
`ranks` gives some of them another rank: a rank is a capacity, not a strength.
Idea: LoRA, Hu et al., 2106.09685; rsLoRA, Kalajdzievski, 2312.03732.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from moerl.config.bounds import Natural, NonNegative, Several, UserPath

SLOT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Modules whose adapters SGLang's slots serve without a kernel of Triton."""

BasePlace: TypeAlias = Literal["host", "device"]


@dataclass(frozen=True)
class LoraConfig:
    rank: Natural = 0  # 0 = off: all weights are trained
    alpha: NonNegative = 0.0  # the scale is alpha / rank; 0 = the rank, a scale of 1
    rslora: bool = False  # the scale is alpha / sqrt(rank)
    dropout: NonNegative = 0.0  # must be 0
    # patterns of Hugging Face modules, such as model.layers.0.mlp.experts.3.up_proj
    targets: list[str] = field(default_factory=lambda: ["*_proj", "*_proj_with_mqa"])
    ranks: dict[str, int] = field(default_factory=dict)  # pattern -> rank of these; the last counts
    start: UserPath = ""  # folder of peft whose factors are the first ones; "" = A random, B 0
    experts: Literal["per_expert", "shared"] = "per_expert"
    """`shared`: one A of gate, of up, and one B of down for all experts of a layer."""
    send: Literal["factors", "weights"] = "factors"
    """What a publish sends: A and B, which each engine rank merges, or the merged weights."""

    delivery: Literal["merged", "adapter"] = "merged"
    """Engines serve W0 + s B A as their weights, or W0 with an adapter of SGLang per version."""

    slots: Several = 4  # adapters that an engine holds at once; with delivery = adapter
    base: BasePlace = field(default="host", compare=False)
    """Where W0 is kept: page-locked host memory, or beside the weights that it makes."""

    @property
    def sends_factors(self) -> bool:
        return self.rank > 0 and self.send == "factors"

    @property
    def serves_adapters(self) -> bool:
        return self.rank > 0 and self.delivery == "adapter"

    @property
    def shares(self) -> bool:
        return self.experts == "shared"

    @property
    def scale(self) -> float:
        divisor = math.sqrt(self.rank) if self.rslora else self.rank
        return (self.alpha or self.rank) / divisor

    def rank_of(self, module: str) -> int:
        """Rank of the factors of a Hugging Face module's weight; 0 = it is not a target."""
        if not any(fnmatchcase(module, pattern) for pattern in self.targets):
            return 0
        own = [rank for pattern, rank in self.ranks.items() if fnmatchcase(module, pattern)]
        return own[-1] if own else self.rank
