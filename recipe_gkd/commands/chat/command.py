"""The command ``chat``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import recipe_gkd.commands.chat as package
from recipe_gkd.commands.arguments import DTYPE_HELP, DTYPES
from recipe_gkd.commands.model_folder import model_folder, short_names
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError

if TYPE_CHECKING:
    from recipe_gkd.commands.chat.session import Session

DEVICES = ("auto", "cpu", "cuda")
MAX_SEED = 2**62


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 at the end of the input, 1 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_args(argv)
    try:
        check_arguments(args)
        converse(args)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        sys.stdout.flush()
        print(f"error: {as_known_error(error, 'chat')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Check the values that need no model.

    Raises:
        ConfigError: A value is out of its range.
    """
    limits = (
        ("--max-tokens", args.max_tokens, args.max_tokens >= 1, "a whole number of at least 1"),
        (
            "--temperature",
            args.temperature,
            args.temperature >= 0 and math.isfinite(args.temperature),
            "0 (greedy) or more",
        ),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "a number above 0, at most 1"),
        ("--seed", args.seed, 0 <= args.seed <= MAX_SEED, "a whole number from 0 to 2^62"),
    )
    for option, value, is_valid, expected in limits:
        if not is_valid:
            raise ConfigError(f"{option}: got {value}, expected {expected}", keys=(option,))
    if any(not text.strip() for text in args.prompt):
        raise ConfigError("--prompt: got an empty text, expected a question", keys=("--prompt",))


def converse(args: argparse.Namespace) -> None:
    """Load the models, and answer until the end of the input.

    Raises:
        ModelError: A model cannot be loaded, or its chat template rejects the system message.
    """
    is_interactive = not args.prompt and sys.stdin.isatty() and sys.stdout.isatty()
    session = open_session(args, is_interactive=is_interactive)
    if args.prompt:
        for text in args.prompt:
            session.ask(text)
        return
    from recipe_gkd.commands.chat.session import note, read_lines

    if is_interactive:
        note("/help lists the commands")
    for line in read_lines(is_interactive=is_interactive):
        if not session.handle(line):
            return


def open_session(args: argparse.Namespace, *, is_interactive: bool) -> Session:
    """Return a session with the loaded models."""
    given = [("student", args.folder), *([("teacher", args.teacher)] if args.teacher else [])]
    folders = [model_folder(path.expanduser()) for _, path in given]  # before the imports, which take seconds
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    from recipe_gkd.commands.chat.model import ChatModel, ChatOptions
    from recipe_gkd.commands.chat.session import Conversation, Session

    options = ChatOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        show_special_tokens=args.show_special_tokens,
    )
    names = short_names([str(folder.absolute()) for folder in folders])
    conversations = [
        Conversation(f"{role}: {name}", ChatModel(folder, options))
        for (role, _), name, folder in zip(given, names, folders, strict=True)
    ]
    session = Session(conversations, options, is_interactive=is_interactive)
    session.set_system(args.system)
    return session


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd chat",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="Hugging Face folder, checkpoint or run folder of the student")
    add("--teacher", type=Path, metavar="FOLDER", help="second model, which gets the same questions")
    add("--prompt", action="append", default=[], metavar="TEXT", help="question; repeatable, in one conversation")
    add("--system", default="", metavar="TEXT", help="system message")
    add("--max-tokens", type=int, default=256, metavar="N", help="maximum tokens of a response (default: 256)")
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    add("--top-p", type=float, default=1.0, help="probability mass that tokens are sampled from (default: 1)")
    add("--seed", type=int, default=0, help="seed of the first question; each question adds 1 (default: 0)")
    add("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    add("--device", choices=DEVICES, default="auto", help="default: the first GPU, or the CPU if there is none")
    add("--show-special-tokens", action="store_true", help="print special tokens, such as EOS")
    add("--trust-remote-code", action="store_true", help="run Python code from the folders")
    return parser
