"""A causal language model of transformers that responds to a conversation."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from recipe_gkd.commands.chat.text_stream import TextStream
from recipe_gkd.data.messages import Message
from recipe_gkd.errors import ConfigError, ModelError, ResourceError
from recipe_gkd.model_files import load_tokenizer
from recipe_gkd.rollout.sampling import stop_token_ids
from teacher.common.data_types import is_fast
from teacher.common.fingerprint import count_ids
from teacher.common.weight_files import find_damaged_weights

End = Literal["eos", "max_tokens", "model_limit", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Settings of the models and of their responses.

    Attributes:
        max_tokens: Maximum number of tokens of a response.
        temperature: 0 for greedy decoding.
        top_p: Probability mass that tokens are sampled from.
        seed: Seed of the first question. Each question has its own seed.
        dtype: Data type of the weights. ``"auto"``: the data type of the folder, or float32 on a CPU that emulates it.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one.
        trust_remote_code: Allow code from the folder.
        show_special_tokens: Print special tokens of the responses.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    show_special_tokens: bool = False


@dataclass(frozen=True)
class ChatResponse:
    """A response.

    Attributes:
        text: Its text without special tokens.
        n_tokens: Number of tokens, EOS included.
        seconds: Duration, with the computation of the prompt.
        end: Reason of its end.
    """

    text: str
    n_tokens: int
    seconds: float
    end: End


class _TokenStreamer(BaseStreamer):
    """Receiver of the tokens, which prints their text."""

    def __init__(self, stream: TextStream, write: Callable[[str], None]) -> None:
        self._stream, self._write = stream, write
        self._has_prompt = False

    def put(self, value: Any) -> None:
        """Receive the prompt, and then each token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        if text := self._stream.add(int(value.flatten()[0])):
            self._write(text)

    def end(self) -> None:
        """Write what remains of an incomplete character."""
        if text := self._stream.flush():
            self._write(text)


class ChatModel:
    """A model with its tokenizer.

    Args:
        folder: Hugging Face folder.

    Raises:
        ConfigError: There is no GPU for ``device="cuda"``.
        ModelError: The tokenizer or the weights are missing, damaged or not supported.
    """

    def __init__(self, folder: Path, options: ChatOptions) -> None:
        self._folder, self._options = folder, options
        self._device = choose_device(options.device)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
        self.has_template = bool(self.tokenizer.chat_template)
        model = load_model(folder, options)
        if options.dtype == "auto" and not is_fast(str(model.dtype).removeprefix("torch."), self._device):
            model = model.float()
        self._model: Any = model.to(self._device).eval()
        eos_id = self.tokenizer.eos_token_id
        self._stop_ids = sorted({*stop_token_ids(str(folder)), *([] if eos_id is None else [eos_id])})
        self._model.generation_config = GenerationConfig()  # sampling as in `evaluate`: without the folder's settings
        config = self._model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        self.max_length: int | None = positions if isinstance(positions, int) and positions > 0 else None
        n_rows = int(getattr(config, "vocab_size", 0) or 0)
        self._padding_ids = list(range(count_ids(self.tokenizer), n_rows))  # not sampled, as in training

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the prompt. Without a chat template, it is the text of the last message.

        Raises:
            ModelError: The chat template rejects the messages.
        """
        if not self.has_template:
            return list(self.tokenizer(str(messages[-1]["content"]))["input_ids"])
        try:
            ids: Any = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            what = f"the chat template of {self._folder} rejects messages with the roles {roles}: {error}"
            raise ModelError(what, path=self._folder) from error
        return list(ids)

    def respond(
        self, prompt: Sequence[int], *, seed: int, write: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> ChatResponse:
        """Generate a response, and write its text as it grows.

        Args:
            prompt: Token ids. There are fewer than ``max_length``, and at least one.
            seed: Seed of sampling.
            write: Function that receives each new part of the text.
            is_stopped: Function that returns True to end the response after the current token.

        Raises:
            ResourceError: The device is out of memory.
        """
        room = self._options.max_tokens if self.max_length is None else self.max_length - len(prompt)
        stream = TextStream(self.tokenizer, show_special_tokens=self._options.show_special_tokens)
        ids_BS = torch.tensor([list(prompt)], device=self._device)
        torch.manual_seed(seed)
        started = time.monotonic()
        try:
            with torch.inference_mode():
                self._model.generate(
                    ids_BS,
                    attention_mask=torch.ones_like(ids_BS),
                    generation_config=self._generation_config(min(self._options.max_tokens, room)),
                    streamer=_TokenStreamer(stream, write),
                    stopping_criteria=StoppingCriteriaList([_stops_when(is_stopped)]),
                )
        except torch.OutOfMemoryError as error:
            remedy = "shorten the conversation with /reset, or use --dtype bfloat16 or --device cpu"
            raise ResourceError(
                f"the GPU is out of memory with a prompt of {len(prompt)} tokens", remedy=remedy
            ) from error
        seconds = time.monotonic() - started
        text = str(self.tokenizer.decode(stream.ids, skip_special_tokens=True))
        return ChatResponse(text, len(stream.ids), seconds, self._end(stream.ids, room))

    def _end(self, ids: Sequence[int], room: int) -> End:
        if ids and ids[-1] in self._stop_ids:
            return "eos"
        if len(ids) >= self._options.max_tokens:
            return "max_tokens"
        return "model_limit" if len(ids) >= room else "interrupted"

    def _generation_config(self, max_tokens: int) -> GenerationConfig:
        options = self._options
        sampling: dict[str, Any] = {"do_sample": False}
        if options.temperature > 0:
            sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        return GenerationConfig(
            max_new_tokens=max_tokens,
            eos_token_id=self._stop_ids or None,
            pad_token_id=self._stop_ids[0] if self._stop_ids else None,
            suppress_tokens=self._padding_ids or None,
            **sampling,
        )


def _stops_when(is_stopped: Callable[[], bool]) -> Any:
    def is_done(ids_BS: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids_BS),), is_stopped(), dtype=torch.bool, device=ids_BS.device)

    return is_done


def choose_device(name: str) -> str:
    """Return ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: ``name`` is ``"cuda"``, and there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch finds no GPU", remedy="use --device cpu", keys=("--device",))
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name


def load_model(folder: Path, options: ChatOptions) -> Any:
    """Return the model on the CPU, without messages of transformers.

    Raises:
        ModelError: The weights are missing, damaged or not supported.
    """
    _silence_transformers()
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        what = f"{folder} has no weights (*.safetensors or *.bin)"
        remedy = "copy the folder again, or make it from a checkpoint with python -m recipe_gkd export"
        raise ModelError(what, remedy=remedy, path=folder)
    if damage := find_damaged_weights(folder):
        raise ModelError(str(damage), path=folder) from damage
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=options.dtype if options.dtype == "auto" else getattr(torch, options.dtype),
            local_files_only=True,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        text = " ".join(str(error).split())
        needs_code = "trust_remote_code" in text
        remedy = "read the code in the folder, and add --trust-remote-code if you trust it" if needs_code else ""
        what = f"the model in {folder} cannot be loaded ({type(error).__name__}: {text})"
        raise ModelError(
            what, remedy=remedy or "expected a causal language model of transformers", path=folder
        ) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        what = f"{folder} lacks {len(missing)} weights, such as {missing[0]}"
        raise ModelError(what, remedy="copy the folder again", path=folder, names=tuple(missing))
    return model


def _silence_transformers() -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
