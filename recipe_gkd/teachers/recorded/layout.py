"""Format of a recording: a folder with ``_manifest.json`` and parquet files, readable with pyarrow alone.

A row of a parquet file has the scores of one response::

    prompt_ids     list<int32>             prompt that the teacher saw, P ids
    response_ids   list<int32>             response, T ids
    sampled_logps  list<float>             log-probability of each response token, T values
    topk_ids       list<int32>             ids of the top-k of each position, T x K values, row after row
    topk_logps     list<float|halffloat>   their log-probabilities, in descending order in each row

``top_k`` of the manifest is K. Files end at whole row groups, and pages have checksums, which readers verify.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from recipe_gkd.config.keys import key_name
from recipe_gkd.runtime.durable_files import write_durably
from teacher.errors import TeacherSetupError
from teacher.records import TeacherInfo

FORMAT_VERSION = 1
MANIFEST = "_manifest.json"  # Readers of parquet folders ignore names that begin with _.
PATH_KEY = key_name(lambda config: config.actor_rollout_ref.teacher.path)

RecordedDtype = Literal["float32", "float16"]


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One parquet file.

    Attributes:
        file: Name in the folder.
        n_rows: Number of responses.
        n_bytes: Size of the file.
        sha256: Checksum of the file, for ``sha256sum``.
    """

    file: str
    n_rows: int
    n_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RecordingSource:
    """Everything that determines the rows of a recording.

    Attributes:
        model_name: Name of the teacher.
        engine: Engine that computed the scores.
        vocab_size: Rows of the teacher's output layer.
        n_tokens: Number of ids that its distributions have.
        tokenizer_fingerprint: Fingerprint of the tokenizer of these ids: with ``teacher.vocabulary=compatible`` the
            student's, else the teacher's.
        max_model_len: Longest sequence that it scores.
        eos_token_ids: Ids at which it ends a turn.
        temperature: Divisor of its logits.
        top_k: Log-probabilities per position.
        dtype: Type of the top-k's log-probabilities.
        prompts: Hash of the prompts, the tools and the chat template.
        references: Hash of the reference responses.
        teacher_prompts: Hash of the teacher's own prompts. Empty if it sees the student's.
        n_responses: Number of responses of the complete recording.
    """

    model_name: str
    engine: str
    vocab_size: int
    n_tokens: int
    tokenizer_fingerprint: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    temperature: float
    top_k: int
    dtype: RecordedDtype
    prompts: str
    references: str
    teacher_prompts: str
    n_responses: int

    def info(self) -> TeacherInfo:
        """Return the description of the recorded teacher."""
        return TeacherInfo(
            model_name=self.model_name,
            vocab_size=self.vocab_size,
            n_tokens=self.n_tokens,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            max_model_len=self.max_model_len,
            n_logprobs=self.top_k,
            engine=f"recording of {self.engine}",
            eos_token_ids=self.eos_token_ids,
            protocol_version=1,
            n_workers=1,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of ``_manifest.json``.

    Attributes:
        format_version: Version of this format.
        source: Origin of the rows.
        shards: Complete files, in the order of the data.
    """

    format_version: int = FORMAT_VERSION
    source: RecordingSource
    shards: tuple[Shard, ...] = ()

    @property
    def n_rows(self) -> int:
        """Number of responses that are recorded."""
        return sum(shard.n_rows for shard in self.shards)

    def with_shard(self, shard: Shard) -> Manifest:
        """Return the manifest with one more file."""
        return replace(self, shards=(*self.shards, shard))

    def write(self, folder: Path) -> None:
        """Write the manifest durably."""
        write_durably(folder / MANIFEST, _ADAPTER.dump_json(self, indent=1).decode() + "\n")


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None if it has none.

    Raises:
        TeacherSetupError: It is invalid, of another version, or a file is missing or has another size.
    """
    path = folder / MANIFEST
    try:
        manifest = _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise TeacherSetupError(f"{path} is no manifest of a recording: {error}", path=path) from None
    if manifest.format_version != FORMAT_VERSION:
        raise TeacherSetupError(
            f"{path} has format version {manifest.format_version}, expected {FORMAT_VERSION}",
            path=path,
            remedy="record the data again",
        )
    for shard in manifest.shards:
        file = folder / shard.file
        n_bytes = file.stat().st_size if file.is_file() else None
        if n_bytes != shard.n_bytes:
            found = "is missing" if n_bytes is None else f"has {n_bytes} bytes"
            raise TeacherSetupError(
                f"{file} {found}, expected {shard.n_bytes} bytes",
                path=file,
                remedy="copy the recording again, or record the data again",
            )
    return manifest


def schema(dtype: RecordedDtype) -> pa.Schema:
    """Return the schema of the parquet files."""
    ids, logp = pa.list_(pa.int32()), pa.float16() if dtype == "float16" else pa.float32()
    return pa.schema(
        {
            "prompt_ids": ids,
            "response_ids": ids,
            "sampled_logps": pa.list_(pa.float32()),
            "topk_ids": ids,
            "topk_logps": pa.list_(logp),
        }
    )
