"""RouteReplay refuses everything but each recorded row, once per forward."""

from __future__ import annotations

import pytest
import torch

from moerl.errors import RecordError, TrainerError
from moerl.trainer.replay import LayerReplay, Mode, RouteReplay

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
