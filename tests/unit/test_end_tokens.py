"""Models with several end tokens, a pad that is the end, and start tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from moerl.agents.chat_messages import ChatMessage
from moerl.agents.prompt_tokens import PromptTokens
from moerl.config.schema import SamplingConfig, TaskConfig
from moerl.core.types import Finish, ModelShape
from moerl.data.tasks import PromptStream
from moerl.episodes.turn import TurnInFlight, sampling_params
from moerl.launch.run_context import RunContext
from tests.helpers.chat_tokenizer import chat_tokenizer
from tests.helpers.recorded_turns import recorded, turn

ENDS = (1, 7)
SHAPE = ModelShape(50, 1, (), 1, top_k=1, eos_token_ids=ENDS)


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": [1, 7]}, {"eos_token_id": 1}, (1, 7)),  # as Llama 3, Qwen 3, gpt-oss
        ({}, {"eos_token_id": [1, 7]}, (1, 7)),
        ({"eos_token_id": 7, "pad_token_id": 7}, {"eos_token_id": 1}, (7,)),  # the pad is the end
        (None, {"eos_token_id": 0}, (0,)),
        (None, {}, ()),
    ],
)
def test_every_end_token_of_a_folder_is_known(
    tmp_path: Path, generation: Any, config: Any, want: tuple[int, ...]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    context: Any = SimpleNamespace(model_path=tmp_path, hf_config=config)
    assert RunContext.eos_token_ids(context) == want


@pytest.mark.parametrize(
    ("last", "finish"), [(1, Finish.STOP), (7, Finish.STOP), (8, Finish.ABORT)]
)
def test_each_of_several_end_tokens_ends_a_slice(last: int, finish: Finish) -> None:
    """8 is the control: the turn goes on in the next slice."""
    sampling = sampling_params(SamplingConfig(max_new_tokens=8), SHAPE)
    assert sampling.stop_token_ids == ENDS
    (segment,) = turn([3], [5, last]).segments
    flight = TurnInFlight("7.0.t0", np.array([3], np.int32), sampling, audit=False, slice_tokens=2)
    flight.request()
    object.__setattr__(segment, "finish", Finish.LENGTH)
    flight.add(segment)
    assert flight.segments[-1].finish == finish
    assert flight.finished == (finish == Finish.STOP)


def with_start() -> Any:
    """A tokenizer that begins every text with <bos>, as Llama's and Gemma's do."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", start)]
    )
    assert tokenizer.encode("a")[0] == start
    return tokenizer


@pytest.mark.parametrize("writes", [True, False])
def test_a_prompt_has_one_start_token(tmp_path: Path, writes: bool) -> None:
    tokenizer = with_start()
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "12=", "answer": "12"}\n')
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "12="}], "answer": "12"}\n')
    if writes:
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    counts = [
        list(PromptStream(TaskConfig(name="jsonl", path=str(path), reward="exact_match"),
                          tokenizer, 0).line(0).token_ids).count(tokenizer.bos_token_id)
        for path in (plain, chat)
    ]  # fmt: skip
    assert counts == [1, int(writes)], "a template that writes none gets none"


def test_a_turn_behind_another_begins_with_no_start_token() -> None:
    tokenizer = with_start()
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokens = PromptTokens(tokenizer)
    first = tokens.whole([ChatMessage("user", "12=")], [])
    parent = recorded(0, turn(first.ids.tolist(), [5, 6]))
    more = tokens.continued(parent, frozenset(), [ChatMessage("user", "again")], [])
    ids = more.ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
