"""Names that ``teacher`` exports. ``teacher`` imports this module when one of them is first used."""

from teacher.client import TeacherClient
from teacher.client.async_client import AsyncTeacherClient
from teacher.common.fingerprint import tokenizer_fingerprint
from teacher.errors import (
    TeacherChanged,
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
    TeacherUnavailable,
)
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.limits import LIMITS, PROTOCOL_VERSION, WireDtype
from teacher.wire.request_checks import check_sequences, check_temperature

__all__ = [
    "LIMITS",
    "PROTOCOL_VERSION",
    "AsyncTeacherClient",
    "ScoredSequence",
    "ServiceStatus",
    "TeacherChanged",
    "TeacherClient",
    "TeacherError",
    "TeacherInfo",
    "TeacherProtocolError",
    "TeacherRequestError",
    "TeacherSequence",
    "TeacherTimeout",
    "TeacherUnavailable",
    "WireDtype",
    "check_sequences",
    "check_temperature",
    "tokenizer_fingerprint",
]
