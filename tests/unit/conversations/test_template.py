"""Tokens between turns, and checks of chat templates."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from recipe_gkd.config.schema.rollout import HistoryMode
from recipe_gkd.conversations.setup import check_turns
from recipe_gkd.conversations.template import SampledTurn, TurnTemplate, cut
from recipe_gkd.conversations.template_checks import check_teacher_prompt, check_template, describes_tools
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.tokenization import ChatTemplate, tokenize_prompt
from recipe_gkd.errors import ConfigError, DataError
from tests._support.conversations import FILE, QWEN3, TOKENIZER, configured, text_of, with_chat_template
from tests._support.data_sets import data_set_of
from tests._support.errors import raises

USER = [{"role": "user", "content": "12+34="}]
FROM_TOOL = {"role": "tool", "content": "46"}
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
CHATML = (
    "{% if tools %}tools{% endif %}{% for m in messages %}<|user|>{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}+{{ c.function.arguments.x }}{% endfor %}<|end|>0{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant={% endif %}"
)
STRIPS_REASONING = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1].strip() }}"
)
COUNTS = CHATML.replace("{{ m.role }}", "{{ messages | length }}")
CLOSES_DIFFERENTLY = CHATML.replace("<|end|>0", "<|end|>{{ '0' if loop.last else '1' }}")
OTHER_BEGINNING = CHATML.replace("<|user|>assistant={% endif %}", "<|assistant|>{% endif %}")
CALL_WITHOUT_CONTENT = CHATML.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}")
"""Template like those of Llama 3.1 and Mistral: a message with calls shows no content."""
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}0"
)
END = TOKENIZER.eos_token_id
KEYS = ("rollout.history",)


def template_of(text: str, history: HistoryMode = "refuse", tools: Any = None) -> TurnTemplate:
    return TurnTemplate(with_chat_template(text), ChatTemplate(), history, tools, "row 0")


def assistant(content: str, *calls: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        found["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": {"x": call}}} for call in calls]
    return found


def sampled(
    message: dict[str, Any], after: list[Any] = USER, before: list[Any] = USER, end_id: int = END
) -> SampledTurn:
    return SampledTurn(before=before, message=message, after=after, end_id=end_id)


class TestTokensBetweenTurns:
    def test_tokens_are_those_of_the_template(self) -> None:
        """Prompt, turn and new tokens are together what the template writes for the whole conversation."""
        turns = TurnTemplate(TOKENIZER, ChatTemplate(), "refuse", TOOLS, "row 0")
        call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        results = [FROM_TOOL, {"role": "tool", "content": "7"}]
        text = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call><|end|>'
        found = turns.next_tokens(sampled(turn, results))
        prompt = tokenize_prompt(USER, TOKENIZER, "row 0", tools=TOOLS)
        whole = np.concatenate([prompt, TOKENIZER(text)["input_ids"], found.ids])
        expected = tokenize_prompt([*USER, turn, *results], TOKENIZER, "row 0", tools=TOOLS)
        assert whole.tolist() == expected.tolist() and found.ids.dtype == np.int32 and not found.is_rewrite

    def test_what_closes_a_turn_behind_its_last_token_is_added(self) -> None:
        text = text_of(template_of(CHATML).next_tokens(sampled(assistant("1", 5))).ids)
        assert text.startswith("0<|user|>") and text.endswith("<|end|>0<|user|>" + text.rpartition("<|user|>")[2])

    def test_other_last_token_is_followed_by_the_end_of_the_template(self) -> None:
        other = TOKENIZER.convert_tokens_to_ids("<|pad|>")
        text = text_of(template_of(CHATML).next_tokens(sampled(assistant("1"), end_id=other)).ids)
        assert text.startswith("<|end|>0<|user|>")

    @pytest.mark.parametrize("history", ["refuse", "keep", "rewrite"])
    def test_call_may_hide_the_content_of_its_message(self, history: HistoryMode) -> None:
        turns, turn = template_of(CALL_WITHOUT_CONTENT, history), sampled(assistant("1", 5), [FROM_TOOL])
        found = turns.next_tokens(turn)
        written = text_of(tokenize_prompt([*USER, turn.message, FROM_TOOL], turns.tokenizer, ""))
        assert not found.is_rewrite and written.endswith("<|end|>" + text_of(found.ids))
        check_template(turns, USER, ["tool"])

    def test_template_that_changes_earlier_turns_is_refused(self) -> None:
        with pytest.raises(DataError, match="differently"):
            template_of(COUNTS).next_tokens(sampled(assistant("1")))

    def test_changed_turns_are_kept(self) -> None:
        found = template_of(COUNTS, "keep").next_tokens(sampled(assistant("1")))
        assert not found.is_rewrite and text_of(found.ids).startswith("0<|user|>")

    @pytest.mark.parametrize(("text", "is_rewrite"), [(COUNTS, True), (CHATML, False), (OTHER_BEGINNING, True)])
    def test_changed_turns_are_rewritten(self, text: str, is_rewrite: bool) -> None:
        """The next turn sees what the template writes, if this does not follow from the tokens so far."""
        turns, turn = template_of(text, "rewrite"), sampled(assistant("1"))
        found = turns.next_tokens(turn)
        assert found.is_rewrite == is_rewrite
        if is_rewrite:
            assert found.ids.tolist() == tokenize_prompt([*USER, turn.message, *USER], turns.tokenizer, "").tolist()


class TestQwen3:
    """Its template writes reasoning behind the last message of a user only, and none as an empty block."""

    CALLING, THINKING = assistant("<think>\n1\n</think>\n\n", 5), assistant("<think>\n1\n</think>\n\n2")

    @pytest.mark.parametrize(
        ("before", "message", "after", "is_rewrite"),
        [
            ([], THINKING, USER[0], True),
            ([], CALLING, FROM_TOOL, False),
            ([CALLING, FROM_TOOL], THINKING, USER[0], True),
            ([CALLING, FROM_TOOL], assistant("2"), USER[0], True),
            ([], assistant("2"), USER[0], True),
        ],
    )
    def test_histories(self, before: list[Any], message: Any, after: Any, is_rewrite: bool) -> None:
        turn = sampled(message, [after], [*USER, *before])
        rewritten = template_of(QWEN3, "rewrite").next_tokens(turn)
        assert rewritten.is_rewrite == is_rewrite
        kept = template_of(QWEN3, "keep").next_tokens(turn)
        role = "tool" if after is FROM_TOOL else "user"
        expected = f"<|{role}|>{after['content']}<|end|><|assistant|>"
        assert text_of(kept.ids) == expected and not kept.is_rewrite
        if is_rewrite:
            written = text_of(rewritten.ids)
            assert "<think>" not in written and written.endswith(expected) and "12+34=" in written
        else:
            assert rewritten.ids.tolist() == kept.ids.tolist()

    def test_check(self) -> None:
        for roles in (["user"], ["tool"], ["user", "tool"]):
            with raises(ConfigError, keys=KEYS):
                check_template(template_of(QWEN3), USER, roles)
            check_template(template_of(QWEN3, "keep"), USER, roles)
            check_template(template_of(QWEN3, "rewrite"), USER, roles)


class TestCheck:
    @pytest.mark.parametrize("history", ["refuse", "keep", "rewrite"])
    @pytest.mark.parametrize("roles", [["user"], ["tool"], ["user", "tool"]])
    def test_template_that_appends_is_accepted(self, roles: list[str], history: HistoryMode) -> None:
        check_template(template_of(CHATML, history, TOOLS), USER, roles)

    @pytest.mark.parametrize("text", [STRIPS_REASONING, COUNTS, OTHER_BEGINNING])
    def test_template_that_changes_turns_is_refused_unless_the_config_says_how(self, text: str) -> None:
        with raises(ConfigError, keys=KEYS):
            check_template(template_of(text), USER, ["user"])
        check_template(template_of(text, "keep"), USER, ["user"])
        check_template(template_of(text, "rewrite"), USER, ["user"])

    def test_template_that_closes_turns_differently_cannot_be_kept(self) -> None:
        with pytest.raises(ConfigError, match="rewrite"):
            check_template(template_of(CLOSES_DIFFERENTLY, "keep"), USER, ["user"])
        check_template(template_of(CLOSES_DIFFERENTLY, "rewrite"), USER, ["user"])

    @pytest.mark.parametrize("history", ["refuse", "keep", "rewrite"])
    def test_template_without_the_role_is_refused(self, history: HistoryMode) -> None:
        with pytest.raises(ConfigError, match=r"refuses a message of the role 'tool'.*no tools"):
            check_template(template_of(REFUSES_TOOLS, history), USER, ["tool"])

    def test_text_prompt_is_refused(self) -> None:
        with pytest.raises(DataError, match="lists of messages"):
            check_template(template_of(CHATML), "12+34=", ["user"])

    def test_prompt_of_a_teacher_needs_an_unchanged_prompt(self) -> None:
        for text, is_changed in ((QWEN3, False), (COUNTS, True), (CHATML, False)):
            turns = template_of(text, "rewrite")
            ids = tokenize_prompt(USER, turns.tokenizer, "")
            if is_changed:
                with raises(ConfigError, keys=KEYS):
                    check_teacher_prompt(turns, USER, ["user"], ids)
            else:
                check_teacher_prompt(turns, USER, ["user", "tool"], ids)

    def test_describes_tools(self) -> None:
        assert describes_tools(template_of(CHATML, tools=TOOLS), USER)
        assert not describes_tools(template_of(REFUSES_TOOLS, tools=TOOLS), USER)


@pytest.mark.parametrize(("side", "expected"), [("left", "...56789"), ("right", "01234..."), ("middle", "01...789")])
def test_long_message_is_cut(side: str, expected: str) -> None:
    assert cut("0123456789", TOKENIZER, 5, side) == expected
    assert cut("01234", TOKENIZER, 5, side) == "01234"
    assert cut("0123456789", TOKENIZER, 1, side).replace("...", "") in ("0", "9")


def test_text_in_a_later_row_is_refused() -> None:
    config = configured(f"rollout.environment={FILE}:Echo")

    def data(*prompts: str) -> PromptData:
        return PromptData(data_set_of({"prompt": list(prompts)}, config.data), config.data, TOKENIZER)

    check_turns(config, data(*[json.dumps(USER)] * 3), TOKENIZER)
    with pytest.raises(DataError, match=r"row 2 of the training data.*conversations need prompts that are lists"):
        check_turns(config, data(json.dumps(USER), json.dumps(USER), "12+34="), TOKENIZER)
