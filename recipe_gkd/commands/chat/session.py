"""Conversations with one or two models: questions, commands, and what is printed."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from recipe_gkd.commands.chat.model import ChatModel, ChatOptions, ChatResponse
from recipe_gkd.data.messages import Message
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError

HELP = """/reset        begin a new conversation; the system message stays
/system TEXT  set the system message from the next question on; without TEXT: remove it
/help         print this list
/quit         end, like Ctrl-D
Ctrl-C stops a response; pressed again, or at the prompt, it ends the command. Other lines are questions."""
_COMMAND = re.compile(r"/[a-z]+")
_CONTEXT_SHARE = 4
"""Inverse of the share of the model's limit that is kept free for a response, if that is less than ``max_tokens``."""


@dataclass
class Conversation:
    """Turns with one model.

    Attributes:
        title: Heading of the responses, and name of the model in messages.
        system: System message. Empty if there is none.
        turns: Questions with their responses, oldest first. Empty without a chat template.
    """

    title: str
    model: ChatModel
    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[Message]:
        """Return the conversation up to a new question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        pairs = [("user", "assistant")] * len(self.turns)
        turns = [
            {"role": role, "content": text}
            for roles, texts in zip(pairs, self.turns, strict=True)
            for role, text in zip(roles, texts, strict=True)
        ]
        return [*system, *turns, {"role": "user", "content": question}]

    def fit(self, question: str, max_tokens: int) -> tuple[list[int], int]:
        """Drop the oldest turns until the prompt and a response fit into the model.

        Args:
            question: The new question.
            max_tokens: Maximum number of tokens of the response.

        Returns:
            Token ids of the prompt, and the number of dropped turns.

        Raises:
            ConfigError: The question does not fit even without earlier turns. No turn is dropped.
            ModelError: The chat template rejects the messages.
        """
        turns, limit = self.turns, self.model.max_length
        ids = self.model.encode(self.messages(question))
        if limit is not None:
            room = min(max_tokens, limit // _CONTEXT_SHARE)
            while self.turns and len(ids) + room > limit:
                self.turns = self.turns[1:]
                ids = self.model.encode(self.messages(question))
        n_dropped = len(turns) - len(self.turns)
        if not ids or (limit is not None and len(ids) >= limit):
            self.turns = turns
            what = f"{self.title}: the line has {len(ids)} tokens with its chat template and the system message"
            expected = f"expected 1 to {limit - 1}, the model's limit" if limit else "expected at least 1"
            raise ConfigError(f"{what}; {expected}", remedy="change the line or the system message", keys=("TEXT",))
        return ids, n_dropped


class Session:
    """Questions to all models, and the commands of the user.

    Args:
        conversations: One for each model.
        options: Settings of the responses.
        is_interactive: True at a terminal: Ctrl-C stops the response only, and an error does not end the session.
    """

    def __init__(
        self, conversations: Sequence[Conversation], options: ChatOptions, *, is_interactive: bool = False
    ) -> None:
        self._conversations, self._options = conversations, options
        self._is_interactive = is_interactive
        self._n_questions = 0
        for one in conversations:
            if not one.model.has_template:
                note(f"{one.title} has no chat template: it completes each line as plain text, without earlier lines")

    def handle(self, line: str) -> bool:
        """Answer a line, or execute its command.

        Returns:
            False after ``/quit``.
        """
        command, _, text = line.strip().partition(" ")
        if not command:
            return True
        if not _COMMAND.fullmatch(command):
            self.ask(line)
        elif command == "/quit":
            return False
        else:
            with self._errors_reported():
                self._execute(command, text.strip())
        return True

    def _execute(self, command: str, text: str) -> None:
        if command == "/help":
            note(HELP)
        elif command == "/reset":
            self.reset()
            note("new conversation")
        elif command == "/system":
            self.set_system(text)
            note("system message set" if text else "no system message")
        else:
            what = f"got {command}, expected /reset, /system, /help or /quit"
            raise ConfigError(what, remedy="begin a question with another character", keys=(command,))

    def reset(self) -> None:
        """Forget all turns. The system message stays."""
        for one in self._conversations:
            one.turns = []

    def set_system(self, text: str) -> None:
        """Set the system message of all models.

        Raises:
            ConfigError: A model has no chat template.
            ModelError: A chat template rejects a system message. No model has the new one.
        """
        for one in self._conversations if text else ():
            if not one.model.has_template:
                what = f"{one.title} has no chat template, so it has no system message"
                raise ConfigError(what, remedy="leave the system message out", keys=("--system",))
            one.model.encode(Conversation(one.title, one.model, system=text).messages("?"))
        for one in self._conversations:
            one.system = text

    def ask(self, question: str) -> None:
        """Print the response of each model, and add it to the model's conversation.

        Raises:
            Exception: A model cannot respond, and the session is not interactive.
        """
        seed = self._options.seed + self._n_questions
        self._n_questions += 1
        question = question.encode(errors="replace").decode()  # arguments may contain undecodable bytes
        for one in self._conversations:
            if len(self._conversations) > 1:
                print(f"--- {one.title} ---", flush=True)
            with self._errors_reported():
                self._respond(one, question, seed)

    def _respond(self, conversation: Conversation, question: str, seed: int) -> None:
        prompt, n_dropped = conversation.fit(question, self._options.max_tokens)
        limit = conversation.model.max_length
        if n_dropped:
            turns = "the oldest turn is" if n_dropped == 1 else f"the {n_dropped} oldest turns are"
            note(f"{turns} dropped: the conversation does not fit into the model's {limit} tokens")
        with stop_on_sigint() if self._is_interactive else _never_stopped() as is_stopped:
            response = conversation.model.respond(prompt, seed=seed, write=_write, is_stopped=is_stopped)
        print(flush=True)
        note(describe(response, self._options.max_tokens, limit))
        if conversation.model.has_template:
            conversation.turns.append((question, response.text))

    @contextmanager
    def _errors_reported(self) -> Iterator[None]:
        """Print an error of the body and continue, if the session is interactive."""
        try:
            yield
        except Exception as error:
            if not self._is_interactive:
                raise
            print(f"error: {as_known_error(error, 'chat')}", file=sys.stderr, flush=True)


def describe(response: ChatResponse, max_tokens: int, limit: int | None) -> str:
    """Return the line about a response."""
    reasons = {
        "eos": "ended by EOS",
        "max_tokens": f"truncated at --max-tokens {max_tokens}",
        "model_limit": f"truncated at the model's limit of {limit} tokens; /reset begins a new conversation",
        "interrupted": "stopped by Ctrl-C; the conversation keeps this part",
    }
    rate = response.n_tokens / max(response.seconds, 1e-9)
    return f"[{response.n_tokens} tokens, {response.seconds:.1f} s, {rate:.1f} tokens/s, {reasons[response.end]}]"


def note(text: str) -> None:
    """Print a line that is no response to stderr, dim at a terminal."""
    is_dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if is_dim else text, file=sys.stderr, flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


@contextmanager
def stop_on_sigint() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first SIGINT. A second SIGINT raises ``KeyboardInterrupt``."""
    is_stopped = threading.Event()

    def stop(*_: object) -> None:
        if is_stopped.is_set():
            raise KeyboardInterrupt
        is_stopped.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield is_stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _never_stopped() -> Iterator[Callable[[], bool]]:
    yield lambda: False


def read_lines(*, is_interactive: bool) -> Iterator[str]:
    """Yield the lines of stdin until its end, at a terminal with a prompt symbol and a history."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() uses it
    with suppress(EOFError):
        while True:
            yield input("> " if is_interactive else "")
    if is_interactive:
        print(flush=True)
