"""Files with one JSON object per line, whose texts are any output of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON allows in strings, but that readers take for line ends and terminals for commands."""


def json_line(record: Mapping[str, Any]) -> str:
    """Return an object as one line of JSON, with its line end.

    Texts are read back unchanged, except for halves of surrogate pairs, which UTF-8 cannot encode: each becomes U+FFFD,
    as in data that is read. Characters that could end the line or control a terminal are escaped. Values that JSON does
    not have become texts.
    """
    line = _SURROGATE.sub("\ufffd", json.dumps(record, ensure_ascii=False, default=str))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) + "\n"
