"""Start of the environments of a run, and checks of the chat template before any worker starts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_conversations
from recipe_gkd.config.environments import TOOLS, EnvironmentSettings
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.template import TurnTemplate
from recipe_gkd.conversations.template_checks import check_teacher_prompt, check_template, describes_tools
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.wait_log import waiting_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_environments(config: Config, data_set: DataSet) -> AbstractContextManager[EnvironmentPool | None]:
    """Start the processes of the environments, if the run has conversations.

    Args:
        data_set: Training data, whose rows get the tools of the environments if they have none.

    Raises:
        ConfigError: A file of the user cannot be used.
    """
    if not has_conversations(config):
        return nullcontext()
    with waiting_for("start, load the environments", None, "rollout.environment or rollout.tools"):
        pool = EnvironmentPool(EnvironmentSettings.of(config), config.rollout.num_environment_workers)
    data_set.default_tools = pool.tools or None
    return pool


def check_turns(config: Config, data: PromptData, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that all prompts are messages, and with the first one that the chat template can append messages to turns.

    Raises:
        DataError: A prompt is a text.
        ConfigError: The template does not describe the tools, or changes earlier turns.
    """
    if not has_conversations(config):
        return
    rollout, row = config.rollout, data.data_set[data.rows[0] if data.text_row is None else data.text_row]
    turns = TurnTemplate(tokenizer, data.template, rollout.history, row.tools, row.where)
    may_call = rollout.tool_parser is not None
    roles = ["tool"] if rollout.tools else ["user", *(["tool"] if may_call else [])]
    check_template(turns, row.prompt, roles)
    first = data.prompt(0, 0)
    if rollout.history == "rewrite" and first.teacher_ids is not None and isinstance(row.prompt, list):
        check_teacher_prompt(turns, row.prompt, roles, first.ids)
    if row.tools and not describes_tools(turns, row.prompt):
        raise ConfigError(
            "the student's chat template does not describe tools, so the student cannot see them",
            remedy=f"use a model whose chat template describes tools, or describe them in the prompts and set {TOOLS} "
            "with a template that prints `tools`",
            keys=(TOOLS,),
        )
