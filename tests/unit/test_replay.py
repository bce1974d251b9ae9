"""RouteReplay refuses everything but each recorded row, once per forward and once per recompute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moerl.algorithms.head_logprob import Head, SamplingMask, kept_logprobs
from moerl.core.errors import RecordError, TrainerError
from moerl.trainer.model.replay import LayerReplay, Mode, RouteReplay
from moerl.trainer.passes.router_losses import balance_loss, z_loss

E, K, N = 6, 2, 5


def _rows(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(N)])


def _replay(layers: tuple[int, ...] = (1, 3)) -> RouteReplay:
    return RouteReplay(layers, num_experts=E, top_k=K)


def _call(replay: RouteReplay, layer: int, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return LayerReplay(replay, layer).get_replay_topk(
        scores, K, None, None, lambda s, k, *_: torch.topk(s, k, dim=1)
    )


def test_selection_is_recorded_and_scores_are_live() -> None:
    replay, rows, scores = _replay((1,)), _rows(), torch.randn(N, E, requires_grad=True)
    replay.load(0, {1: rows.to(torch.uint8)})
    with replay.forward(0, Mode.REPLAY):
        chosen, ids = _call(replay, 1, scores)
    assert torch.equal(ids, rows)
    assert torch.equal(chosen, scores.gather(1, rows))
    chosen.sum().backward()
    used = torch.zeros(N, E).scatter_(1, rows, 1.0)
    assert scores.grad is not None
    assert torch.equal(scores.grad, used)  # unselected experts: exactly zero
    assert replay.finish_step() == 1.0


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (_rows()[:, :1], "routing_rows"),
        (torch.zeros(N, K), "routing_duplicate"),
        (_rows() + E, "routing_range"),
        (_rows() - E, "routing_range"),
    ],
)
def test_bad_rows_are_refused_on_load(rows: torch.Tensor, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        _replay((1,)).load(0, {1: rows})
    assert caught.value.reason == reason


def test_layers_must_match() -> None:
    for layers in ({1}, {1, 3, 4}, {1, 2}):
        with pytest.raises(RecordError, match="layers"):
            _replay().load(0, dict.fromkeys(layers, _rows()))


def test_loading_twice_is_refused() -> None:
    replay = _replay((1,))
    replay.load(0, {1: _rows()})
    with pytest.raises(RecordError, match="already"):
        replay.load(0, {1: _rows()})


def test_missing_microbatch_is_refused() -> None:
    replay = _replay((1,))
    replay.load(0, {1: _rows()})
    with pytest.raises(RecordError, match="no routes"), replay.forward(1, Mode.REPLAY):
        pass


def test_too_few_and_too_many_tokens_are_refused() -> None:
    for tokens in (N - 1, N + 1):
        replay = _replay((1,))
        replay.load(0, {1: _rows()})
        with pytest.raises(RecordError, match="tokens"), replay.forward(0, Mode.REPLAY):
            _call(replay, 1, torch.randn(tokens, E))


def test_second_use_is_refused() -> None:
    replay = _replay((1,))
    replay.load(0, {1: _rows()})
    with replay.forward(0, Mode.REPLAY):
        _call(replay, 1, torch.randn(N, E))
    with pytest.raises(RecordError, match="second time"), replay.forward(0, Mode.REPLAY):
        _call(replay, 1, torch.randn(N, E))


def test_unused_layer_is_refused() -> None:
    replay = _replay()
    replay.load(0, {1: _rows(), 3: _rows(1)})
    with pytest.raises(RecordError, match=r"\[3\] were not used"), replay.forward(0, Mode.REPLAY):
        _call(replay, 1, torch.randn(N, E))


def test_left_over_microbatch_is_refused() -> None:
    replay = _replay((1,))
    replay.load(0, {1: _rows()})
    replay.load(1, {1: _rows()})
    with replay.forward(0, Mode.REPLAY):
        _call(replay, 1, torch.randn(N, E))
    with pytest.raises(RecordError, match="not used"):
        replay.finish_step()


def test_forwards_do_not_nest() -> None:
    replay = _replay((1,))
    with (
        pytest.raises(TrainerError, match="still"),
        replay.forward(0, Mode.RECORD),
        replay.forward(1, Mode.RECORD),
    ):
        pass


def test_record_keeps_live_choice_and_margin() -> None:
    replay, scores = _replay((1,)), torch.tensor([[0.0, 3.0, 1.0, 2.5, -1.0, 0.5]])
    with replay.forward(0, Mode.RECORD):
        chosen, ids = _call(replay, 1, scores)
    assert ids.tolist() == [[1, 3]]
    assert chosen.tolist() == [[3.0, 2.5]]
    live = replay.live(0, 1)
    assert torch.equal(live.ids, ids)
    assert live.margin.tolist() == [1.5]


def test_off_uses_the_live_topk() -> None:
    replay, scores = _replay((1,)), torch.randn(N, E)
    replay.load(0, {1: _rows()})
    _, ids = _call(replay, 1, scores)
    assert torch.equal(ids, scores.topk(K, dim=1).indices)


# --- recompute: a router behind torch's checkpoint, run in the order of a pipeline schedule -------
class Chunk:
    """One layer: router, then a product that shows which experts ran."""

    def __init__(self, replay: RouteReplay, layer: int, recompute: bool) -> None:
        self.replay, self.layer, self.recompute = replay, layer, recompute
        self.ran: list[tuple[bool, torch.Tensor]] = []  # (inside a forward, ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self._layer, x, use_reentrant=True)
        return self._layer(x)

    def _layer(self, x: torch.Tensor) -> torch.Tensor:
        chosen, ids = _call(self.replay, self.layer, x)
        self.ran.append((self.replay._pass is not None, ids))
        return chosen.sum(1, keepdim=True) * x


def _fed(replay: RouteReplay, chunk: int, chunks: list[Chunk], index: int) -> torch.Tensor:
    """Forward of one microbatch; the output whose backward is still to come."""
    replay.load(index, {chunks[chunk].layer: _rows(100 * chunk + index).byte()}, chunk)
    x = torch.randn(N, E, requires_grad=True)
    with replay.forward(index, Mode.REPLAY, chunk):
        output = chunks[chunk](x)
    replay.bind(output, index, chunk)
    return output


ORDERS = {
    "gradient accumulation": "F0 B0 F1 B1 F2 B2",
    "first stage of 1F1B": "F0 F1 B0 F2 B1 B2",
    "all forwards first": "F0 F1 F2 B0 B1 B2",
    "backwards in reverse": "F0 F1 F2 B2 B1 B0",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_pass_reads_its_own_rows_in_any_order(order: str, recompute: bool) -> None:
    replay = _replay((1,))
    chunks = [Chunk(replay, 1, recompute)]
    waiting: dict[int, torch.Tensor] = {}
    backward = []
    for step in ORDERS[order].split():
        index = int(step[1])
        if step[0] == "F":
            waiting[index] = _fed(replay, 0, chunks, index)
        else:
            waiting.pop(index).sum().backward()
            backward.append(index)
    first = [ids for inside, ids in chunks[0].ran if inside]
    again = [ids for inside, ids in chunks[0].ran if not inside]
    assert all(torch.equal(ids, _rows(index)) for index, ids in enumerate(first))
    assert len(again) == (3 if recompute else 0)
    assert all(torch.equal(ids, _rows(i)) for i, ids in zip(backward, again, strict=False))
    assert replay.held_bytes == 0, "rows go after their last use"
    assert replay.peak_bytes <= 3 * N * K, "one byte per id"
    assert replay.finish_step() == 1.0


def test_interleaved_chunks_keep_apart() -> None:
    """The order of an interleaved schedule on one rank: two chunks, two microbatches."""
    replay = RouteReplay((1,), (5,), num_experts=E, top_k=K)
    chunks = [Chunk(replay, 1, True), Chunk(replay, 5, True)]
    waiting: dict[tuple[int, int], torch.Tensor] = {}
    order = ("F00", "F01", "F10", "F11", "B10", "B11", "B00", "B01")  # pass, chunk, microbatch
    for step in order:
        key = int(step[1]), int(step[2])
        if step[0] == "F":
            waiting[key] = _fed(replay, key[0], chunks, key[1])
        else:
            waiting.pop(key).sum().backward()
    for number, chunk in enumerate(chunks):
        want = [_rows(100 * number + index) for index in (0, 1)] * 2
        assert all(torch.equal(ids, w) for (_, ids), w in zip(chunk.ran, want, strict=True))
    assert replay.finish_step() == 1.0


def test_recompute_of_another_microbatch_is_seen() -> None:
    """Control: bound to the newest forward, as a queue would do, the second one is refused."""
    replay = _replay((1,))
    chunks = [Chunk(replay, 1, True)]
    outputs = [_fed(replay, 0, chunks, index) for index in (0, 1)]
    replay.bind(outputs[0], 1)  # wrong: its gradient belongs to microbatch 0
    outputs[0].sum().backward()
    with pytest.raises(RecordError, match="outside its forward"):
        outputs[1].sum().backward()


def test_a_recompute_that_never_came_is_refused() -> None:
    replay = _replay((1,))
    _fed(replay, 0, [Chunk(replay, 1, True)], 0)
    with pytest.raises(RecordError, match="not used"):
        replay.finish_step()


def test_a_router_called_again_without_recompute_is_refused() -> None:
    replay = _replay((1,))
    chunk = Chunk(replay, 1, False)
    _fed(replay, 0, [chunk], 0).sum().backward()
    with pytest.raises(RecordError, match="not to be recomputed"):
        _call(replay, 1, torch.randn(N, E))


def test_a_layer_of_another_chunk_is_refused() -> None:
    replay = RouteReplay((1,), (5,), num_experts=E, top_k=K)
    replay.load(0, {1: _rows()}, 0)
    with (
        pytest.raises(TrainerError, match="chunk 1 ran in chunk 0"),
        replay.forward(0, Mode.REPLAY),
    ):
        _call(replay, 5, torch.randn(N, E))


# --- gradients, fp64, through a replayed choice and a recorded sampling mask
# ---------------------------
def _policy(router: torch.Tensor, experts: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Log-probability of 5 sampled tokens; one routed layer, K of E experts, 7 entries."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    replay = _replay((1,))
    replay.load(0, {1: RECORDED.byte()})
    with replay.forward(0, Mode.REPLAY):
        chosen, ids = _call(replay, 1, x @ router.T)
    gate = chosen.softmax(1)
    hidden = torch.einsum("nk,nkij,nj->ni", gate, experts[ids], x).tanh()
    return kept_logprobs(
        hidden,
        Head(head, len(head)),
        torch.tensor([0, 3, 6, 1, 1]),
        SamplingMask(
            torch.tensor([0, 2, 5, 6, 8, 10]), torch.tensor([0, 2, 1, 3, 5, 6, 1, 4, 1, 2])
        ),
        temperature_S=torch.full((N,), 0.7, dtype=torch.float64),
    ).logprob


RECORDED = torch.tensor([[0, 3], [3, 1], [1, 0], [4, 0], [1, 4]])  # experts 2 and 5 never


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((E, 4), (E, 4, 4), (7, 4))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def test_gradient_through_replay_and_mask_is_exact() -> None:
    assert torch.autograd.gradcheck(_policy, _weights(), eps=1e-6, atol=1e-6)


def test_gradient_is_zero_where_the_record_excludes_and_nowhere_else() -> None:
    router, experts, head = weights = _weights()
    _policy(*weights).sum().backward()
    assert router.grad is not None
    assert experts.grad is not None
    assert head.grad is not None
    used = sorted(set(RECORDED.flatten().tolist()))
    for expert in range(E):
        assert router.grad[expert].any() == (expert in used)
        assert experts.grad[expert].any() == (expert in used)
    # a row that keeps one entry has no gradient; no other row keeps entry 6
    kept_by_several = [0, 1, 2, 3, 4, 5]
    assert not head.grad[6].any()
    assert head.grad[kept_by_several].abs().amax(1).gt(0).all()


def test_router_losses_in_fp64_count_each_use_and_no_padding() -> None:
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 4, generator=rng, dtype=torch.float64).requires_grad_()
    # the rollouts share row 0; row 4 is padding
    rows, sequence = torch.tensor([0, 3, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 1])
    lengths = torch.tensor([2.0, 3.0])
    counts = torch.tensor([[2.0, 1.0, 1.0, 0.0], [1.0, 2.0, 1.0, 2.0]], dtype=torch.float64)

    def z(x: Tensor) -> Tensor:
        return z_loss(x, rows)

    def balance(x: Tensor) -> Tensor:
        return balance_loss(x.softmax(-1), rows, sequence, counts, lengths, 2)

    for loss in (z, balance):
        assert torch.autograd.gradcheck(loss, logits)
        (grad,) = torch.autograd.grad(loss(logits), logits)
        assert grad[:4].abs().amin() > 0
        assert not grad[4].any(), "padding"
    of_rows = logits.detach().logsumexp(-1).square()
    assert float(z(logits)) == pytest.approx(float(of_rows[:4].sum() + of_rows[0]))
    p = logits.detach().softmax(-1)
    by_hand = sum(
        float(4 * counts[q, e] / (2 * lengths[q]) * p[rows[sequence == q], e].mean())
        for q in range(2)
        for e in range(4)
    )
    assert float(balance(logits)) == pytest.approx(by_hand)
