"""Handshake with a server: its format, model and limits, and a probe that verifies its log-probabilities.

The probe is a fixed sequence. Its scores show whether the server returns as many log-probabilities as the run needs,
and whether they are log-probabilities of the model. They are the reference with which a server is compared that was
restarted, or that joins later.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from teacher.client.http.scoring_api import ScoringApi
from teacher.client.http.servers import Server, Servers
from teacher.client.http.sglang_api import SglangApi
from teacher.client.http.vllm_api import CompletionsApi, GenerateApi
from teacher.common.probe import MAX_PROBE_DIFFERENCE, probe_difference, probe_sequence
from teacher.errors import TeacherChanged, TeacherRequestError, TeacherSetupError
from teacher.records import ScoredSequence

_MASS_TOLERANCE = 1e-3


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True)
class ServerModel:
    """Model of a server, and the format of its requests.

    Attributes:
        name: Name of the model in requests.
        max_model_len: Longest sequence that can be scored. One token less than the server's limit, because a request
            generates a token.
        api: Format of requests.
        engine: Kind of the server, for display.
    """

    name: str
    max_model_len: int
    api: ScoringApi
    engine: str


async def read_model(servers: Servers, server: Server, name: str | None) -> ServerModel:
    """Return the model of a server, whose API is not verified yet.

    Args:
        name: Name of the model. None: the only one that is no adapter.

    Raises:
        TeacherSetupError: The server has no list of models, or the name is missing or unknown.
    """
    url = server.endpoint.url
    content = await servers.get(server, "/v1/models")
    try:
        models = None if content is None else msgspec.json.decode(content, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        models = None
    if not models:
        raise TeacherSetupError(
            f"{url}/v1/models is no list of models", address=url, remedy="set url to a vLLM or SGLang server"
        )
    candidates = [model for model in models if (model.parent is None if name is None else model.id == name)]
    if len(candidates) != 1:
        listed = ", ".join(model.id for model in models)
        found = "several models" if name is None else f"no model {name}"
        raise TeacherSetupError(
            f"{url} has {found}: {listed}", address=url, remedy="set served_model_name to one of them"
        )
    [model] = candidates
    if model.max_model_len is None:
        raise TeacherSetupError(
            f"{url}/v1/models has no max_model_len for {model.id}",
            address=url,
            remedy="use the URL of the vLLM or SGLang server instead of a gateway",
        )
    is_sglang = model.owned_by == "sglang"
    api: ScoringApi = SglangApi() if is_sglang else CompletionsApi()
    return ServerModel(model.id, model.max_model_len - 1, api, model.owned_by or "vllm")


async def probe(
    servers: Servers, server: Server, model: ServerModel, n_tokens: int, top_k: int
) -> tuple[ServerModel, ScoredSequence]:
    """Score the probe, with the other endpoint of vLLM if the first does not exist.

    Args:
        n_tokens: Number of ids of the tokenizer.

    Returns:
        The model with the format that the server has, and the scores.

    Raises:
        TeacherSetupError: The server does not return ``top_k`` log-probabilities, or they are no log-probabilities.
    """
    apis: list[ScoringApi] = [model.api]
    if isinstance(model.api, CompletionsApi):
        apis.append(GenerateApi())
    sequence = probe_sequence(n_tokens, model.max_model_len)
    for api in apis:
        try:
            content = await servers.post(server, api.path, api.body(sequence, top_k, model.name))
        except TeacherRequestError as error:
            raise _refused(error, server, api, top_k) from None
        if content is not None:
            scored = api.scores(content, sequence, top_k)
            _check_mass(scored, server)
            return ServerModel(model.name, model.max_model_len, api, model.engine), scored
    raise TeacherSetupError(
        f"{server.endpoint.url} has none of {', '.join(api.path for api in apis)}",
        address=server.endpoint.url,
        remedy="set url to a vLLM or SGLang server",
    )


def check_same(reference_T: np.ndarray, found_T: np.ndarray, server: Server) -> None:
    """Compare the probe of a server with the reference.

    Args:
        reference_T: Log-probabilities of the tokens of the probe by the teacher at the start.
        found_T: Log-probabilities by the server.

    Raises:
        TeacherChanged: The server has another model.
    """
    difference = probe_difference(reference_T, found_T)
    if not difference <= MAX_PROBE_DIFFERENCE:
        raise TeacherChanged(
            f"{server.endpoint.url} has another model than the teacher at the start: log-probabilities of a fixed "
            f"sequence differ by up to {difference:.3g}, expected at most {MAX_PROBE_DIFFERENCE:g}",
            address=server.endpoint.url,
            remedy="serve the same model at all URLs during a run",
        )


def _refused(error: TeacherRequestError, server: Server, api: ScoringApi, top_k: int) -> TeacherSetupError:
    limit = f"start it with {api.limit_flag} {top_k}, or lower top_k" if api.limit_flag else "lower top_k"
    return TeacherSetupError(
        f"{server.endpoint.url} refused a request of {top_k} log-probabilities per position: {error.what}",
        address=server.endpoint.url,
        options=("top_k",),
        remedy=limit,
    )


def _check_mass(scored: ScoredSequence, server: Server) -> None:
    """Check that each row is a part of a distribution. Logits are not."""
    mass_T = np.exp(scored.topk_logps_TK.astype(np.float64)).sum(axis=1)
    largest = float(np.max(mass_T, initial=0.0))
    if not largest <= 1 + _MASS_TOLERANCE or (scored.topk_logps_TK.shape[1] and largest <= 0):
        raise TeacherSetupError(
            f"{server.endpoint.url} returns values that are no log-probabilities: the probabilities of a position add "
            f"up to {largest:.4g}, expected at most 1",
            address=server.endpoint.url,
            remedy="start it with --logprobs-mode raw_logprobs, vLLM's default",
        )
