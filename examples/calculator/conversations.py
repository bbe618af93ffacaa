"""Task of the example: sums of two 3-digit numbers, which the model solves in two turns with a calculator.

A question ``123+456=`` has the turns::

    <|assistant|><tool_call>{"name": "calculator", "arguments": {"expression": "123+456"}}</tool_call><|end|>
    <|tool|>579
    <|assistant|>579<|end|>

Digits are tokens, and so are the constant parts of a call.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe_gkd.addition.task import Problem

VOCAB_SIZE = 64
MAX_LENGTH = 64
PAD, END, USER, ASSISTANT, TOOL, TOOLS, UNKNOWN = (
    "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>", "<|unk|>"
)  # fmt: skip
OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEFORE, AFTER = '{"name": "calculator", "arguments": {"expression": "', '"}}'
ALPHABET = "0123456789+="

CHAT_TEMPLATE = (
    "{% if tools %}" + TOOLS + "{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'tool' %}" + TOOL + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}" + OPEN + '{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}' + CLOSE + "{% endfor %}" + END + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, with unused tokens up to VOCAB_SIZE."""
    special = [PAD, END, USER, ASSISTANT, TOOL, TOOLS, UNKNOWN]
    calls = [OPEN, CLOSE, BEFORE, AFTER]
    unused = [f"<|unused_{i}|>" for i in range(VOCAB_SIZE - len(special) - len(calls) - len(ALPHABET))]
    vocab = {token: i for i, token in enumerate([*special, *calls, *ALPHABET, *unused])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(token, normalized=False) for token in calls])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, TOOL, TOOLS, *unused],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def call_text(problem: Problem) -> str:
    """Return the first turn of a correct conversation, without its end."""
    return f"{OPEN}{BEFORE}{problem.a}+{problem.b}{AFTER}{CLOSE}"


def prompt_text(problem: Problem) -> str:
    """Return the prompt as the chat template writes it, with the tool."""
    return f"{TOOLS}{USER}{problem.question}{ASSISTANT}"


def write_parquet(problems: list[Problem], path: Path) -> None:
    """Write the columns ``prompt`` (messages), ``ground_truth`` and ``data_source``."""
    columns = {
        "prompt": [problem.messages() for problem in problems],
        "ground_truth": [str(problem.a + problem.b) for problem in problems],
        "data_source": ["calculator"] * len(problems),
    }
    pq.write_table(pa.table(columns), path)
