"""Reading, tokenization and batches of prompts. Every prompt occurs once per epoch, from any position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.config.responses import ResponseCounts
from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.errors import DataError, ModelError
from tests._support.base_config import base_config
from tests._support.errors import raises


class Bytes:
    """A tokenizer whose ids are UTF-8 bytes.

    A chat is the contents of its messages, each after a 1, and a final 2. The EOS token is 3.
    """

    eos_token_id: int | None = 3
    bos_token_id: int | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        bos = [] if self.bos_token_id is None or not add_special_tokens else [self.bos_token_id]
        return {"input_ids": [*bos, *text.encode()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        if messages[0]["role"] == "system":
            raise ValueError("roles are user and assistant")
        return [token for message in messages for token in [1, *message["content"].encode()]] + [2]


def settings(**values: Any) -> DataConfig:
    overrides = [f"data.{key}={value}" for key, value in values.items()]
    return base_config("data.max_prompt_length=8", "data.filter_overlong_prompts=false", *overrides).data


def parquet(folder: Path, rows: dict[str, list[Any]], name: str = "data.parquet") -> list[str]:
    pq.write_table(pa.table(rows), folder / name)
    return [str(folder / name)]


def load(files: list[str], with_references: bool = False, **values: Any) -> PromptData:
    config = settings(**values)
    return PromptData(read_data_set(files, config), config, Bytes(), with_references=with_references)


CHAT = pa.array([[{"role": "user", "content": "b"}]])


def loader(
    tmp_path: Path, rows: int, *, n: int = 1, epochs: int = 1, max_steps: int | None = None, **values: Any
) -> PromptLoader:
    data = load(parquet(tmp_path, {"prompt": [f"{i:03}" for i in range(rows)]}), **values)
    return PromptLoader(data, settings(**values), n=n, epochs=epochs, max_steps=max_steps)


def reference_loader(
    tmp_path: Path, rows: int, share: float, *, n: int = 2, warmup_steps: int = 0, **values: Any
) -> PromptLoader:
    columns = {"prompt": [f"{i:03}" for i in range(rows)], "response": [f"response {i}" for i in range(rows)]}
    data = load(parquet(tmp_path, columns), with_references=True, **values)
    return PromptLoader(
        data, settings(**values), n=n, epochs=2, max_steps=None, sft_share=share, warmup_steps=warmup_steps
    )


def uses_reference(prompts: PromptLoader, position: int = 0) -> list[bool]:
    """Return for each prompt of the stream whether it comes with its reference response."""
    batches = prompts.batches(position, first_step=position // prompts.config.train_batch_size)
    by_index: dict[int, list[bool]] = {}
    for batch in batches:
        for prompt in batch.prompts:
            by_index.setdefault(prompt.uid // prompts.n, []).append(prompt.reference_ids is not None)
    assert all(by_reference in ([True], [False] * prompts.n) for by_reference in by_index.values())  # once, or n times
    assert prompts.total_prompts is not None
    assert list(by_index) == list(range(position, prompts.total_prompts))
    return [by_reference[0] for by_reference in by_index.values()]


class TestTokenizePrompt:
    def test_chats_and_strings_are_tokenized(self, tmp_path: Path) -> None:
        chats = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "я"}]]})
        assert [ids.tolist() for ids in load(chats).ids] == [[1, 97, 98, 2], [1, 0xD1, 0x8F, 2]]
        assert [ids.tolist() for ids in load(parquet(tmp_path, {"prompt": ["é"]})).ids] == [[0xC3, 0xA9]]

    @pytest.mark.parametrize(
        ("truncation", "kept"), [("left", "23456789"), ("right", "01234567"), ("middle", "01236789")]
    )
    def test_overlong_prompt_is_truncated(self, tmp_path: Path, truncation: str, kept: str) -> None:
        data = load(parquet(tmp_path, {"prompt": ["0123456789"]}), truncation=truncation)
        assert bytes(data.ids[0].tolist()).decode() == kept

    def test_string_gets_one_bos_token(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Bytes, "bos_token_id", 5)
        data = load(parquet(tmp_path, {"prompt": ["ab", "\x05ab", "a\x05\x05"]}))
        assert [ids.tolist() for ids in data.ids] == [[5, 97, 98], [5, 97, 98], [5, 97, 5, 5]]

    def test_message_without_content_or_tool_calls_refused(self, tmp_path: Path) -> None:
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}, call]]})
        assert load(files).ids[0].tolist() == [1, 97, 1, 2]
        files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]]})
        with raises(DataError, row=1, column="prompt"):
            load(files)

    def test_null_fields_are_not_passed_to_template(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parquet gives all messages of a column the same fields, and templates test if `tool_calls` exists."""
        shown: list[dict[str, str]] = []
        monkeypatch.setattr(Bytes, "apply_chat_template", lambda _, messages, **__: shown.extend(messages) or [1])
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        load(parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}, call]]}))
        assert shown == [{"role": "user", "content": "a"}, call | {"content": ""}]


