"""Prompts are a function of seed and index; rewards; refusals in one sentence; the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moerl.agents.chat_messages import first_messages
from moerl.config.schema import TaskConfig, TinyModel
from moerl.config.task_programs import AgentConfig
from moerl.core.errors import ConfigError, ModelError, MoerlError, ScoreError
from moerl.core.serialization import decode_value, encode_value
from moerl.core.types import Prompt, Score
from moerl.data.prompt_checks import LineCheck
from moerl.data.prompt_files import PromptFiles
from moerl.data.rewards import make_reward
from moerl.data.tasks import PromptStream, load_tokenizer
from moerl.data.tiny_model import make_tiny_model
from tests.helpers.episode_views import view
from tests.helpers.patience import patience

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def jsonl(path: Path, *lines: object) -> str:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return str(path)


def refuse_bad(task: TaskConfig, tokenizer: Any) -> None:
    """Raises ConfigError as a start does."""
    check = LineCheck(task, PromptStream(task, tokenizer, 0))
    check.go_on(1000, float("inf"))
    check.refuse()


def one_sentence(error: MoerlError) -> bool:
    return "\n" not in str(error) and len(str(error)) < 500


# --- the stream ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "task",
    [TaskConfig(digits=5), TaskConfig(name="reasoning_gym", dataset="chain_sum")],
    ids=["sort_digits", "reasoning_gym"],
)
def test_a_resumed_stream_continues_exactly(task: TaskConfig, tokenizer: Any) -> None:
    straight = PromptStream(task, tokenizer, seed=3)
    first = [straight.prompt(index) for index in range(20)]
    resumed = PromptStream(task, tokenizer, seed=3)
    assert [resumed.prompt(index) for index in range(12, 20)] == first[12:]
    other = PromptStream(task, tokenizer, seed=4)
    assert [other.prompt(index) for index in range(20)] != first, "control: the seed matters"
    assert len({prompt.text for prompt in first}) > 15


def test_each_epoch_of_a_file_is_a_new_order_of_all_lines(tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(30)))
    task = TaskConfig(name="jsonl", path=path, reward="exact_match")
    stream = PromptStream(task, tokenizer, 0)
    epochs = [[stream.prompt(30 * e + i).answer for i in range(30)] for e in range(3)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert stream.prompt(7).answer == epochs[0][7], "an earlier epoch can be asked for again"
    ordered = PromptStream(
        TaskConfig(name="jsonl", path=path, reward="exact_match", shuffle=False), tokenizer, 0
    )
    assert [ordered.prompt(i).answer for i in range(31)] == [*range(30), 0]


def test_a_line_of_jsonl_ends_with_a_line_feed_only(tmp_path: Path) -> None:
    """Text of the web holds other line ends, which are legal inside a JSON string."""
    texts = ["a\u2028b", "c\u0085d", "e\u2029f"]
    rows = [json.dumps({"prompt": text, "answer": 1}, ensure_ascii=False) for text in texts]
    file = tmp_path / "p.jsonl"
    file.write_bytes("\r\n".join(rows).encode())
    source = PromptFiles(TaskConfig(name="jsonl", path=str(file)), 0)
    assert [source.item(place).prompt for place in range(source.size)] == texts


def test_jsonl_fields_and_messages_travel(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    path = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "2+2=", "answer": "4", "level": 3, "tags": ["a"]},
        "",
        {"messages": messages, "answer": "2"},
    )
    task = TaskConfig(name="jsonl", path=path, reward="exact_match", shuffle=False)
    plain, chat = (PromptStream(task, tokenizer, 0).prompt(i) for i in range(2))
    assert (plain.text, plain.answer, plain.extra) == ("2+2=", "4", {"level": 3, "tags": ["a"]})
    assert tokenizer.decode(plain.token_ids) == "2+2="
    assert chat.text == "system: be brief\nuser: 1+1\nassistant: "
    assert [plain.name, chat.name] == [f"line 1 of {path}", f"line 3 of {path}"]
    assert decode_value(encode_value(chat), Prompt) == chat, "its origin travels"
    assert PromptStream(TaskConfig(), tokenizer, 0).prompt(7).name == "prompt 7"
    assert tokenizer.decode(chat.token_ids) == chat.text


def test_the_chat_template_is_applied_on_request(tokenizer: Any, tiny_model: Path) -> None:
    prompt = PromptStream(TaskConfig(chat_template=True), tokenizer, 0).prompt(0)
    plain = PromptStream(TaskConfig(), tokenizer, 0).prompt(0)
    assert prompt.text == f"user: {plain.text}\nassistant: "
    bare: Any = load_tokenizer(tiny_model)
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r"task\.chat_template = True .*no template"):
        PromptStream(TaskConfig(chat_template=True), bare, 0)


@pytest.mark.parametrize("chat_template", [False, True])
def test_messages_of_an_agent_begin_with_the_system_message(
    chat_template: bool, tokenizer: Any, tmp_path: Path
) -> None:
    """The template is applied to each turn, never to the prompt."""
    own = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "2+2="}, {"messages": own}, {"messages": own[1:]})
    agent, system = AgentConfig(command=["program"]), {"role": "system", "content": "add"}
    task = TaskConfig(
        name="jsonl", path=path, agent=agent, system="add", chat_template=chat_template,
        shuffle=False,
    )  # fmt: skip
    stream = PromptStream(task, tokenizer, 0)
    prompts = [stream.prompt(index) for index in range(3)]
    begun = [first_messages(prompt) for prompt in prompts]
    asked = [system, {"role": "user", "content": "2+2="}]
    assert begun == [(asked, {}), (own, {}), ([system, own[1]], {})]
    assert [prompt.text for prompt in prompts] == ["2+2=", "be brief\n1+1", "1+1"]
    (plain,) = [PromptStream(replace(task, system=""), tokenizer, 0).prompt(0)]
    assert first_messages(plain) == ([asked[1]], {}), "control"


def test_rewards_of_programs_and_objects_are_their_own_or_named() -> None:
    agent, prompt = AgentConfig(command=["program"]), Prompt(0, (1,), "21=", "12", {})
    for task in (TaskConfig(agent=agent), TaskConfig(environment="package.module:Class")):
        assert task.brings_reward
        with pytest.raises(ScoreError):
            make_reward(replace(task, name="jsonl"))(prompt, view("12"))
        for name in ("source", "exact_match"):
            named = replace(task, reward=name)
            assert not named.brings_reward
            assert make_reward(named)(prompt, view("21", "12")).reward == 1.0
    kinds = [TaskConfig(environment=name).kind for name in ("", "check_digits", "a.b:f", "a.b:F")]
    assert [kind.name for kind in kinds] == [
        *("SINGLE_ANSWER", "TEXT_REPLIES", "TEXT_REPLIES", "ENVIRONMENT")
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{not json", "line 2 is not JSON"),
        ('"text"', "line 2 is not an object"),
        ('{"answer": 1}', 'line 2 must have exactly one of "prompt" and "messages"'),
        ('{"prompt": "a", "messages": []}', "line 2 must have exactly one"),
        ('{"prompt": 5}', "line 2 has 'prompt' that is neither text nor a list of messages"),
        ('{"messages": [{"role": "user"}]}', 'in messages[0] neither "content" nor'),
    ],
)
def test_a_bad_line_is_named(line: str, says: str, tokenizer: Any, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "a", "answer": 1}, line)
    with pytest.raises(ConfigError, match=r"task\.path = ") as caught:
        refuse_bad(TaskConfig(name="jsonl", path=path, reward="exact_match"), tokenizer)
    assert says in str(caught.value)
    assert one_sentence(caught.value)


def test_other_refusals_name_field_value_and_what_is_allowed(
    tokenizer: Any, tmp_path: Path
) -> None:
    empty = jsonl(tmp_path / "empty.jsonl", "")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    cases = [
        (TaskConfig(name="jsonl", path="/no/file"), "task.path = '/no/file'", "is needed"),
        (TaskConfig(name="jsonl", path=str(binary)), "task.path", "UTF-8"),
        (TaskConfig(name="jsonl", path=empty), "task.path", "holds no prompt"),
        (
            TaskConfig(name="reasoning_gym", dataset="chain_sums"),
            "task.dataset = 'chain_sums'",
            "chain_sum",
        ),
        (
            TaskConfig(name="reasoning_gym", dataset="chain_sum", dataset_args={"terms": 2}),
            "task.dataset_args",
            "terms",
        ),
    ]
    for task, named, allowed in cases:
        with pytest.raises(ConfigError) as caught:
            refuse_bad(task, tokenizer)
        assert named in str(caught.value)
        assert allowed in str(caught.value)
        assert one_sentence(caught.value)


def test_a_prompt_that_is_too_long_or_empty_is_refused_at_once(
    tokenizer: Any, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "p.jsonl", *({"prompt": text, "answer": 1} for text in ("x", "x" * 9)))
    fits = TaskConfig(name="jsonl", path=path, reward="exact_match", max_prompt_tokens=9)
    assert len(PromptStream(fits, tokenizer, 0).prompt(0).token_ids) in (1, 9)
    with pytest.raises(
        ConfigError, match=r"task\.max_prompt_tokens = 8 .*line 2 of .* has 9 tokens"
    ):
        refuse_bad(replace(fits, max_prompt_tokens=8), tokenizer)
    jsonl(Path(path), {"prompt": ""})
    with pytest.raises(ConfigError, match=r"p\.jsonl.* line 1 has no token"):
        refuse_bad(fits, tokenizer)
    generated = PromptStream(TaskConfig(max_prompt_tokens=3), tokenizer, 0)
    with pytest.raises(ConfigError, match="prompt 6 has 5 tokens"):
        generated.prompt(6)


# --- rewards -------------------------------------------------------------------------------------
def reward_of(task: TaskConfig, answer: object, response: str, **extra: object) -> float:
    return make_reward(task)(Prompt(0, (1,), "prompt", answer, extra), view(response)).reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [("1234", 1.0), ("1243", 0.5), ("4321", 0.0), ("12", 0.5), ("", 0.0), ("12345678", 0.5)],
)
def test_sort_digits_pays_for_right_positions(response: str, reward: float) -> None:
    assert reward_of(TaskConfig(), "1234", response) == reward


def test_turn_gains_pay_each_turn_for_what_it_is_better() -> None:
    task = TaskConfig(reward="turn_gains", environment="check_digits", max_turns=3)
    prompt = Prompt(0, (1,), "prompt", "1234", {})
    score = make_reward(task)(prompt, view("1243", "4321", "1234"))
    assert score == Score(1.0, turns=(0.5, -0.5, 1.0))
    assert make_reward(task)(prompt, view("1234")) == Score(1.0, turns=(1.0,))


def test_sort_digits_answers_are_sorted(tokenizer: Any) -> None:
    prompt = PromptStream(TaskConfig(digits=6), tokenizer, 0).prompt(5)
    assert prompt.text.endswith("=")
    assert prompt.answer == "".join(sorted(prompt.text[:-1]))
    assert len(prompt.token_ids) == 7


def test_reasoning_gym_uses_its_own_verifier(tokenizer: Any) -> None:
    task = TaskConfig(name="reasoning_gym", dataset="chain_sum", dataset_args={"max_terms": 2})
    reward, stream = make_reward(task), PromptStream(task, tokenizer, 11)
    for index in (0, 700, 3):
        prompt = stream.prompt(index)
        assert reward(prompt, view(prompt.answer)).reward == 1.0
        assert reward(prompt, view(f"well, <answer>{prompt.answer}</answer>")).reward == 1.0
        assert reward(prompt, view(f"{prompt.answer}9")).reward < 1.0
    json.dumps(prompt.extra)  # plain data: it travels


def test_exact_match_and_user_function() -> None:
    exact = TaskConfig(name="jsonl", reward="exact_match")
    assert reward_of(exact, 42, " 42\n") == 1.0
    assert reward_of(exact, 42, "42.0") == 0.0
    own = TaskConfig(name="jsonl", reward="tests.helpers.misbehaving_rewards:by_text")
    assert reward_of(own, None, "2", bonus=0.5) == 2.5


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("x^2+1", "so $1+x^2$", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("$\\frac{1}{2}$", "\\boxed{2}", 0.0),
        ("3,000", "3000", 1.0),
    ],
)
def test_math_verify(answer: str, response: str, reward: float) -> None:
    assert reward_of(TaskConfig(name="jsonl", reward="math_verify"), answer, response) == reward


# --- tiny model and tokenizer --------------------------------------------------------------------
def test_the_tokenizer_is_one_token_per_character_and_exact(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = "4827=2478 Don't\n\tx_{1} <a> \\frac~ ."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert one_sentence(caught.value)


def test_a_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    shape = TinyModel(hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, moe_ffn=8)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, shape, seed)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    a, c = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "c"))
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    assert not list(tmp_path.glob(".*")), "a temporary folder was left behind"
    with pytest.raises(ModelError, match="exists already"):
        make_tiny_model(tmp_path / "a", shape, 1)


def test_transformers_opens_the_tiny_model_without_a_missing_tensor(tiny_model: Path) -> None:
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(tiny_model, output_loading_info=True)
    assert not any(info.values()), info
    logits = model(torch.tensor([[3, 4, 5]])).logits
    assert logits.shape == (1, 3, len(load_tokenizer(tiny_model)))
    assert torch.isfinite(logits).all()
    assert 0.01 < logits.std().item() < 10


def test_the_tiny_model_has_the_files_that_transformers_writes(
    tiny_model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """It is written without transformers, which takes seconds to import."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_model)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny_model / name).read_bytes(), name
    again = AutoConfig.from_pretrained(tmp_path).to_dict() | {"_name_or_path": ""}
    assert again == config.to_dict() | {"_name_or_path": ""}
    assert (config.num_experts, config.rope_parameters["rope_theta"]) == (8, 10000.0)
    program = "import sys; from moerl.launch.train import prepare; import moerl.data.tiny_model"
    check = "sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"{program}; {check}"], cwd=ROOT, check=True)


def test_the_tool_makes_a_folder_and_refuses_an_unknown_key(tmp_path: Path) -> None:
    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "tools/make_tiny_model.py"), *arguments],
            capture_output=True, text=True, timeout=patience(120), cwd=tmp_path,
        )  # fmt: skip

    made = tool("out", "hidden_size=16", "--seed", "3")
    assert (made.returncode, made.stdout.strip()) == (0, "out"), made.stderr
    assert json.loads((tmp_path / "out/config.json").read_text())["hidden_size"] == 16
    refused = tool("other", "hidden=16")
    assert refused.returncode == 1
    assert "did you mean model.tiny.hidden_size" in refused.stderr
    assert not (tmp_path / "other").exists()
