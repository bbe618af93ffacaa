"""A tokenizer with one token a character, as an ordinary `PreTrainedTokenizerFast` with a chat template."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe_gkd.quickstart.task import ALPHABET

VOCAB_SIZE = 32
PAD, END, USER, ASSISTANT, UNKNOWN = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|unk|>"
MAX_LENGTH = 64
"""Longest sequence of the models; a question with its answer takes 42 tokens."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}" + USER + "{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    + ASSISTANT
    + "{{ message['content'] }}"
    + END
    + "{% else %}{{ raise_exception('only the roles user and assistant are known') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Five special tokens, the task's alphabet, and unused ones up to VOCAB_SIZE.

    The unused ones make the vocabulary divisible by 32, which tensor parallelism needs; they are special tokens too, so
    that decoding with `skip_special_tokens` never shows one.
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
