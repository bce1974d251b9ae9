"""Worker of test_gpu_checkpoint: a data-parallel rank on the double saves, trains on, and resumes.

    python -m tests.double.checkpoint_ranks FOLDER

FOLDER: with the model of `train_once`.  Each rank writes a `Found` there.  Buckets of gradients are
many and have padding.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.double.load import load

load()


from moerl.config.schema import Config, ModelConfig  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.model import platform  # noqa: E402
from tests.double.on_checkpoint import TWO_RANKS, Saved, gathered_bytes, numbers, stepped  # noqa: E402
from tests.double.train_once import MODEL, Trained, largest_difference  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.parallel import Parallel


@dataclass(frozen=True)
class Found:
    """Bytes of a rank, and largest differences."""

    allocated: int  # on the device while a checkpoint is copied
    gathered: int  # the same as megatron-core saves
    host: int  # of the copy
    loaded: float  # a resumed trainer, from the state that was saved
    resumed: float  # and from the other trainer after one more step


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    place = platform.prepare("cuda", local_rank=rank, impl="local")
    from moerl.trainer.model import parallel

    ranks = parallel.start(TWO_RANKS.parallel, place, timeout_s=patience(60))
    store = BlobStore(folder / f"blobs-{rank}", "n0")
    plan = make_plan(store, dp_size=TWO_RANKS.parallel.dp, max_tokens=48)
    found = measured(folder, lambda: Trained(fresh(folder, ranks, store), plan))
    (folder / f"{rank}.json").write_text(json.dumps(asdict(found)))
    parallel.stop()


def measured(folder: Path, make: Callable[[], Trained]) -> Found:
    whole = stepped(make())
    at_save = numbers(whole)
    saved = Saved(whole, folder / "run")
    gathered = gathered_bytes(whole)
    stepped(whole)
    saved.writer.finish()
    resumed = saved.load(make())
    loaded = largest_difference(numbers(resumed), at_save)
    stepped(resumed)
    return Found(
        allocated=saved.allocated,
        gathered=gathered,
        host=saved.host_bytes(),
        loaded=loaded,
        resumed=largest_difference(numbers(resumed), numbers(whole)),
    )


def fresh(folder: Path, ranks: Parallel, store: BlobStore) -> Learner:
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.learner import step
    from moerl.trainer.model import gpt

    config = Config(model=ModelConfig(path=str(folder / MODEL)), trainer=TWO_RANKS)
    source = HfFolder(config.model.path)
    model = gpt.build(source.spec, TWO_RANKS, ranks, with_replay=True)
    load_hf(model.tensors, model.tiles, source)
    return step.Learner(model, ranks, config, store)


if __name__ == "__main__":
    main()
