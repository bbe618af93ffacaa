"""The trainer's side of the service.

`client` is for callers, `exchange` the thread that speaks, `inflight` what is sent when, `pieces` cuts and joins.
"""

from teacher.client.async_client import AsyncTeacherClient
from teacher.client.client import TeacherClient

__all__ = ["AsyncTeacherClient", "TeacherClient"]
