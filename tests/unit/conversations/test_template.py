"""Tokens between turns, and checks of chat templates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe_gkd.conversations.template import TurnTemplate, cut, describes
from recipe_gkd.data.tokenization import ChatTemplate, tokenize_prompt
from recipe_gkd.errors import ConfigError, DataError
from tests._support.conversations import TOKENIZER, text_of
from tests._support.errors import raises

USER = [{"role": "user", "content": "12+34="}]
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
CHATML = (
    "{% if tools %}tools{% endif %}{% for m in messages %}<|user|>{{ m.role }}={{ m.content }}"
    "{% for c in m.tool_calls or [] %}+{{ c.function.arguments.x }}{% endfor %}<|end|>0{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPS_REASONING = CHATML.replace(
    "{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1].strip() }}"
)
COUNTS = CHATML.replace("{{ m.role }}", "{{ messages | length }}")
REFUSES_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}0"
)


def with_template(template: str) -> TurnTemplate:
    class Tokenizer:
        chat_template = template

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZER, name)

        def __call__(self, *args: Any, **named: Any) -> Any:
            return TOKENIZER(*args, **named)

        def apply_chat_template(self, *args: Any, **named: Any) -> Any:
            return TOKENIZER.apply_chat_template(*args, chat_template=template, **named)

    tokenizer: Any = Tokenizer()
    return TurnTemplate(tokenizer, ChatTemplate())


def assistant(content: str, *calls: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        found["tool_calls"] = [{"id": "1", "function": {"name": "f", "arguments": {"x": call}}} for call in calls]
    return found


END = TOKENIZER.eos_token_id


class TestBetween:
    def test_tokens_are_those_of_the_template(self) -> None:
        """Prompt, turn and new tokens are together what the template writes for the whole conversation."""
        turns = TurnTemplate(TOKENIZER, ChatTemplate())
        call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        results = [{"role": "tool", "content": "46"}, {"role": "tool", "content": "7"}]
        sampled = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call><|end|>'
        ids = turns.between(USER, turn, results, tools=TOOLS, end_id=END, where="row 0")
        prompt = tokenize_prompt(USER, TOKENIZER, "row 0", tools=TOOLS)
        whole = np.concatenate([prompt, TOKENIZER(sampled)["input_ids"], ids])
        expected = tokenize_prompt([*USER, turn, *results], TOKENIZER, "row 0", tools=TOOLS)
        assert whole.tolist() == expected.tolist() and ids.dtype == np.int32

    def test_what_closes_a_turn_behind_its_last_token_is_added(self) -> None:
        ids = with_template(CHATML).between(USER, assistant("1", 5), USER, tools=None, end_id=END, where="")
        assert text_of(ids).startswith("0<|user|>") and text_of(ids).endswith("<|end|>0<|assistant|>")

    def test_other_last_token_is_followed_by_the_end_of_the_template(self) -> None:
        other = TOKENIZER.convert_tokens_to_ids("<|pad|>")
        ids = with_template(CHATML).between(USER, assistant("1"), USER, tools=None, end_id=other, where="")
        assert text_of(ids).startswith("<|end|>0<|user|>")

    def test_template_that_changes_earlier_turns_is_refused(self) -> None:
        with pytest.raises(DataError, match="differently"):
            with_template(COUNTS).between(USER, assistant("1"), USER, tools=None, end_id=END, where="row 0")


class TestCheck:
    @pytest.mark.parametrize("roles", [["user"], ["tool"], ["user", "tool"]])
    def test_template_that_appends_is_accepted(self, roles: list[str]) -> None:
        with_template(CHATML).check(USER, TOOLS, "row 0", roles=roles, keeps=False)

    def test_template_that_removes_reasoning_is_refused_unless_kept(self) -> None:
        with raises(ConfigError, keys=("rollout.history",)):
            with_template(STRIPS_REASONING).check(USER, None, "row 0", roles=["user"], keeps=False)
        with_template(STRIPS_REASONING).check(USER, None, "row 0", roles=["user"], keeps=True)

    def test_template_that_changes_every_turn_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="writes an assistant message differently"):
            with_template(COUNTS).check(USER, None, "row 0", roles=["user"], keeps=True)

    def test_template_without_the_role_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"refuses a message of the role 'tool'.*no tools"):
            with_template(REFUSES_TOOLS).check(USER, None, "row 0", roles=["tool"], keeps=False)

    def test_text_prompt_is_refused(self) -> None:
        with pytest.raises(DataError, match="lists of messages"):
            with_template(CHATML).check("12+34=", None, "row 0", roles=["user"], keeps=False)

    def test_describes_tools(self) -> None:
        assert describes(USER, with_template(CHATML), TOOLS, "row 0")
        assert not describes(USER, with_template(REFUSES_TOOLS), TOOLS, "row 0")


@pytest.mark.parametrize(("side", "expected"), [("left", "...56789"), ("right", "01234..."), ("middle", "01...789")])
def test_long_message_is_cut(side: str, expected: str) -> None:
    assert cut("0123456789", TOKENIZER, 5, side) == expected
    assert cut("01234", TOKENIZER, 5, side) == "01234"
    assert cut("0123456789", TOKENIZER, 1, side).replace("...", "") in ("0", "9")
