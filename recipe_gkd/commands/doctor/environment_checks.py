"""Checks of environments and tools: they are imported, and the chat template can append their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from recipe_gkd.commands.doctor.data_checks import MAX_ROWS
from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_conversations
from recipe_gkd.config.keys import TRAIN_FILES
from recipe_gkd.conversations.setup import check_turns, open_environments
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECK = "conversations"


def environment_findings(
    config: Config, data_sets: Mapping[str, DataSet], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Finding]:
    """Load environments or tools in a separate process, and check the template with the first prompt.

    Args:
        data_sets: Rows of the files, by their config keys. They get the tools.
    """
    if has_conversations(config):
        yield from findings_of(CHECK, partial(_check, config, data_sets, tokenizer))


def _check(config: Config, data_sets: Mapping[str, DataSet], tokenizer: PreTrainedTokenizerBase) -> Iterator[Finding]:
    config = replace(config, rollout=replace(config.rollout, num_environment_workers=1))
    data_set = data_sets.get(TRAIN_FILES)
    if data_set is None:
        yield Finding(CHECK, "skipped", "the training data cannot be read")
        return
    with open_environments(config, data_set) as pool:
        assert pool is not None
        for other in data_sets.values():
            other.default_tools = pool.tools or None
        names = [str(tool.get("function", tool).get("name")) for tool in pool.tools]
    relaxed = replace(config.data, filter_overlong_prompts=True)
    for each in data_sets.values():
        check_turns(config, PromptData(each[:MAX_ROWS], relaxed, tokenizer), tokenizer)
    yield Finding(CHECK, "ok", f"{config.rollout.environment or 'tools'}: {', '.join(names) or 'no tools'}")