class TestReadDataSet:
    def test_files_are_concatenated(self, tmp_path: Path) -> None:
        files = parquet(tmp_path, {"prompt": ["a"], "source": ["one"]}) + parquet(
            tmp_path, {"prompt": ["b", "c"]}, "b.parquet"
        )
        data = load(files)
        assert [data.data_set[data.prompt(i, uid=i).row].value(("source",)) for i in range(3)] == ["one", None, None]

    @pytest.mark.parametrize(
        ("column", "other"),
        [
            (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
            (pa.array(["1"]), pa.array(["1"], pa.large_string())),
            (pa.array([["1"]]), pa.array([["1"]], pa.large_list(pa.large_string()))),
            (pa.array([{"a": 1}], pa.struct({"a": pa.int32()})), pa.array([{"a": 1}], pa.struct({"a": pa.int64()}))),
        ],
    )
    def test_types_of_different_width_are_equal_values(self, tmp_path: Path, column: pa.Array, other: pa.Array) -> None:
        a = parquet(tmp_path, {"prompt": ["a"], "column": column}, "a.parquet")
        b = parquet(tmp_path, {"prompt": pa.array(["b"], pa.large_string()), "column": other}, "b.parquet")
        for files in (a + b, b + a):
            data = load(files)
            assert len(data) == 2 and len(set(map(str, data.data_set.values_at(("column",))))) == 1

    @pytest.mark.parametrize("other", [pa.array(["high"]), pa.array([0.5]), pa.array([{"a": 1}]), pa.array([None])])
    def test_each_file_keeps_its_types(self, tmp_path: Path, other: pa.Array) -> None:
        files = parquet(tmp_path, {"prompt": ["a"], "level": [2**60 + 1]})
        data = load(files + parquet(tmp_path, {"prompt": CHAT, "level": other}, "b.parquet"))
        assert list(data.data_set.values_at(("level",))) == [2**60 + 1, other[0].as_py()]
        assert [ids.tolist() for ids in data.ids] == [[97], [1, 98, 2]]

    def test_duplicate_column_refused(self, tmp_path: Path) -> None:
        pq.write_table(pa.table([pa.array(["a"])] * 3, names=["prompt", "x", "x"]), tmp_path / "twice.parquet")
        with raises(DataError, file=tmp_path / "twice.parquet", column="x"):
            load([str(tmp_path / "twice.parquet")])

    def test_missing_or_unreadable_file_named(self, tmp_path: Path) -> None:
        with raises(DataError, file=tmp_path / "nowhere.parquet"):
            load([str(tmp_path / "nowhere.parquet")])
        (tmp_path / "text.parquet").write_text("hello")
        with raises(DataError, file=tmp_path / "text.parquet"):
            load([str(tmp_path / "text.parquet")])


class TestPromptData:
    def test_overlong_prompts_are_dropped_and_counted(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        data = load(parquet(tmp_path, {"prompt": ["0123456789", "ok"]}), filter_overlong_prompts="true")
        assert data.rows == [1]
        assert "1 of 2 prompts are longer" in caplog.text

    @pytest.mark.parametrize(
        ("rows", "fields"),
        [
            ({"question": ["a"]}, {"column": "prompt", "existing": ("question",)}),
            ({"prompt": pa.array([], pa.string())}, {"row": None, "column": ""}),
            ({"prompt": [3]}, {"row": 0, "column": "prompt"}),
            ({"prompt": ["", "a"]}, {"row": 0, "column": "prompt"}),
            ({"prompt": [[]]}, {"row": 0, "column": "prompt"}),
            ({"prompt": [[{"role": "system", "content": "a"}]]}, {"row": 0, "column": "prompt"}),
            ({"prompt": ["a", "0123456789"]}, {"row": 1, "column": "prompt"}),
        ],
    )
    def test_unusable_row_or_column_named(self, tmp_path: Path, rows: dict[str, Any], fields: dict[str, Any]) -> None:
        [file] = parquet(tmp_path, rows)
        with raises(DataError, file=Path(file), **fields):
            load([file])

    def test_fingerprint_depends_on_prompts_and_order_only(self, tmp_path: Path) -> None:
        class Dated(Bytes):
            """A chat template that starts with a date, like ``strftime_now`` in the template of Llama 3.2."""

            def __init__(self, day: int) -> None:
                self.day = day

            def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
                return [self.day, *super().apply_chat_template(messages, **options)]

        def of(*texts: str, day: int = 1, **values: Any) -> str:
            files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": text}] for text in texts]})
            config = settings(**values)
            return PromptData(read_data_set(files, config), config, Dated(day)).fingerprint

        assert of("ab", "c") == of("ab", "c", day=2)
        assert len({of("ab", "c"), of("c", "ab"), of("a", "bc"), of("abc"), of("ab", "d"), of("ab", "c", "d")}) == 6
        assert of("ab", "much too long", "c", filter_overlong_prompts="true") == of("ab", "c")

    def test_references_have_their_own_fingerprint(self, tmp_path: Path) -> None:
        def of(*texts: str, with_references: bool = True) -> tuple[str, str]:
            files = parquet(tmp_path, {"prompt": ["a", "much too long", "b"], "response": list(texts)})
            data = load(files, with_references=with_references, filter_overlong_prompts="true")
            return data.fingerprint, data.references_fingerprint

        assert of("x", "y", "z") == of("x", "unused row", "z") != of("x", "y", "other")
        assert of("x", "y", "z")[0] == of("x", "y", "other")[0] == of("x", "y", "z", with_references=False)[0]
        assert of("x", "y", "z", with_references=False)[1] == "" and len(of("x", "y", "z")[1]) == 32


class TestPromptLoader:
    @pytest.mark.parametrize("batch", [1, 2, 3, 7, 10, 100])
    def test_every_prompt_occurs_once_per_epoch(self, tmp_path: Path, batch: int) -> None:
        batches = list(loader(tmp_path, 10, epochs=3, train_batch_size=batch).batches(0, first_step=0))
        rows = [prompt.row for one in batches for prompt in one.prompts]
        assert [sorted(rows[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
        assert rows[:10] != rows[10:20]  # each epoch has its own order
        assert {len(one.prompts) for one in batches[:-1]} <= {batch}
        assert [one.step for one in batches] == list(range(len(batches)))
        assert batches[-1].epoch == 3.0

    @pytest.mark.parametrize(
        ("batch", "epochs", "max_steps", "warns"),
        [(15, 3, None, True), (15, 1, 2, True), (15, 1, None, False), (10, 3, None, False)],
    )
    def test_batch_larger_than_the_data_is_reported(
        self,
        tmp_path: Path,
        batch: int,
        epochs: int,
        max_steps: int | None,
        warns: bool,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """A step would train on a prompt more than once."""
        found = loader(tmp_path, 10, epochs=epochs, max_steps=max_steps, train_batch_size=batch)
        message = f"data.train_batch_size={batch} is larger than the 10 prompts of the training data: a step trains on"
        assert (message in caplog.text) == warns
        repeated = any(len({p.row for p in b.prompts}) < len(b.prompts) for b in found.batches(0, first_step=0))
        assert repeated == warns

    @pytest.mark.parametrize("position", [0, 4, 12, 28])
    def test_restored_position_continues_the_stream(self, tmp_path: Path, position: int) -> None:
        prompts = loader(tmp_path, 10, epochs=3, train_batch_size=4)
        whole = list(prompts.batches(0, first_step=0))
        rest = list(prompts.batches(position, first_step=position // 4))
        expected = whole[position // 4 :]
        assert [[p.uid for p in b.prompts] for b in rest] == [[p.uid for p in b.prompts] for b in expected]
        assert prompts.last_step(position, position // 4) == len(whole)

    def test_samples_of_one_prompt_have_different_uids(self, tmp_path: Path) -> None:
        batch = next(loader(tmp_path, 4, n=3, train_batch_size=2).batches(0, first_step=0))
        assert [prompt.uid for prompt in batch.prompts] == [0, 1, 2, 3, 4, 5]
        assert len({prompt.row for prompt in batch.prompts}) == 2

    def test_max_steps_ends_before_epochs(self, tmp_path: Path) -> None:
        prompts = loader(tmp_path, 10, epochs=5, max_steps=3, train_batch_size=4)
        assert len(list(prompts.batches(0, first_step=0))) == prompts.last_step(0, 0) == 3

    def test_max_steps_spans_epochs(self, tmp_path: Path) -> None:
        prompts = loader(tmp_path, 10, epochs=1, max_steps=9, train_batch_size=4)
        batches = list(prompts.batches(0, first_step=0))
        assert len(batches) == prompts.last_step(0, 0) == 9
        assert {len(batch.prompts) for batch in batches} == {4}
        rows = [prompt.row for batch in batches for prompt in batch.prompts]
        assert [sorted(rows[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
        assert batches[-1].epoch == 3.6
        assert prompts.last_step(36, step=9) == 9  # a run that is resumed at its end
        rest = list(prompts.batches(20, first_step=5))
        assert [[p.uid for p in b.prompts] for b in rest] == [[p.uid for p in b.prompts] for b in batches[5:]]

    def test_order_depends_on_seed_only(self, tmp_path: Path) -> None:
        def rows(**values: Any) -> list[int]:
            return [p.row for b in loader(tmp_path, 50, **values).batches(0, first_step=0) for p in b.prompts]

        assert rows(seed=1) == rows(seed=1) != rows(seed=2)
        assert rows(shuffle="false") == list(range(50))
        assert np.array_equal(np.sort(rows(seed=3)), np.arange(50))

    @pytest.mark.parametrize(("batch", "steps_left"), [(4, 2), (8, 2), (2, 2)])
    def test_max_steps_with_changed_batch_size_counts_steps(self, tmp_path: Path, batch: int, steps_left: int) -> None:
        prompts = loader(tmp_path, 10, epochs=9, max_steps=5, train_batch_size=batch)  # 3 steps of 4 are done
        assert len(list(prompts.batches(12, first_step=3))) == steps_left
        assert prompts.last_step(12, step=3) == 5


class TestReferences:
    @pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.29, 1 / 3, 0.5, 0.9, 1.0])
    def test_sft_share_is_evenly_spread(self, tmp_path: Path, share: float) -> None:
        counts = np.cumsum([0, *uses_reference(reference_loader(tmp_path, 100, share, train_batch_size=7))])
        assert counts[100] == int(share * 100 + 1e-9)
        for width in (1, 7, 30, 100):
            assert (np.abs(counts[width:] - counts[:-width] - share * width) < 1 + 1e-3).all()

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.29, 1 / 3, 0.5, 0.9, 1.0])
    def test_no_batch_has_more_responses_than_the_counted_ones(self, tmp_path: Path, share: float) -> None:
        prompts = reference_loader(tmp_path, 98, share, train_batch_size=7, warmup_steps=2)
        keys = ("data.train_batch_size=7", "actor_rollout_ref.rollout.n=2", f"gkd.sft_share={share}")
        largest = max(len(batch.prompts) for batch in prompts.batches(0, 0))
        assert largest == ResponseCounts.most(base_config(*keys, "gkd.warmup_steps=2")).trained

    @pytest.mark.parametrize("share", [0.0, 0.3])
    def test_warm_up_steps_have_references_only(self, tmp_path: Path, share: float) -> None:
        """The steps after it are those of a run without warm-up, and so is the order of the prompts."""
        plain = list(reference_loader(tmp_path, 20, share, train_batch_size=4, n=1).batches(0, 0))
        prompts = reference_loader(tmp_path, 20, share, train_batch_size=4, n=1, warmup_steps=3)
        warm = list(prompts.batches(0, 0))
        assert len(warm) == len(plain) == 10
        for batch, reference in zip(warm, plain, strict=True):
            assert [prompt.row for prompt in batch.prompts] == [prompt.row for prompt in reference.prompts]
            used = [prompt.reference_ids is not None for prompt in batch.prompts]
            expected = [prompt.reference_ids is not None for prompt in reference.prompts]
            assert used == ([True] * 4 if batch.step < 3 else expected)
        resumed = list(prompts.batches(8, 2))
        assert [len(batch.prompts) for batch in resumed] == [4] * 8
        assert [all(prompt.reference_ids is not None for prompt in batch.prompts) for batch in resumed[:2]] == [
            True,
            False,
        ]

    def test_restart_keeps_positions(self, tmp_path: Path) -> None:
        prompts = reference_loader(tmp_path, 50, 0.3, train_batch_size=4)
        assert uses_reference(prompts, position=36) == uses_reference(prompts)[36:]

    def test_eos_is_appended_unless_truncated(self, tmp_path: Path) -> None:
        rows = {"prompt": ["a"] * 3, "solution": ["12345", "1234", "123456789"]}
        data = load(parquet(tmp_path, rows), with_references=True, response_key="solution", max_response_length=5)
        responses = [data.reference_response(data.prompt(i, uid=7, with_reference=True), version=4) for i in range(3)]
        assert [bytes(response.ids.tolist()) for response in responses] == [b"12345", b"1234\x03", b"12345"]
        assert [response.finish_reason for response in responses] == ["length", "stop", "length"]
        assert responses[1].uid == 7 and responses[1].weights_version == 4
        assert responses[1].versions_T.tolist() == [4] * 5
        assert responses[1].logprobs.tolist() == [0.0] * 5

    @pytest.mark.parametrize(
        ("rows", "row", "existing"),
        [
            ({"answer": ["b"]}, None, ("prompt", "answer")),
            ({"response": [""]}, 0, None),
            ({"response": pa.array([None], pa.string())}, 0, None),
            ({"response": [["b"]]}, 0, None),
        ],
    )
    def test_unusable_reference_named(
        self, tmp_path: Path, rows: dict[str, Any], row: int | None, existing: tuple[str, ...] | None
    ) -> None:
        files = parquet(tmp_path, {"prompt": ["a"], **rows})
        with raises(DataError, row=row, column="response", existing=existing):
            load(files, with_references=True)
        load(files)  # accepted if reference responses are not needed

    def test_existing_end_is_kept(self, tmp_path: Path) -> None:
        """The end may be the EOS token or another id at which sampled responses end."""
        rows = {"prompt": ["a"] * 4, "response": ["ab\x03", "ab\x04", "ab", "abcdefgh\x03"]}
        config = settings(max_response_length=6)
        data_set = read_data_set(parquet(tmp_path, rows), config)
        data = PromptData(data_set, config, Bytes(), with_references=True, stop_token_ids=(4,))
        assert [ids.tolist() for ids in data.reference_ids] == [[97, 98, 3], [97, 98, 4], [97, 98, 3], list(b"abcdef")]
        responses = [data.reference_response(data.prompt(i, uid=i, with_reference=True), version=0) for i in range(4)]
        assert [response.finish_reason for response in responses] == ["stop", "stop", "stop", "length"]

    def test_tokenizer_without_eos_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Bytes, "eos_token_id", None)
        with raises(ModelError, names=("eos_token",)):
            load(parquet(tmp_path, {"prompt": ["a"], "response": ["b"]}), with_references=True)
