"""Files with one JSON object per line."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from recipe_gkd.data.values import replace_surrogates
from recipe_gkd.runtime.json_lines import json_line

ANY_TEXT = st.text(st.characters(exclude_categories=()))


class TestJsonLine:
    @given(st.dictionaries(ANY_TEXT, ANY_TEXT))
    def test_texts_survive_on_one_line(self, record: dict[str, str]) -> None:
        line = json_line(record)
        assert line.endswith("\n") and len(line.splitlines()) == 1
        assert json.loads(line.encode()) == replace_surrogates(record)

    def test_line_controls_no_terminal(self) -> None:
        assert json_line({"a": "\x1b\x9b\u202e\u2028你"}) == '{"a": "\\u001b\\u009b\\u202e\\u2028你"}\n'
