"""Optimizer steps whose loss or gradient is not finite: named, not taken, and bounded.

All ranks decide the same: loss and norm are sums over ranks, and one rank that disagrees is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from moerl.core.errors import NonRetryableError
from moerl.core.messages import BadStep
from moerl.core.types import BatchPlan
from moerl.distributed.object_collectives import all_gather_values
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel
from moerl.trainer.passes.schedule import ForwardStep, places_of


class BadSteps:
    """Counts batches with an optimizer step that is not taken, one after the other."""

    def __init__(self, limit: int, parallel: Parallel) -> None:
        """Count no bad step yet.  limit: bad batches in a row; `trainer.skip_bad_steps`."""
        self.report: Callable[[BadStep], None] = lambda bad: None  # called on every rank
        self._limit, self._parallel = limit, parallel
        self._in_a_row, self._skipped = 0, 0  # batches; optimizer steps of this batch

    def agree(self, is_finite: bool) -> bool:
        """Whether all ranks have a finite value; collective."""
        agreed = torch.tensor(int(is_finite))
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._parallel.control)
        return bool(agreed)

    def skip(self, plan: BatchPlan, cause: str, microbatches: Collection[int]) -> None:
        """The optimizer step of this plan is not taken; collective.

        microbatches: on this rank, with a bad loss or gradient; on no rank any: unknown.
        Raises NonRetryableError beyond the limit.
        """
        mine = [(self._parallel.dp_rank, number) for number in microbatches]
        every = all_gather_values(mine, list[tuple[int, int]], self._parallel.control)
        places = sorted({place for part in every for place in part})
        rollouts, words = places_of(plan, places)
        text = f"step {plan.step}: {cause} {words or 'and no microbatch alone gives it'}"
        self._skipped += 1
        count, ends = self._in_a_row + 1, self._in_a_row >= self._limit
        if not ends:
            text += f"; the step is not taken, {count} in a row of trainer.skip_bad_steps = "
            text += str(self._limit)
        self.report(BadStep(plan.step, self._skipped, text, tuple(rollouts)))
        if ends:
            raise NonRetryableError(text)

    def end(self) -> dict[str, float]:
        """The batch is over; its metrics."""
        skipped, self._skipped = self._skipped, 0
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        return {"loss/skipped_steps": float(skipped)} if self._limit else {}


def bad_gradients(
    model: Model,
    ddp: Sequence[DistributedDataParallel],
    step: ForwardStep,
    run: Callable[[ForwardStep], object],
) -> list[int]:
    """Numbers of this rank's microbatches whose own gradient is not finite; collective.

    run: the whole pass with a given forward step, once more.  An answer needs a schedule in which
    the backward pass follows at once, as on the last stage.  Gradients of experts hold tokens of
    other ranks, so they count only where nothing else is trained.
    """
    params = [p for chunk in ddp for p in chunk.parameters() if hasattr(p, "main_grad")]
    dense = [p for p in params if getattr(p, "allreduce", True)] or params
    found: list[int] = []
    num_forwarded = 0

    def look() -> None:
        if num_forwarded and not all(bool(p.main_grad.isfinite().all()) for p in dense):
            found.append(num_forwarded - 1)
        for param in params:
            param.main_grad.zero_()

    def watched(passes: Iterator[Any], module: Any) -> Any:
        nonlocal num_forwarded
        look()
        num_forwarded += 1
        return step(passes, module)

    with _unreduced(model, ddp):
        run(watched)
    look()
    is_exact = len(ddp) == 1 and model.chunks[0].gpt.post_process
    return found if is_exact else []


@contextmanager
def _unreduced(model: Model, ddp: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Gradients stay on their rank."""
    config = model.config
    plain = config.finalize_model_grads_func, config.no_sync_func
    with ExitStack() as stack:
        for chunk in ddp:
            stack.enter_context(chunk.no_sync())
        config.finalize_model_grads_func = config.no_sync_func = None
        try:
            yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = plain
