"""Blunders of GPU code, put into a function of ours for one test."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TypeGuard

import pytest


@dataclass(frozen=True)
class Blunder:
    """A change of one function; `new` replaces `old` in its source."""

    name: str
    module: str
    function: str  # or Class.method
    old: str
    new: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lines keep their file and numbers, so that what they cause is booked on them."""
        module = sys.modules[self.module]
        owner, name = self._owner(module)
        begin, source = self._source(owner, name)
        tree = ast.parse(source.replace(self.old, self.new))
        ast.increment_lineno(tree, begin - 1)
        made: dict[str, object] = {}
        exec(compile(tree, str(module.__file__), "exec"), vars(module), made)
        old, new = getattr(owner, name), made[name]
        if (
            _is_plain(old)
            and _is_plain(new)
            and old.__code__.co_freevars == new.__code__.co_freevars
        ):
            monkeypatch.setattr(old, "__code__", new.__code__)  # also for modules that imported it
        else:
            monkeypatch.setattr(owner, name, new)

    def _owner(self, module: ModuleType) -> tuple[object, str]:
        owner, _, name = self.function.rpartition(".")
        return (getattr(module, owner) if owner else module), name

    def _source(self, owner: object, name: str) -> tuple[int, str]:
        lines, begin = inspect.getsourcelines(getattr(owner, name))
        source = textwrap.dedent("".join(lines))
        assert source.count(self.old) == 1, f"{self.function} holds no {self.old!r}"
        return begin, source


