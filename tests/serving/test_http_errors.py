"""Every faulty request is answered with an OpenAI error object that says what is wrong."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.http.app import Api, build_app
from stepscope.engine.http.exposition import Exposition
from stepscope.engine.http.metrics_reducer import EngineMetrics
from stepscope.engine.http.requests import NEUTRAL_VALUES, ChatRequest, CompletionRequest
from stepscope.engine.http.settings import HttpSettings
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.replies import Error
from tests.support.engines.simulated_run import simulated_info


@pytest.fixture(scope="module")
def client(served_model: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served_model.url, timeout=60) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which must be complete and contain no traceback."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [b"", b"nonsense", b"\xff\xfe", b'{"prompt": "x"', b'{"a": NaN}', b'{"a": ' + b"[" * 100_000],
    ids=["empty", "nonsense", "no text", "half", "NaN", "deep"],
)
def test_a_body_that_is_no_json_is_refused(client: httpx.Client, body: bytes) -> None:
    assert error_of(client.post("/v1/completions", content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ("[]", None),
        ("{}", "prompt"),
        ('{"prompt": {"a": 1}}', "prompt"),
        ('{"prompt": [[1], 2]}', "prompt"),
        ('{"prompt": []}', "prompt"),
        ('{"prompt": [-1]}', "prompt[0]"),
        ('{"prompt": [99999999999999999999]}', "prompt[0]"),
        ('{"prompt": "\\ud800"}', None),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens"),
        ('{"prompt": "x", "temperature": -0.1}', "temperature"),
        ('{"prompt": "x", "temperature": 1e400}', "temperature"),
        ('{"prompt": "x", "top_p": 1.1}', "top_p"),
        ('{"prompt": "x", "n": 129}', "n"),
        ('{"prompt": ["x","x","x","x","x","x","x","x","x"], "n": 128}', "n"),
        ('{"prompt": "x", "logprobs": 21}', "logprobs"),
        ('{"prompt": "x", "logprobs": true}', "logprobs"),
        ('{"prompt": "x", "seed": 1e30}', "seed"),
        ('{"prompt": "x", "stop": [""]}', "stop[0]"),
        ('{"prompt": "x", "stop": 5}', "stop"),
        ('{"prompt": "x", "stop_token_ids": [1000000]}', "stop_token_ids"),
        ('{"prompt": "x", "min_tokens": 20}', "min_tokens"),
        ('{"prompt": "x", "stream": "yes"}', "stream"),
        ('{"prompt": "x", "stream_options": {"include_usage": true}}', "stream_options"),
        ('{"prompt": "x", "frobnicate": 1}', "frobnicate"),
        ('{"prompt": "x", "echo": true}', "echo"),
        ('{"prompt": "x", "logit_bias": {"5": 1}}', "logit_bias"),
        ('{"prompt": ""}', None),
        ('{"prompt": [1000000]}', None),
    ],
)
def test_an_invalid_completion_is_refused_naming_the_field(
    client: httpx.Client, fields: str, param: str | None
) -> None:
    error = error_of(client.post("/v1/completions", content=fields.encode()), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages[0].name"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_an_invalid_chat_is_refused_naming_the_field(
    client: httpx.Client, changes: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **changes}
    error = error_of(client.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == param, error


def test_every_sampling_field_is_accepted_and_null_means_its_default(client: httpx.Client) -> None:
    fields = json.loads(
        '{"temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.05, "repetition_penalty": 1.1, '
        '"presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3, "stop": ["never seen"], '
        '"stop_token_ids": [1], "ignore_eos": true, "min_tokens": 1, "priority": -1, "n": 2, '
        '"include_stop_str_in_output": false, "logprobs": 0, "user": "somebody"}'
    )
    asked = {"prompt": "abc", "max_tokens": 3}
    assert client.post("/v1/completions", json={**asked, **fields}).status_code == 200
    nulls = dict.fromkeys([*fields, "stream", "stream_options", "model", "max_tokens"])
    done = client.post("/v1/completions", json={**asked, **nulls, "ignore_eos": True})
    assert done.status_code == 200
    assert done.json()["usage"]["completion_tokens"] == 16  # OpenAI's default


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/reset_prefix_cache", 405),
    ],
)
def test_unknown_paths_and_methods_get_an_error_object_too(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    error_of(client.request(method, path), status)


def test_a_body_of_10_mb_is_refused_and_the_server_keeps_serving(client: httpx.Client) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    for content in (body, chunks()):
        refused = client.post("/v1/completions", content=content)
        assert error_of(refused, 413)["code"] == "request_too_large"
    assert client.get("/health").status_code == 200


def test_the_request_id_given_by_a_client_is_used_if_valid(client: httpx.Client) -> None:
    asked = {"prompt": "x", "max_tokens": 1}
    done = client.post("/v1/completions", json=asked, headers={"x-request-id": "run-7/42"})
    assert done.headers["x-request-id"] == "run-7/42"
    assert done.json()["id"] == "cmpl-run-7/42"
    strange = client.post("/v1/completions", json=asked, headers={"x-request-id": "x" * 200})
    assert len(strange.headers["x-request-id"]) == 32
    assert client.get("/nothing", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"


def test_with_an_api_key_only_requests_that_send_it_are_served(
    live_engine: Any, http_server: Callable[..., Any]
) -> None:
    server = http_server(
        "serve", "--http-for", live_engine.endpoint.control, STEPSCOPE_HTTP_API_KEY="sesam-ö"
    )
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for given in ("", "Bearer wrong", "Basic sesam-ö", "sesam-ö", "Bearer"):
            headers = {"authorization": given.encode()} if given else {}
            for path in ("/v1/models", "/v1/nothing"):
                error = error_of(client.get(path, headers=headers), 401)
                assert error["code"] == "invalid_api_key"
            error_of(client.post("/reset_prefix_cache", headers=headers), 401)
        right = {"authorization": "Bearer sesam-ö".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.post("/reset_prefix_cache", headers=right).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200


def test_an_engine_without_a_chat_template_says_so(served: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    refused = httpx.post(f"{served.url}/v1/chat/completions", content=json.dumps(body))
    assert error_of(refused, 400)["param"] == "messages"


class StubEngine:
    """An engine that refuses every prompt, or raises an unexpected error."""

    def __init__(self, bug: Exception | None = None) -> None:
        self._bug = bug
        limits = Limits(max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=1024)
        self.info = simulated_info(limits, 256, 16, seed=0)

    def send(self, command: object, receive: Any) -> int:
        if self._bug is not None:
            raise self._bug
        refusal = Error(code="bad_prompt", message="prompt: not today")
        asyncio.get_running_loop().call_soon(receive, 1, refusal)
        return 1

    def forget(self, command_id: int) -> None:
        return


def stub_client(engine: StubEngine) -> httpx.AsyncClient:
    api = Api(HttpSettings(), engine, Exposition(EngineMetrics(), ""))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(build_app(api))  # errors of the application are raised here
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_an_unexpected_error_is_a_500_without_a_traceback_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stub_client(StubEngine(RuntimeError("secret detail"))) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert error_of(answer, 500)["code"] == "internal_error"
        assert "secret" not in answer.text
    assert "secret detail" in caplog.text
    assert sum("POST /v1/completions failed" in each.message for each in caplog.records) == 1


async def test_a_web_page_cannot_use_the_server_by_dns_rebinding() -> None:
    body = {"prompt": "x"}
    async with stub_client(StubEngine()) as client:
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::1", "[x]"):
            answer = await client.post("/v1/completions", json=body, headers={"host": host})
            assert error_of(answer, 403)["code"] == "wrong_host"
        for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
            answer = await client.post("/v1/completions", json=body, headers={"host": host})
            assert error_of(answer, 400)["code"] == "bad_prompt"


async def test_a_web_page_of_another_origin_cannot_use_the_server() -> None:
    async with stub_client(StubEngine()) as client:
        headers = {"origin": "https://example.org"}
        for path in ("/v1/completions", "/reset_prefix_cache"):
            answer = await client.post(path, json={"prompt": "x"}, headers=headers)
            assert error_of(answer, 403)["code"] == "cross_origin"
        own = await client.post(
            "/v1/completions", json={"prompt": "x"}, headers={"origin": "http://localhost"}
        )
        assert error_of(own, 400)["code"] == "bad_prompt"


NAMES = st.sampled_from(
    [*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, *NEUTRAL_VALUES, "other"]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([0, 1, 2**63, -(2**63), 1e308, "", "x", "user", "text"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES | st.sampled_from(["role", "content", "type", "text"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    body=st.dictionaries(NAMES, VALUES, max_size=6).map(lambda each: json.dumps(each).encode())
    | st.binary(max_size=40),
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
def test_no_request_body_causes_a_server_error(body: bytes, path: str) -> None:
    async def post() -> httpx.Response:
        async with stub_client(StubEngine()) as client:
            return await client.post(path, content=body)

    response = asyncio.run(post())
    assert response.status_code in (400, 404)  # the engine refuses valid requests
    error_of(response, response.status_code)
