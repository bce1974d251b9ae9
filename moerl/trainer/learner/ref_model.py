"""A policy that is never trained: the reference of a KL, or a teacher.

It has its own weights and routers (always live: the recorded routes are the student's).  It scores
the student's tokens at the student's temperature and over the student's recorded sampling masks, so
that both distributions have the same support; an engine's prompt log-probabilities would be at
temperature 1 over the whole vocabulary.

`ref_models.placement: trainer` keeps it on the ranks and in the layout of the student: one more
forward pass without gradient over the batch, before its first optimizer step.  With `separate`
it has its own ranks (`moerl.trainer.ref_model_loop`): they score while the previous batch trains.
"""

from __future__ import annotations

from torch import Tensor

from moerl.config.algorithms import ref_models_of
from moerl.config.schema import Config, TrainerConfig
from moerl.errors import ConfigError
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.model.gpt import build
from moerl.trainer.model.layer_calls import Mode
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes.router_losses import without_router_losses
from moerl.trainer.passes.schedule import Batches, score


def open_ref_models(config: Config, vocab_size: int, parallel: Parallel) -> dict[str, RefModel]:
    """Every reference model that the algorithm needs, by role.  vocab_size: of the student."""
    return {
        role: RefModel(f"algorithm.{role}", folder, vocab_size, config.trainer, parallel)
        for role, folder in ref_models_of(config).items()
    }


class RefModel:
    """One rank's part of a model that only scores."""

    def __init__(
        self, field: str, path: str, vocab_size: int, trainer: TrainerConfig, parallel: Parallel
    ) -> None:
        """field: the setting that names `path`, a Hugging Face folder.

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
        self.model = build(source.spec, without_router_losses(trainer), parallel, with_replay=False)
        load_hf(self.model.tensors, self.model.tiles, source)
        for chunk in self.model.chunks:
            chunk.module.requires_grad_(False).eval()

    def logprobs(self, batches: Batches) -> dict[int, Tensor]:
        """[N] fp32 log-probabilities of the sampled tokens by microbatch, on the last stage."""
        return score(self.model, batches, Mode.OFF)
