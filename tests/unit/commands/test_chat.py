"""The command ``chat`` with tiny models of transformers."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipe_gkd.__main__ import main
from recipe_gkd.commands.chat.text_stream import TextStream
from recipe_gkd.commands.gpu_smoke.tiny_models import MAX_LENGTH, read_model, write_model
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

QUESTION, FOLLOW_UP, MAX_TOKENS = "123+456=", "7+8=", 20
OPTIONS = ("--max-tokens", str(MAX_TOKENS), "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("chat")
    for seed, name in enumerate("ab"):
        write_model(folder / name, seed=seed, with_tokenizer=True)
    return folder


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that does not generate EOS before 10^6 tokens."""
    folder = write_model(tmp_path_factory.mktemp("endless") / "model", seed=0, with_tokenizer=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][AutoTokenizer.from_pretrained(folder).eos_token_id] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**6}))
    return folder


def chat(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], str]:
    """Run the command. Return the lines of stdout, and stderr."""
    capsys.readouterr()
    assert main(["chat", *arguments, *OPTIONS]) == 0
    out, err = capsys.readouterr()
    return out.splitlines(), err


def chat_by_pipe(
    capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch, model: Path, text: str, *arguments: str
) -> tuple[list[str], str]:
    patch.setattr(sys, "stdin", io.StringIO(text))
    return chat(capsys, str(model), *arguments)


def greedy(folder: Path, *texts: str) -> str:
    """Return the greedy response of transformers to a chat whose first message is the user's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    found = read_model(folder, torch.float32).generate(torch.tensor([ids]), do_sample=False, max_new_tokens=MAX_TOKENS)
    return str(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))


class TestResponses:
    def test_both_models_respond_below_their_headings(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        models = folder / "a", folder / "b"
        lines, notes = chat(capsys, str(models[0]), "--teacher", str(models[1]), "--prompt", QUESTION)
        responses = [greedy(model, QUESTION) for model in models]
        assert lines == ["--- student: a ---", responses[0], "--- teacher: b ---", responses[1]]
        assert len(set(responses)) == 2 and notes.count("tokens/s") == 2

    def test_second_turn_has_the_first_in_its_prompt(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        first = greedy(folder / "a", QUESTION)
        second = greedy(folder / "a", QUESTION, first, FOLLOW_UP)
        assert second != greedy(folder / "a", FOLLOW_UP)
        lines, _ = chat(capsys, str(folder / "a"), "--prompt", QUESTION, "--prompt", FOLLOW_UP)
        assert lines == [first, second]

    def test_samples_repeat_with_the_seed(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        def sample(seed: int) -> list[str]:
            options = ("--temperature", "1", "--seed", str(seed))
            return chat(capsys, str(folder / "a"), "--prompt", QUESTION, *options)[0]

        assert sample(1) == sample(1) != sample(2)

    def test_oldest_turns_are_dropped_at_the_limit_of_the_model(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        long = "1+" * (MAX_LENGTH // 3)
        lines, notes = chat(capsys, str(folder / "a"), "--prompt", long, "--prompt", long)
        assert lines == [greedy(folder / "a", long)] * 2 and "oldest turn is dropped" in notes


class TestPipe:
    def test_lines_are_questions_without_prompt_symbols(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = f"{QUESTION}\n\n/reset\n{QUESTION}\n/quit\n{FOLLOW_UP}\n"
        lines, _ = chat_by_pipe(capsys, monkeypatch, folder / "a", text)
        assert lines == [greedy(folder / "a", QUESTION)] * 2

    def test_model_without_chat_template_completes_text(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = write_model(tmp_path / "plain", seed=0, with_tokenizer=True)
        (model / "chat_template.jinja").unlink()
        lines, notes = chat_by_pipe(capsys, monkeypatch, model, f"{QUESTION}\n{QUESTION}\n")
        assert len(lines) == 2 and lines[0] == lines[1] and notes.count("no chat template") == 1


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--temperature", "-1"), "--temperature: got -1.0"),
            (("--top-p", "0"), "--top-p: got 0.0"),
            (("--prompt", " "), "--prompt: got an empty text"),
            (("--prompt", "1" * MAX_LENGTH), f"expected 1 to {MAX_LENGTH - 1}"),
            (("--prompt", "1", "--system", "x"), "rejects messages with the roles system, user"),
        ],
    )
    def test_invalid_value_is_one_line(
        self, arguments: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._check(capsys, message, str(folder / "a"), *arguments)

    def test_folder_without_model_or_weights_is_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._check(capsys, "has no config.json", str(tmp_path))
        model = write_model(tmp_path / "model", seed=0, with_tokenizer=True)
        (model / "model.safetensors").unlink()
        self._check(capsys, "has no weights", str(model))

    @staticmethod
    def _check(capsys: pytest.CaptureFixture[str], message: str, *arguments: str) -> None:
        capsys.readouterr()
        assert main(["chat", *arguments]) == 1
        printed = capsys.readouterr().err.splitlines()
        assert len(printed) == 1 and printed[0].startswith("error: ") and message in printed[0]


class TestTerminal:
    @pytest.mark.slow
    @pytest.mark.parametrize(("end", "status"), [(b"\x04", 0), (signal.SIGINT, 130)])
    def test_sigint_stops_only_the_response(
        self, end: bytes | signal.Signals, status: int, endless_model: Path
    ) -> None:
        main_end, terminal = pty.openpty()
        command = [sys.executable, "-m", "recipe_gkd", "chat", str(endless_model), "--device", "cpu"]
        options = ["--max-tokens", "1000000", "--show-special-tokens"]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        with subprocess.Popen([*command, *options], cwd=REPO, start_new_session=True, **streams) as process:
            os.close(terminal)
            rest = read_past(main_end, b"> ")
            os.write(main_end, QUESTION.encode() + b"\n")
            rest = read_past(main_end, QUESTION.encode(), rest)
            while len(rest) < 50:  # the response has begun
                rest += os.read(main_end, 65536)
            process.send_signal(signal.SIGINT)
            rest = read_past(main_end, b"stopped by Ctrl-C", rest)
            read_past(main_end, b"> ", rest)
            if isinstance(end, bytes):
                os.write(main_end, end)
            else:
                process.send_signal(end)
                with suppress(OSError):  # it has ended
                    os.write(main_end, b"\n")  # wakes readline, which can miss a signal just after its prompt
            assert process.wait(PATIENCE_S) == status
            os.close(main_end)


def read_past(descriptor: int, wanted: bytes, read: bytes = b"") -> bytes:
    """Read from a terminal until the wanted bytes, and return what follows them.

    Args:
        wanted: Bytes to wait for.
        read: Bytes that were already read.
    """
    while wanted not in read:
        read += os.read(descriptor, 65536)
    return read.partition(wanted)[2]


class TestTextStream:
    TEXT = "a\N{GRINNING FACE}é — 日本"

    def test_characters_of_several_tokens_come_out_whole(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
        stream = TextStream(tokenizer, show_special_tokens=False)
        ids = tokenizer(self.TEXT)["input_ids"]
        assert len(ids) == len(self.TEXT.encode())
        parts = [part for token_id in ids if (part := stream.add(token_id))]
        assert parts == list(self.TEXT)
        assert stream.add(ids[1]) == "" and stream.flush() == "\N{REPLACEMENT CHARACTER}"
