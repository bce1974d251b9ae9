"""Checks of the lines of a run's files: some before the engines start, the rest meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moerl.config import Config
from moerl.config.engine_context import longest_sequence
from moerl.config.task_mixture import entries_of, naming
from moerl.config.task_tables import SOURCES
from moerl.core.errors import MoerlError
from moerl.core.types import Prompt
from moerl.data.prompt_checks import MOST_LINES, MOST_S, LineCheck
from moerl.data.tasks import PromptMixture, usable
from moerl.data.value_rows import learnable
from moerl.launch.run_context import held_out_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
log = logging.getLogger(__name__)
_ANY, _QUICK_S = 1 << 40, 1.0
_PART = 1000  # lines between two looks at the clock


@contextlib.contextmanager
def model_tokenizer(config: Config) -> Iterator[Tokenizer | None]:
    """The tokenizer of a model that may not be made yet; None: it, or transformers, is missing."""
    folder = Path(config.model.path)
    with tempfile.TemporaryDirectory() as made:
        if config.model.tiny.enabled and not config.model.path:
            from moerl.data.tiny_model import write_tokenizer

            folder = Path(made)
            write_tokenizer(folder)
        has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
        tokenizer = None
        if has_tokenizer:
            from moerl.data.tasks import load_tokenizer

            with contextlib.suppress(ImportError):
                tokenizer = load_tokenizer(folder)
        yield tokenizer


def line_checks(
    config: Config,
    tokenizer: Tokenizer | None,
    max_positions: int,
    use: Callable[[Prompt], object] | None = None,
) -> LineChecks:
    """Checks of training and evaluation files.

    max_positions: of the model.  use: as of LineCheck.  Raises ConfigError for files that cannot be
    read.
    """
    seed, longest = config.run.seed, longest_sequence(config.engine, max_positions)
    mixtures = [PromptMixture(entries_of(config), tokenizer, seed, longest)]
    if config.evaluation.every:
        mixtures.append(PromptMixture(held_out_entries(config), tokenizer, seed, longest))
    return LineChecks(mixtures, use)


def check_fields(config: Config, *, learned: bool = False) -> None:
    """Check the fields of the first lines, for a second and without a tokenizer.

    It needs neither torch nor transformers, so a bad file is reported before they are imported.
    learned: a supervised run learns the answers.  Raises ConfigError.
    """
    if any(SOURCES[entry.name].files for entry in entries_of(config)):
        use = learnable(config.sft.value_head) if learned else None
        line_checks(config, None, _ANY, use).begin(lambda _: None, _QUICK_S)


class LineChecks:
    """Of training prompts and held-out prompts."""

    def __init__(
        self, mixtures: Sequence[PromptMixture], use: Callable[[Prompt], object] | None = None
    ) -> None:
        """Start no check; mixtures: the training prompts first.  use: as of LineCheck."""
        self._mixtures = mixtures
        self.checks = [
            LineCheck(*stream, use=use) for mixture in mixtures for stream in mixture.streams
        ]
        self.training = self.checks[: len(mixtures[0].streams)]
        self._failure: MoerlError | None = None

    def begin(self, say: Callable[[str], None], most_s: float = MOST_S) -> None:
        """Check up to `MOST_LINES` lines of each file, all together for `most_s` seconds.

        say: receives a line for each file with findings.
        Raises ConfigError for lines that cannot be used, and a task without a prompt.
        """
        begin = time.monotonic()
        for number, one in enumerate(self.checks):
            share = (most_s - (time.monotonic() - begin)) / (len(self.checks) - number)
            with naming(one.task):
                one.go_on(MOST_LINES, time.monotonic() + share)
                one.refuse()
            if summary := one.summary():
                say(summary)
        for line in self.overlaps():
            say(line)
        for mixture in self._mixtures:
            next(usable(mixture.prompt))

    def overlaps(self) -> Iterator[str]:
        """Sentences about held-out lines that are trained, as far as both were read."""
        for held_out in self.checks[len(self.training) :]:
            for one in self.training:
                if count := int(np.isin(held_out.hashes, one.hashes).sum()):
                    names = f"held-out prompts of {held_out.task.path} are in {one.task.path} too"
                    yield f"warning: {count:,} of {held_out.read:,} {names}"

    def go_on(self) -> None:
        """Check the other lines in a thread, when the machine has nothing else to do."""
        if any(one.read < one.lines for one in self.checks):
            threading.Thread(target=self._finish, name="line-checks", daemon=True).start()

    def raise_failure(self) -> None:
        """Raises ConfigError when the other lines have too many that cannot be used."""
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for one in self.checks:
                with naming(one.task):
                    while one.read < one.lines:
                        one.go_on(one.read + _PART, float("inf"))
                        one.refuse()
                log.info(
                    "all %d lines of %s are checked. %s", one.lines, one.task.path, one.summary()
                )
            for line in self.overlaps():
                log.warning(line)
        except MoerlError as error:
            self._failure = error
