"""A policy that is never trained: the reference of a KL, or a teacher.

It has its own weights and routers (always live: the recorded routes are the student's).  It scores
the student's tokens at the student's temperature and over the student's recorded sampling masks, so
that both distributions have the same support; an engine's prompt log-probabilities would be at
temperature 1 over the whole vocabulary.

With adapters the reference is the trained model itself with its adapters off (`BasePolicy`), unless
`algorithm.reference` names a folder or it has its own ranks.

`ref_models.placement: trainer` keeps it on the ranks and in the layout of the student: one more
forward pass without gradient over the batch, before its first optimizer step.  With `separate`
it has its own ranks (`moerl.trainer.ref_model_loop`): they score while the previous batch trains.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moerl.config.algorithms import ref_models_of
from moerl.config.schema import Config
from moerl.core.errors import ConfigError
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.model.gpt import Model, build
from moerl.trainer.model.layer_calls import Mode
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes.router_losses import without_router_losses
from moerl.trainer.passes.schedule import Batches, score
from moerl.trainer.passes.values import values_at

log = logging.getLogger(__name__)


def open_ref_models(config: Config, vocab_size: int, parallel: Parallel) -> dict[str, RefModel]:
    """Every reference model that the algorithm needs, by role.  vocab_size: of the student."""
    return {
        role: RefModel(f"algorithm.{role}", folder, vocab_size, config, parallel)
        for role, folder in ref_models_of(config).items()
    }


class RefModel:
    """One rank's part of a model that only scores."""

    def __init__(
        self, field: str, path: str, vocab_size: int, config: Config, parallel: Parallel
    ) -> None:
        """Load the model.

        field: the setting that names `path`, a Hugging Face folder.

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
        self.model = _frozen(source, config, parallel)

    def logprobs(self, batches: Batches) -> dict[int, Tensor]:
        """[N] fp32 log-probabilities of the sampled tokens by microbatch, on the last stage."""
        return score(self.model, batches, Mode.OFF)


class RewardModel:
    """One rank's part of a model with a value head that only scores."""

    def __init__(self, path: str, config: Config, parallel: Parallel) -> None:
        """path: a folder of transformers' sequence or token classification, with one label.

        Raises ModelError for any other folder.
        """
        source = HfFolder(path)
        self._is_logit = source.config.get("problem_type") == "multi_label_classification"
        self.model = _frozen(source, config, parallel)

    def values(self, batches: Batches) -> dict[int, Tensor]:
        """[N] fp32 by microbatch, on the last stage; probabilities where it was trained to them."""
        found = values_at(self.model, batches)
        return {n: v.sigmoid() for n, v in found.items()} if self._is_logit else found


def _frozen(source: HfFolder, config: Config, parallel: Parallel) -> Model:
    model = build(
        source.spec,
        without_router_losses(config.trainer),
        parallel,
        with_replay=False,
        fp32_head=config.model.fp32_lm_head,
    )
    load_hf(model.tensors, model.tiles, source)
    for chunk in model.chunks:
        chunk.module.requires_grad_(False).eval()
    return model


class BasePolicy:
    """The trained model with adapters off: W0 takes the place of the weights while it scores.

    Merging again gives the same bits, so no copy of the merged weights is needed.
    """

    def __init__(self, model: Model, before_swap: Callable[[], None]) -> None:
        """Use the trained model.  before_swap: waits for threads that still copy the weights."""
        self.swap_s = 0.0  # of the last batch
        self._model, self._before_swap = model, before_swap

    def logprobs(self, minibatches: Sequence[Batches]) -> list[dict[int, Tensor]]:
        """As `RefModel.logprobs`, of every minibatch of a batch: weights are exchanged once."""
        self._before_swap()
        to_base_s = _timed(self._model.unmerge)
        try:
            return [score(self._model, batches, Mode.OFF) for batches in minibatches]
        finally:
            back_s = _timed(self._model.merge)
            self.swap_s = to_base_s + back_s
            log.info(
                "adapters were off for the reference: W0, %.3g GB, took their place in %.3g s, "
                "the merge after it %.3g s",
                sum(one.base_bytes for one in self._model.adapters) / 1e9,
                to_base_s,
                back_s,
            )


def _timed(exchange: Callable[[], object]) -> float:
    """Seconds until the device has exchanged the weights."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the work before it is not its
    begin = time.perf_counter()
    exchange()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin
