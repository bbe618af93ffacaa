"""Client of plain inference servers (vLLM, SGLang) as teachers, over HTTP.

`client` is the public interface. `servers` selects a server for each request and repeats requests that failed,
`handshake` reads a server's model and limits and verifies it with a probe, `vocabulary` compares its tokenizer with a
local one. `vllm_api` and `sglang_api` have the formats of requests and responses.
"""

from teacher.client.http.client import DEFAULT_CONNECTIONS, HttpClientSpec, HttpTeacherClient
from teacher.client.http.servers import VERIFY_TIMEOUT_S, Endpoint

__all__ = ["DEFAULT_CONNECTIONS", "VERIFY_TIMEOUT_S", "Endpoint", "HttpClientSpec", "HttpTeacherClient"]
