"""A tokenizer of 256 entries with a chat template that treats history as Qwen3's does.

Most entries are words or whole tool calls that encoding never makes: text is encoded letter by
letter.  So a random policy calls tools, and what it samples changes when it is tokenised again.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZE = 256
SPECIAL = ("<pad>", "<bos>", "<|im_end|>", "<|im_start|>")
END, START = 2, 3  # ids
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, but no control tokens
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('a system message must be the first') }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def call_text(number: int) -> str:
    """An entry of the vocabulary: a whole call, in a spelling that no template gives back."""
    arguments = f'{{"a":{number}, "b": {number + 1}}}'
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


def chat_tokenizer(calls: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """calls: entries of the vocabulary; else calls of `add`."""
    letters = [c for c in string.printable if c.isprintable() or c in "\n\t"]
    calls = calls or [call_text(number) for number in range(60)]
    entries = [*SPECIAL, *letters, *MARKS, *calls]
    words = [a + b for a in string.ascii_lowercase for b in "aeiou_"]
    entries += words[: SIZE - len(entries)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    assert len(vocabulary) == SIZE
    core = Tokenizer(models.WordLevel(vocabulary, "?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save(folder: Path, calls: Sequence[str] = ()) -> None:
    chat_tokenizer(calls).save_pretrained(folder)
