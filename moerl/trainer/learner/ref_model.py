"""A policy that is never trained: the reference of a KL, or a teacher.

It has its own weights and routers (always live: the recorded routes are the student's).  It scores
the student's tokens at the student's temperature and over the student's recorded sampling masks, so
that both distributions have the same support; an engine's prompt log-probabilities would be at
temperature 1 over the whole vocabulary.

With adapters the reference is the trained model itself with its adapters off, and a teacher that
follows the policy is it with the adapters of another version (`BorrowedPolicy`), unless
`algorithm.reference` names a folder or they have their own ranks.

A teacher that follows the policy has no weights until its first `take`.  While it takes a version
it has none, so it never scores with a part of one.

`ref_models.placement: trainer` keeps it on the ranks and in the layout of the student: one more
forward pass without gradient over the batch, before its first optimizer step.  With `separate`
it has its own ranks (`moerl.trainer.ref_model_loop`): they score while the previous batch trains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from moerl.config.algorithms import followers_of, ref_field, ref_models_of
from moerl.config.schema import Config
from moerl.core.errors import ConfigError
from moerl.core.types import PolicyVersion
from moerl.layout import hf_shapes
from moerl.trainer.hf_io.adapter_files import load_adapter
from moerl.trainer.hf_io.content_digest import content_digest
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.hf_io.teacher_folder import check_digest, factors_digest
from moerl.trainer.model.gpt import Model, build
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.model.replay import Mode
from moerl.trainer.passes.router_losses import without_router_losses
from moerl.trainer.passes.schedule import Batches, score
from moerl.trainer.passes.values import values_at

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_ref_models(config: Config, vocab_size: int, parallel: Parallel) -> dict[str, RefModel]:
    """Every reference model that the algorithm needs, by role.  vocab_size: of the student."""
    follows = followers_of(config.algorithm)
    return {
        role: RefModel(
            ref_field(role), folder, vocab_size, config, parallel, follows=role in follows
        )
        for role, folder in ref_models_of(config).items()
    }


class RefModel:
    """One rank's part of a model that only scores."""

    def __init__(
        self,
        field: str,
        path: str,
        vocab_size: int,
        config: Config,
        parallel: Parallel,
        *,
        follows: bool = False,
    ) -> None:
        """Load the model.

        field: the setting that names `path`, a Hugging Face folder.  follows: its weights come by
        `take`, with lora.rank as adapters of the folder's weights.

        Raises ConfigError when its vocabulary is not the student's or the model cannot be built.
        """
        source = HfFolder(path)
        if source.spec.vocab_size != vocab_size:
            raise ConfigError(
                field,
                path,
                f"it has {source.spec.vocab_size} vocabulary entries, the trained model has "
                f"{vocab_size}; both must share a tokenizer",
            )
        self.version: PolicyVersion | None = None  # that it took last, whole
        self._lora, self._parallel = config.lora, parallel
        self.model = _frozen(source, config, parallel, follows=follows)

    def logprobs(self, batches: Batches) -> dict[int, Tensor]:
        """[N] fp32 log-probabilities of the sampled tokens by microbatch, on the last stage."""
        return score(self.model, batches, Mode.OFF)

    def take(self, version: PolicyVersion, folder: Path) -> None:
        """Take a version of the policy; collective.  Raises ModelError for other weights."""
        self.version, model, group = None, self.model, self._parallel.control
        if model.adapters:
            model.set_factors(load_adapter(folder, model.spec, self._lora))
            sizes = self._parallel.sizes
            found = factors_digest(model.factors(), model.spec, self._lora, sizes, group)
        else:
            load_hf(model.tensors, model.tiles, HfFolder(folder))
            found = content_digest(model.tensors, model.tiles, hf_shapes(model.spec), group)
        check_digest(folder, found)
        self.version = version
        log.info("%s is loaded, digest %s", folder, found)


class RewardModel:
    """One rank's part of a model with a value head that only scores."""

    def __init__(self, path: str, config: Config, parallel: Parallel) -> None:
        """Load a folder of transformers' sequence or token classification, with one label.

        Raises ModelError for any other folder.
        """
        source = HfFolder(path)
        self._is_logit = source.config.get("problem_type") == "multi_label_classification"
        self.model = _frozen(source, config, parallel)

    def values(self, batches: Batches) -> dict[int, Tensor]:
        """[N] fp32 by microbatch, on the last stage; probabilities where it was trained to them."""
        found = values_at(self.model, batches)
        return {n: v.sigmoid() for n, v in found.items()} if self._is_logit else found


def _frozen(
    source: HfFolder, config: Config, parallel: Parallel, *, follows: bool = False
) -> Model:
    model = build(
        source.spec,
        without_router_losses(config.trainer),
        parallel,
        with_replay=False,
        lora=config.lora if follows else None,
        fp32_head=config.model.fp32_lm_head,
    )
    if not follows or model.adapters:
        load_hf(model.tensors, model.tiles, source)
        model.keep_base()
    for chunk in model.chunks:
        chunk.module.requires_grad_(False).eval()
    return model


class BorrowedPolicy:
    """The trained model with adapters off, or with a teacher's adapters, while it scores.

    Merging again gives the same bits, so no copy of the merged weights is needed.
    """

    def __init__(
        self, model: Model, config: Config, parallel: Parallel, before_swap: Callable[[], None]
    ) -> None:
        """Use the trained model.  before_swap: waits for threads that still copy the weights."""
        self.swap_s = 0.0  # of the last batch
        self.version: PolicyVersion | None = None  # of the adapters; None: they are off
        self._model, self._lora, self._before_swap = model, config.lora, before_swap
        self._parallel = parallel
        self._factors: dict[str, Tensor] = {}  # whole, of the teacher

    def take(self, version: PolicyVersion, folder: Path) -> None:
        """As `RefModel.take`, the adapters alone."""
        self.version, spec = None, self._model.spec
        self._factors = load_adapter(folder, spec, self._lora)
        own, parts = self._model.factors(), self._model.parts_of(self._factors)
        parts = {name: part.to(own[name].dtype) for name, part in parts.items()}
        sizes = self._parallel.sizes
        found = factors_digest(parts, spec, self._lora, sizes, self._parallel.control)
        check_digest(folder, found)
        self.version = version

    def each(self, minibatches: Sequence[Batches], value: Callable[[Model, Batches], T]) -> list[T]:
        """A value of every minibatch of a batch, as of a model: weights are exchanged once."""
        self._before_swap()
        own = {name: factor.clone() for name, factor in self._model.factors().items()}
        to_s = _timed(self._exchange)
        try:
            return [value(self._model, batches) for batches in minibatches]
        finally:
            back_s = _timed(lambda: self._restore(own))
            self.swap_s = to_s + back_s
            log.info(
                "the trained model had other adapters (%s): exchanged in %.3g s, W0 is %.3g GB, "
                "the merge after it %.3g s",
                self.version or "none",
                to_s,
                sum(one.base_bytes for one in self._model.adapters) / 1e9,
                back_s,
            )

    def _exchange(self) -> None:
        if self._factors:
            self._model.set_factors(self._factors)
        else:
            self._model.unmerge()

    def _restore(self, own: dict[str, Tensor]) -> None:
        for name, factor in self._model.factors().items() if self._factors else ():
            factor.copy_(own[name])
        self._model.merge()


def _timed(exchange: Callable[[], object]) -> float:
    """Seconds until the device has exchanged the weights."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the work before it is not its
    begin = time.perf_counter()
    exchange()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
