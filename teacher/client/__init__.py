"""Client of the teacher service.

`client` and `async_client` are the public interface. `io_thread` owns the socket, `inflight` decides when each request
is sent, `arguments` checks and converts sequences, `chunks` splits a submission into requests and joins their replies.
"""

from teacher.client.async_client import AsyncTeacherClient
from teacher.client.client import MAX_CONNECTIONS, ClientSpec, TeacherClient

__all__ = ["MAX_CONNECTIONS", "AsyncTeacherClient", "ClientSpec", "TeacherClient"]