def _is_plain(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")


REPLAY, COPIES = "moerl.trainer.model.replay", "moerl.algorithms.device_copies"
BLUNDERS = (
    Blunder(
        "a host tensor for an operator of the device",
        REPLAY, "RouteReplay._replay", "upload(rows, scores.device)", "rows",
    ),
    Blunder(
        "a pageable copy in each layer",
        REPLAY, "RouteReplay._replay", "upload(rows, scores.device)", "rows.to(scores.device)",
    ),
    Blunder(
        "a value read in each layer",
        REPLAY, "RouteReplay._replay", "    return scores", "    int(ids.max())\n    return scores",
    ),
    Blunder(
        "a copy to the host for each sum of the loss",
        "moerl.algorithms.loss", "_packed", ".detach().double()",
        ".detach().double().cpu().to(device)",
    ),
    Blunder(
        "a copy on a stream that waits for nothing",
        COPIES, "Download.__init__", "value.is_cuda:",
        "value.is_cuda:\n        torch.cuda.set_stream(torch.cuda.Stream())",
    ),
    Blunder(
        "a buffer read before its copy was waited for",
        "moerl.trainer.learner.step_sums", "SampledScores.wait",
        "(self.entropy", "None and (self.entropy",
    ),
    Blunder(
        "device memory for what is only read once",
        "moerl.trainer.learner.step_sums", "SampledScores.of", "Download(scores.entropy)",
        "Download(proximal_N.new_zeros(1 << 22)[: len(proximal_N)] + scores.entropy)",
    ),
)  # fmt: skip
SNAPSHOT, RECEIVER = "moerl.weight_sync.snapshot", "moerl.weight_sync.receiver"
COMMIT = "moerl.weight_sync.commit_copies"
PUBLISH_BLUNDERS = (
    Blunder(
        "a snapshot that does not wait for the optimizer step",
        SNAPSHOT, "WeightSnapshot._copy",
        "self._stream.wait_stream(torch.cuda.current_stream(device))", "pass",
    ),
    Blunder(
        "an optimizer step that does not wait for the snapshot",
        SNAPSHOT, "WeightSnapshot.before_write", "self._copied.wait()", "pass",
    ),
    Blunder(
        "a training thread that waits for the snapshot",
        SNAPSHOT, "WeightSnapshot.before_write", "self._copied.wait()",
        "self._copied.synchronize()",
    ),
    Blunder(
        "a sender that does not wait for the snapshot",
        "moerl.weight_sync.sender", "WeightSender.send", "self.snapshot.wait()", "pass",
    ),
    Blunder(
        "a snapshot in pageable memory",
        SNAPSHOT, "WeightSnapshot._make", "host_buffer(end)",
        "torch.empty(end, dtype=torch.uint8)",
    ),
    Blunder(
        "a snapshot on the device",
        SNAPSHOT, "WeightSnapshot._make", "host_buffer(end)",
        "torch.empty(end, dtype=torch.uint8, device='cuda')",
    ),
    Blunder(
        "buckets in pageable memory",
        "moerl.weight_sync.packed_buckets", "BucketPacker._claim",
        "host_buffer if self.snapshot.is_locked else _plain_bytes", "_plain_bytes",
    ),
    Blunder(
        "a commit under a forward pass",
        RECEIVER, "Receiver.commit", "_finish(self._device)  # the last forward pass", "pass  #",
    ),
    Blunder(
        "a commit that ends before its copies",
        RECEIVER, "Receiver.commit", "_finish(self._device)  # also", "pass  #",
    ),
    Blunder(
        "pieces copied before their bucket arrived",
        COMMIT, "CommitCopies._stream", "current.wait_event(buckets.stream.record_event())",
        "buckets.stream.record_event()",
    ),
    Blunder(
        "a bucket filled again while its pieces are copied",
        COMMIT, "CommitCopies._stream",
        "buckets.stream.wait_event(before)", "pass",
    ),
    Blunder(
        "a whole version on the device",
        COMMIT, "CommitBuckets.__init__", "max(sizes, default=0)", "sum(sizes)",
    ),
)  # fmt: skip
BASE, ADAPTERS = "moerl.weight_sync.adapters.base_weights", "moerl.trainer.model.lora"
BASE_BLUNDERS = (
    Blunder(
        "all of W0 on the device", BASE, "BaseWeights.__init__", 'place == "device"', "True",
    ),
    Blunder(
        "buckets of all weights", BASE, "BaseWeights.__init__",
        "max(kept.nbytes for kept in self._kept)",
        "sum(kept.nbytes for kept in self._kept)",
    ),
    Blunder(
        "W0 in pageable memory", BASE, "BaseWeights.__init__", "host_tensors(own)",
        "[torch.empty(w.shape, dtype=w.dtype) for w in own]",
    ),
    Blunder(
        "a merge before its W0 arrived", BASE, "BaseBuckets.bring",
        "current.wait_event(self._stream.record_event())", "self._stream.record_event()",
    ),
    Blunder(
        "a bucket filled again under its merge", BASE, "BaseBuckets.bring",
        "self._stream.wait_event(self._used[own])", "pass",
    ),
    Blunder(
        "a thread that waits for each weight", ADAPTERS, "Adapters.merge",
        "(weight != before).sum()", "int((weight != before).sum())",
    ),
)  # fmt: skip
ENGINE_BASE_BLUNDERS = (BASE_BLUNDERS[0], *BASE_BLUNDERS[3:5])
REF_MODEL, SCHEDULE = "moerl.trainer.learner.ref_model", "moerl.trainer.passes.schedule"
REF_BLUNDERS = (
    Blunder(
        "scores of a reference left on the host",
        REF_MODEL, "RefModel.logprobs", "return score(self.model, batches, Mode.OFF)",
        "return {n: t.cpu() for n, t in score(self.model, batches, Mode.OFF).items()}",
    ),
    Blunder(
        "scores of separate ranks fetched one by one",
        "moerl.trainer.ref_model_loop", "RefModelLoop.score", "to_host(policy.logprobs(batches))",
        "{n: t.cpu() for n, t in policy.logprobs(batches).items()}",
    ),
    Blunder(
        "scores of separate ranks from pageable memory",
        SCHEDULE, "Batches.by_microbatch", "upload(value, self.parallel.device)",
        "value.to(self.parallel.device)",
    ),
    Blunder(
        "temperatures on the host",
        "moerl.trainer.passes.forward", "sampled_logprobs",
        "upload(batch.temperature[batch.held], hidden_MH.device)", "batch.temperature[batch.held]",
    ),
)  # fmt: skip
CRITIC, VALUES = "moerl.trainer.learner.critic", "moerl.trainer.passes.values"
VALUE_BLUNDERS = (
    Blunder(
        "values with their graph",
        VALUES, "values_at", "scoring(model)", "torch.enable_grad()",
    ),
    Blunder(
        "values fetched one by one",
        CRITIC, "Critic.values", "to_host(found)", "{n: t.cpu() for n, t in found.items()}",
    ),
)  # fmt: skip
CRITIC_BLUNDERS = (
    Blunder(
        "scores of a whole batch fetched one by one",
        "moerl.trainer.passes.proximal", "_by_row", "to_host(reference.logprobs[role])",
        "{n: t.cpu() for n, t in reference.logprobs[role].items()}",
    ),
    Blunder(
        "a loss read in each microbatch",
        CRITIC, "_Sums.add", "[tokens, loss.detach(),", "[tokens, tokens * loss.item() / tokens,",
    ),
    Blunder(
        "returns from pageable memory",
        CRITIC, "Critic._loss", "upload(batch.advantage, device)", "batch.advantage.to(device)",
    ),
    Blunder(
        "weights of the loss on the host",
        CRITIC, "Critic._loss", "upload(batch.weight, device)", "batch.weight",
    ),
    Blunder(
        "rows of the values found on the device",
        VALUES, "values_of_output", "upload(batch.sampled_rows, output_BS1.device)",
        "upload(torch.zeros(output_BS1.numel()).index_fill(0, batch.sampled_rows, 1) > 0, "
        "output_BS1.device)",
    ),
)  # fmt: skip
HEAD = "moerl.algorithms.head_plan"
HEAD_BLUNDERS = (
    Blunder(
        "owners of kept entries as many as the device counts", HEAD, "KeptList.make",
        "lengths, output_size=len(ids))", "lengths)",
    ),
    Blunder(
        "kept entries from pageable memory", HEAD, "KeptList.make",
        "moved = upload(", "moved = (lambda tensor, place: tensor.to(place))(",
    ),
    Blunder(
        "the first row of a piece read on the device", HEAD, "KeptList.logits",
        "- rows.start", "- (rows.start + 0 * int(self.owner[0]))",
    ),
    Blunder(
        "entries of a piece made unique", "moerl.algorithms.head_logprob",
        "_Product._add_to_entries",
        "some = ids[entries]", "some = ids[entries]\n        some.unique_consecutive()",
    ),
)  # fmt: skip
PLUGIN = "moerl.engine.plugin"
DECODE_BLUNDERS = (
    Blunder(
        "a value read in each sampling", f"{PLUGIN}.top_k_first", "_largest",
        "torch.topk(probs, k)", "torch.topk(probs, k + int(probs.argmax() * 0))",
    ),
    Blunder(
        "rows with a weight chosen on the device", f"{PLUGIN}.top_k_first", "_largest",
        "torch.topk(probs, k)", "torch.topk(probs[(probs > -1).all(1)], k)",
    ),
    Blunder(
        "a scheduler that waits before each output", f"{PLUGIN}.record_output", "to_files",
        "replies = _replies()",
        "__import__('torch').cuda.synchronize()\n    replies = _replies()",
    ),
)  # fmt: skip
PARKED, SLEEPING = "moerl.trainer.learner.parked", "moerl.engine.plugin.sleep_hooks"
TURN_BLUNDERS = (
    Blunder(
        "host memory page-locked anew in each turn", PARKED, "Parked._copy_out",
        "if part not in self._host or", "if True or",
    ),
    Blunder(
        "parked parts in pageable memory", PARKED, "Parked._copy_out",
        "host_buffer(sum(sizes))", "torch.empty(sum(sizes), dtype=torch.uint8)",
    ),
    Blunder(
        "a KV cache that comes before torch's cache is emptied", PARKED, "Parked.out",
        "torch.cuda.empty_cache()", "pass",
    ),
    Blunder(
        "an engine that keeps its activations while it sleeps", SLEEPING, "change",
        "torch.cuda.empty_cache()", "pass",
    ),
    Blunder(
        "a buffer of gradients that stays", PARKED, "Parked.out",
        "storage.resize_(0)", 'part == "gradients" or storage.resize_(0)',
    ),
    Blunder(
        "an optimizer that leaves after the publish", "moerl.trainer.train_loop",
        "TrainLoop._hand_over",
        'parked.out(part for part in PARTS if part in moves and part != "weights")', "pass",
    ),
    Blunder(
        "a thread that waits for each storage", PARKED, "Parked._copy_out",
        "non_blocking=True)", "non_blocking=True)\n        torch.cuda.synchronize()",
    ),
)  # fmt: skip
