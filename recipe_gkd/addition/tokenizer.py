"""Tokenizer with one token per character and a chat template."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe_gkd.addition.task import ALPHABET

VOCAB_SIZE = 32
PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"
MAX_LENGTH = 96
"""Maximum sequence length of the models. A question with its answer has 42 tokens, with the solution before it 74."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    + ASSISTANT
    + "{{ message['content'] }}"
    + END
    + "{% else %}{{ raise_exception('expected the role user or assistant, got ' + message['role']) }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: five special tokens, the task's alphabet, and unused tokens up to VOCAB_SIZE.

    Tensor parallelism needs a vocabulary that is divisible by 32. The unused tokens are special tokens, so that
    decoding with ``skip_special_tokens`` never shows one.
    """
    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    unused = [f"<|unused_{i}|>" for i in range(VOCAB_SIZE - len(special) - len(ALPHABET))]
    vocab = {token: i for i, token in enumerate([*special, *ALPHABET, *unused])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *unused],
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
