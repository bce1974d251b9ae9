"""A second policy inside the trainer, never trained: the reference of a KL or a teacher.

A model of its own, with its own routers (always live: the recorded routes are the student's) and
its own weights, on the ranks and in the layout of the student.  It scores the student's tokens at
the student's temperature and over the student's recorded kept sets, so that both distributions have
the same support; an engine's prompt log-probabilities would be at temperature 1 over the whole
vocabulary.  One more forward per microbatch and no gradient.

Legend: N sampled tokens of a microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moerl.config.schema import TrainerConfig
from moerl.data.packing import Microbatch
from moerl.errors import ConfigError
from moerl.trainer import forward
from moerl.trainer.hf_folder import HfFolder, load_hf
from moerl.trainer.model import build
from moerl.trainer.parallel import Parallel
from moerl.trainer.replay import Mode


class FrozenPolicy:
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
        if parallel.sizes.pp > 1:
            raise ConfigError(
                field, path, "a second model is not scored over pipeline stages; use pp 1"
            )
        self.parallel = parallel
        self.model = build(source.spec, trainer, parallel, with_replay=False)
        load_hf(self.model.tensors, self.model.tiles, source)
        self.model.module.requires_grad_(False).eval()

    @torch.no_grad()
    def logprobs(self, batch: Microbatch) -> Tensor:
        """[N] fp32 log-probabilities of the sampled tokens, equal on all tensor-parallel ranks."""
        logits = forward.logits(self.model, self.model.module, batch, 0, Mode.OFF)
        return forward.sampled_logprobs(self.model, logits, batch, self.parallel)[0]
