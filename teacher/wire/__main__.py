"""Print the table of messages of ``docs/teacher_service.md``: ``python -m teacher.wire``."""

from __future__ import annotations

from teacher.wire.messages import MESSAGES, Message


def _row(message: type[Message]) -> str:
    meaning = (message.__doc__ or "").partition("\n")[0].replace("``", "`")
    fields = [f"`{name}`: {wire_type}" for name, wire_type in message.wire_types().items() if name != "request_id"]
    return f"| `{message.__name__}` | `{message.kind}` | {message.route} | {meaning} | {'; '.join(fields)} |"


if __name__ == "__main__":
    print("| message | kind | route | meaning | fields |\n|---|---|---|---|---|")
    print("\n".join(map(_row, MESSAGES.values())))
