"""Declaration of the ids that end a response, in a saved Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from teacher.common.eos import declared_eos_ids

GENERATION_CONFIG = "generation_config.json"
_OTHER_IDS = "bos_token_id", "pad_token_id"
"""Fields that transformers reads from ``config.json`` only if there is no ``generation_config.json``."""


def generation_config(source: Path, stop_token_ids: Sequence[int]) -> dict[str, bytes]:
    """Return the file with which a trained model declares all ids that ended its responses, by its name.

    A teacher can end a turn with an id that the student's folder does not declare. A student that was trained on
    responses that end there must end there in every other program too.

    Args:
        source: Model folder that the training has started from.
        stop_token_ids: Ids that ended responses in training.

    Returns:
        Content of ``generation_config.json`` with the fields of the source. Empty if the source declares all ids.
    """
    file, config = source / GENERATION_CONFIG, json.loads((source / "config.json").read_text())
    found = {name: config[name] for name in _OTHER_IDS if config.get(name) is not None}
    if file.is_file():
        found = json.loads(file.read_text())
    declared = list(dict.fromkeys(token_id for ids in declared_eos_ids(found, config) for token_id in ids))
    missing = sorted(set(stop_token_ids) - set(declared))
    if not missing:
        return {}
    ids = [*declared, *missing]
    content = found | {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    return {GENERATION_CONFIG: (json.dumps(content, indent=2) + "\n").encode()}
