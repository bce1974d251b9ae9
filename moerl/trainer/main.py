"""One rank of the trainer, started by torchrun:

    torchrun ... -m moerl.trainer.main --run-dir runs/X --controller tcp://127.0.0.1:PORT ...

`--ref-models` makes it a rank of the reference models instead (`moerl.trainer.ref_model_loop`).
On its own nodes the trainer gets `--run-dir` alone and reads the other arguments from the run's
endpoints folder (`moerl.trainer.train_loop`).

The trainer does not use Ray.  A rank that fails reports one sentence to the controller and exits at
once: its peers may hang in a collective, torchrun ends them.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moerl.config.clusters import bind_node_address, trainer_share
from moerl.config.load import load_saved
from moerl.config.schema import Config
from moerl.core.errors import MoerlError, cause_of
from moerl.core.rpc import Keys
from moerl.kernels.library import describe
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.runtime.stack_dump import write_on_request
from moerl.trainer.model import platform

if TYPE_CHECKING:
    from moerl.trainer.train_loop import RankContext

log = logging.getLogger(__name__)

_NO_ATTENTION = "No dot product attention backend"  # of Transformer Engine
_LOCAL = "cuDNN has no kernel for these rows: use trainer.transformer_impl=local"


def main() -> None:
    """Train as one rank until the controller stops the run."""
    args = _arguments()
    run = RunDir(args.run_dir)
    job = "ref_models" if args.ref_models else "trainer"
    _log_to(run.logs / f"{job}-{os.environ.get('RANK', '0')}.log")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also during a wait for a missing peer
    config = bind_node_address(load_saved(run.config))
    try:
        place = platform.prepare(
            config.trainer.platform,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            impl=config.trainer.transformer_impl,
            share=1.0 if args.ref_models else trainer_share(config),
        )
    except MoerlError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    torch.set_num_threads(platform.rank_threads(config.trainer, place))
    log.info(describe("cpu"))
    # `prepare` must run before any import of megatron
    from moerl.trainer.model import parallel
    from moerl.trainer.ref_model_loop import RefModelLoop, own_layout
    from moerl.trainer.train_loop import TrainLoop, join_run

    config = own_layout(config) if args.ref_models else config
    context, start = _find_context(args, run, config)

    def end(error: BaseException) -> None:
        _tell(error, context, job)
        os._exit(1)

    try:
        ranks = parallel.start(
            config.trainer.parallel, place, timeout_s=config.trainer.step_timeout_s
        )
        if args.ref_models:
            RefModelLoop(config, context, ranks).run()
        else:
            if start:
                context = join_run(context, ranks)
            TrainLoop(config, context, ranks, end).run()
            if start and ranks.is_first:
                run.endpoints.done(start)
        parallel.stop()
    except BaseException as error:
        end(error)


def _find_context(args: argparse.Namespace, run: RunDir, config: Config) -> tuple[RankContext, str]:
    """This rank's context, and the opening of the endpoints folder that it comes from.

    The second is empty when the context comes from the command line.
    """
    from moerl.trainer.train_loop import RankContext, bind, read_endpoints

    if not args.controller:
        bind(config)
        return read_endpoints(run, config)
    os.environ.pop("MOERL_TOKEN", None)  # no process that this rank starts inherits it
    context = RankContext(
        run=run,
        controller=args.controller,
        keys=Keys.read(run.endpoints.keys),
        incarnation=args.incarnation,
        blobs=BlobStore(args.blob_dir, args.blob_node),
        checkpoint=args.checkpoint,
        reset_optimizer=args.reset_optimizer,
        is_rerun=args.rerun,
    )
    return context, ""


def cause_with_remedy(error: BaseException) -> str:
    if _NO_ATTENTION in str(error) and _LOCAL not in getattr(error, "__notes__", ()):
        error.add_note(_LOCAL)
    return cause_of(error)


def _tell(error: BaseException, context: RankContext, job: str) -> None:
    """Report the error in one sentence to the log, to torchrun and to the controller."""
    from moerl.trainer.train_loop import report_failure

    cause = cause_with_remedy(error)
    log.error("this rank ends: %s", cause, exc_info=error)
    rank = os.environ.get("RANK")
    print(f"TrainerError: {job} rank {rank}: {cause}", file=sys.stderr, flush=True)
    report_failure(context, error, job)


def _log_to(path: Path) -> None:
    warnings.filterwarnings("ignore")  # megatron names every optional package it lacks
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    write_on_request(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="runs/NAME, with config.yaml")
    parser.add_argument(
        "--controller", default="", help="tcp://HOST:PORT; empty: see the endpoints folder"
    )
    parser.add_argument(
        "--ref-models", action="store_true", help="score with reference and teacher"
    )
    parser.add_argument("--incarnation", type=int, default=0, help="starts before this one")
    parser.add_argument("--checkpoint", type=Path, help="continue from this folder")
    parser.add_argument(
        "--reset-optimizer", action="store_true", help="fresh optimizer state after --checkpoint"
    )
    parser.add_argument("--rerun", action="store_true", help="publish nothing: there is no engine")
    parser.add_argument("--blob-dir", type=Path, help="where records are sealed")
    parser.add_argument("--blob-node", help="name of this node's blobs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
