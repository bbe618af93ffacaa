"""Identity of the model that a run was started from. A checkpoint stores it, so that no run resumes for another model.

It is made from the content of the model folder, so that a moved or copied folder, or other shards of the same tensors,
are the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.data.fingerprints import Fingerprint
from recipe_gkd.errors import ModelError
from teacher.common.weight_files import WeightFileError, weight_files

MAX_SAMPLED_TENSORS = 1024
"""Number of tensors of which bytes are read. A dense model of 80 layers has fewer."""
SAMPLE_BYTES = 4096
"""Number of bytes that are read from the middle of a tensor, one page of a disk."""

_NOT_ARCHITECTURE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
_ABSENT = "not set"
_MAX_LISTED = 5


def identify_model(folder: Path, tokenizer_fingerprint: str) -> dict[str, str]:
    """Return the identity of a model: texts by the names of its properties.

    The size of the weight files has little effect on the time, because headers and at most
    :data:`MAX_SAMPLED_TENSORS` samples of :data:`SAMPLE_BYTES` are read.

    Args:
        folder: Model folder with intact safetensors files.
        tokenizer_fingerprint: Hash of the tokenizer's vocabulary; see :mod:`teacher.common.fingerprint`.

    Raises:
        ModelError: A file cannot be read.
    """
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        places = {name: place for path in weight_files(folder) for name, place in _tensors_of(path)}
        return {
            **dict(_architecture(values)),
            "tokenizer": tokenizer_fingerprint,
            "names, types and shapes of the weights": _hash_headers(places),
            "values of the weights": _hash_samples(places),
        }
    except (OSError, ValueError, KeyError, WeightFileError) as error:
        raise ModelError(
            f"actor_rollout_ref.model.path: the files of {folder} cannot be read: {error}", path=folder
        ) from error


@dataclass(frozen=True)
class Difference:
    """Property in which two identities differ.

    Attributes:
        name: Name of the property.
        before: Text of the first identity.
        now: Text of the second identity.
    """

    name: str
    before: str
    now: str


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """Return the properties in which two identities differ."""
    texts = [(name, before.get(name, _ABSENT), now.get(name, _ABSENT)) for name in {**before, **now}]
    return [Difference(*values) for values in texts if values[1] != values[2]]


def describe_differences(found: Sequence[Difference]) -> str:
    """Return a text about differences: at most five, then the number of the others."""
    listed = [f"{each.name}: {each.before} -> {each.now}" for each in found[-_MAX_LISTED:]]
    more = [f"and {len(found) - _MAX_LISTED} more"] if len(found) > _MAX_LISTED else []
    return "; ".join([*listed, *more])


def _architecture(values: Mapping[str, Any], prefix: str = "config.json: ") -> Iterator[tuple[str, str]]:
    """Yield the settings of ``config.json`` that determine the function, as names and JSON.

    Special tokens are left out: an end-of-turn id may be added to correct a run.
    """
    for name, value in sorted(values.items()):
        if name in _NOT_ARCHITECTURE or name.endswith(("_token_id", "_token_ids")):
            continue
        if isinstance(value, Mapping):
            yield from _architecture(value, f"{prefix}{name}.")
        else:
            yield prefix + name, json.dumps(value)


def _tensors_of(path: Path) -> Iterator[tuple[str, tuple[Path, dict[str, Any], int]]]:
    """Yield the name of each tensor of a safetensors file, with the file, its header, and the start of all data."""
    with path.open("rb") as file:
        n_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n_bytes))
    for name, tensor in header.items():
        if name != "__metadata__":
            yield name, (path, tensor, 8 + n_bytes)


def _hash_headers(places: Mapping[str, tuple[Path, dict[str, Any], int]]) -> str:
    fingerprint = Fingerprint()
    for name, (_, tensor, _) in sorted(places.items()):
        fingerprint.add([name, tensor["dtype"], tensor["shape"]])
    return fingerprint.hexdigest()


def _hash_samples(places: Mapping[str, tuple[Path, dict[str, Any], int]]) -> str:
    """Return the hash of the bytes in the middle of tensors, which are chosen by hashes of their names."""
    chosen = sorted(places, key=lambda name: hashlib.blake2b(name.encode()).digest())[:MAX_SAMPLED_TENSORS]
    samples: dict[str, bytes] = {}
    for path in {places[name][0] for name in chosen}:
        with path.open("rb") as file:
            for name in (name for name in chosen if places[name][0] == path):
                _, tensor, start = places[name]
                first, last = tensor["data_offsets"]
                n_bytes = min(SAMPLE_BYTES, last - first)
                file.seek(start + first + (last - first - n_bytes) // 2)
                samples[name] = file.read(n_bytes)
    return hashlib.blake2b(b"".join(samples[name] for name in chosen), digest_size=16).hexdigest()
