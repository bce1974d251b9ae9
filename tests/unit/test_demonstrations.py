"""Supervised plans: what counts in the loss, the order of prompts, answers that are refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from moerl.algorithms.advantages import plan_advantages
from moerl.algorithms.aggregation import plan_weights
from moerl.config.checks import check
from moerl.config.load import load_config
from moerl.config.schema import AlgorithmConfig, Config, TinyModel
from moerl.core.errors import ConfigError, LineError
from moerl.core.types import BatchPlan, Prompt, PromptOrigin
from moerl.data.demonstrations import AnswerEnd, demonstration_plan, with_texts
from moerl.data.packing import LossInputs, ReadOptions, pack_microbatch
from moerl.data.tasks import load_tokenizer, usable
from moerl.data.tiny_model import make_tiny_model
from moerl.records.blob_store import BlobStore
from moerl.trainer.sft import supervised

EOS = 99


class Stream:
    def __init__(self, answer: object = "ab") -> None:
        self.answer = answer

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, (index, 7), f"p{index}", self.answer, {})


def _plan(step: int, prompts: Stream) -> BatchPlan:
    return demonstration_plan(
        step,
        [prompts.prompt(index) for index in range(3 * step, 3 * step + 3)],
        lambda text: [ord(c) for c in text],
        lambda prompt: [EOS],
        dp_size=1,
        max_tokens_per_microbatch=64,
    )


def test_the_answer_and_the_end_count_and_the_prompt_does_not(tmp_path: Path) -> None:
    plan = _plan(2, Stream())
    assert [group.group_id for group in plan.groups] == [6, 7, 8], "step 2 takes the third batch"
    algorithm = supervised(Config()).algorithm
    batch = pack_microbatch(
        plan,
        0,
        0,
        BlobStore(tmp_path, "n"),
        loss=LossInputs(plan_advantages(algorithm, plan), plan_weights(algorithm, plan)),
        reads=ReadOptions(mask=False),
    )
    assert batch.sampled.tolist() == [97, 98, EOS] * 3
    assert batch.tokens.tolist() == [[i, 7, 97, 98] for i in (6, 7, 8)]
    assert batch.sampled_rows.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert (batch.advantage == 1).all()
    assert batch.weight.tolist() == pytest.approx([1 / 9] * 9)
    assert not batch.lag.any()


@pytest.mark.parametrize("answer", ["", None, 4])
def test_an_answer_that_is_no_text_is_refused(answer: object) -> None:
    with pytest.raises(ConfigError, match=r"task.path .*sft needs a text"):
        _plan(0, Stream(answer))


def test_supervised_settings_replace_the_algorithm_and_replay() -> None:
    config = supervised(Config(algorithm=AlgorithmConfig(objective="gspo", clip_low=0.1)))
    assert config.algorithm.objective == "reinforce"
    assert config.algorithm.clip_low == AlgorithmConfig().clip_low
    assert config.replay.routing == "off"


def test_a_recipe_whose_teacher_has_ranks_of_its_own_can_be_warmed_up() -> None:
    own = load_config("on-policy-distillation", ["ref_models.placement=separate"])
    check(supervised(own), starts=False)
    assert supervised(own).ref_models.placement == "trainer"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("template", "prompt", "ends"),
    [
        (CHATML, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", ["<|im_end|>"]),
        (CHATML, "x", ["<eos>"]),  # a prompt without the template
        (PLAIN, "user: x\nassistant: ", ["<eos>"]),  # it writes no token that ends a turn
        ("{{ raise_exception('no') }}", "x", ["<eos>"]),
        (None, "x", ["<eos>"]),
    ],
)
def test_an_answer_ends_as_the_template_ends_a_turn(
    template: str | None, prompt: str, ends: list[str], tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model", TinyModel(enabled=True), 0)
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    found = AnswerEnd(tokenizer).of(Prompt(0, (1,), prompt, "a", {}))
    assert tokenizer.convert_ids_to_tokens(list(found)) == ends
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end token"):
        AnswerEnd(tokenizer)


def test_a_line_that_cannot_be_learned_is_named_and_set_aside() -> None:
    class Lines:
        def prompt(self, index: int) -> Prompt:
            answer = None if index == 1 else "ab"
            return Prompt(index, (7,), "p", answer, {}, origin=PromptOrigin("x.jsonl", index + 1))

    with pytest.raises(LineError, match=r"line 2 has the answer None; sft needs a text") as error:
        with_texts(Lines().prompt(1))
    assert (error.value.value, error.value.kind) == ("x.jsonl", "no answer")
    learned = islice(usable(lambda index: with_texts(Lines().prompt(index))), 3)
    assert [prompt.index for prompt in learned] == [0, 2, 3]
