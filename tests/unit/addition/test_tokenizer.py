from __future__ import annotations

import jinja2
import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer


def test_chat_template_unknown_role_is_named() -> None:
    with pytest.raises(jinja2.TemplateError, match="expected the role user or assistant, got system"):
        build_tokenizer().apply_chat_template([{"role": "system", "content": "1+1="}], tokenize=False)
