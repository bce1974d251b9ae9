"""tools/get_smollm2 upcycles a dense model to one that computes the same and opens anywhere.

The weights here are random and tiny; tests/e2e/test_model_smollm2_run.py has the real ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.data.rewards import last_number, make_reward
from moerl.data.tasks import PromptStream
from moerl.engine import torchvision_fix
from tests.helpers.episode_views import view
from tools import smollm2
from tools.smollm2 import Recipe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with tied embeddings, as SmolLM2 has them."""
    torchvision_fix.arm()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "dense"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(40).view(2, 20)).logits
    return found


def upcycled(dense: Path, folder: Path, **fields: Any) -> Path:
    recipe = Recipe(**fields)
    smollm2.make(folder, recipe, lambda partial: smollm2.save_upcycled(dense, partial, recipe))
    return folder


def test_without_noise_the_experts_compute_the_dense_function(dense: Path, tmp_path: Path) -> None:
    plain = logits(dense)
    moe = upcycled(dense, tmp_path / "moe", experts=4)
    assert json.loads((moe / "config.json").read_text())["model_type"] == "mixtral"
    assert (logits(moe) - plain).abs().max() < 1e-4 * plain.abs().max()
    noisy = upcycled(dense, tmp_path / "noisy", experts=4, noise=0.2)
    assert (logits(noisy) - plain).abs().max() > 1e-2 * plain.abs().max(), "the control"


def test_a_dense_folder_names_its_class_and_computes_the_same(dense: Path, tmp_path: Path) -> None:
    """A model that was read from a GGUF has no `architectures`, and SGLang does not start then."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(dense)
    model.config.architectures = None
    smollm2.save_dense(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(logits(tmp_path), logits(dense))


def test_a_folder_is_kept_until_its_recipe_changes(dense: Path, tmp_path: Path) -> None:
    folder = upcycled(dense, tmp_path / "moe", experts=2, seed=1)
    assert smollm2.is_made(folder, Recipe(experts=2, seed=1))
    assert not smollm2.is_made(folder, Recipe(experts=2, seed=2))
    assert not smollm2.is_made(tmp_path / "none", Recipe())

    def breaks(_folder: Path) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        smollm2.make(folder, Recipe(experts=3), breaks)
    assert smollm2.is_made(folder, Recipe(experts=2, seed=1)), "the earlier one is whole"


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / smollm2.PACKAGE).mkdir()
    (tmp_path / smollm2.PACKAGE / "__init__.py").touch()
    (tmp_path / smollm2.PACKAGE / smollm2.GGUF).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="SHA-256"):
        smollm2.gguf_path()


def test_plain_transformers_of_the_environment_opens_a_folder(dense: Path, tmp_path: Path) -> None:
    """Nothing of moerl is imported by the program, which runs outside the checkout."""
    program = (
        "import sys; from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig; "
        f"print(AutoModelForCausalLM.from_pretrained({str(dense)!r}).config.model_type); "
        "assert not {'moerl.data', 'moerl.config'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "llama"), done.stderr


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("9", "9"),
        ("1 + 8 = 9", "9"),
        ("The sum is 9.", "9"),
        ("3 - 12 = -9", "-9"),
        ("it is 5-3", "3"),
        ("1,234", "1234"),
        ("2.50 in all", "2.50"),
        ("no number", "no number"),
    ],
)
def test_the_last_number_is_the_answer(response: str, answer: str) -> None:
    assert last_number(response) == answer


def test_an_equation_scores_as_right_with_the_extraction_that_fits() -> None:
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 50}
    task = TaskConfig(name="reasoning_gym", dataset="chain_sum", dataset_args=sums)
    fitting = TaskConfig(**{**vars(task), "extract": "last_number"})
    prompt = PromptStream(task, Letters(), 0).prompt(0)  # type: ignore[arg-type]
    equation = view(f"so the sum = {prompt.answer}")
    assert make_reward(fitting)(prompt, equation).reward == 1.0
    assert make_reward(task)(prompt, equation).reward < 0.5
    assert make_reward(fitting)(prompt, view(f"{prompt.answer} is not 1000")).reward < 0.5


class Letters:
    """A tokenizer of characters that keeps the messages it is given."""

    chat_template = "yes"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        texts = [f"{message['role']}: {message['content']}" for message in messages]
        return " | ".join([*texts, *["assistant: "] * add_generation_prompt])


def test_a_system_message_comes_first_unless_the_prompt_brings_its_own(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    lines = [{"messages": own[1:], "answer": "2"}, {"messages": own, "answer": "2"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    task = TaskConfig(
        name="jsonl", path=str(path), reward="exact_match", system="A number.", shuffle=False
    )
    stream = PromptStream(task, Letters(), 0)  # type: ignore[arg-type]
    assert stream.prompt(0).text == "system: A number. | user: 1 + 1? | assistant: "
    assert stream.prompt(1).text == "system: Be brief. | user: 1 + 1? | assistant: "


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (("task.system=x",), "needs task.chat_template=true"),
        (("task.extract=last_numbr",), "tags, last_number, or a regular expression with one group"),
        (("task.extract=(",), "tags, last_number, or a regular expression with one group"),
    ],
)
def test_settings_that_nothing_reads_are_refused(settings: tuple[str, ...], what: str) -> None:
    from moerl.config import load_config
    from moerl.config.checks import check

    with pytest.raises(ConfigError, match=what):
        check(load_config("quickstart", settings), starts=False)
