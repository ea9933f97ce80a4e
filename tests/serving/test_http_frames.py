"""The bytes of a stream, which `vllm bench serve` and other clients read and measure."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.http.job import Head, Job, chat_job, completion_job
from stepscope.engine.http.requests import ChatRequest, CompletionRequest, decode
from stepscope.engine.http.streaming import Generation, answer
from stepscope.engine.protocol.commands import Abort, Command, Submit
from stepscope.engine.protocol.replies import Output, PositionLogprobs, Submitted, TokenLogprob

GOLDEN = Path(__file__).parents[1] / "clients" / "frames"
HEAD = Head("ID", 1_700_000_000, "tiny", "fp_0")
# The engine's outputs: a token that is half a character adds no text.
TEXTS = ["Hel", "lo ", "", "é\u2028", ' "x"\n\n', ""]


@dataclass
class Measured:
    """The figures that `vllm bench serve` takes from a stream."""

    num_token_events: int = 0
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    is_done: bool = False
    payloads: list[Any] = field(default_factory=list)


def read_as_vllm_bench(network_chunks: Sequence[bytes], kind: str) -> Measured:
    """The rules of its request function (0.32), written anew.

    Each piece from the network is stripped of white space. Events end with an empty line; what is
    left over is an event too if it is `data: ` and whole JSON. Lines that begin with a colon are
    comments. An event with choices is a token, the first one sets TTFT, each later one adds an
    ITL; it reads the text of the first choice. Any other event with `usage` sets the counts.
    """
    measured = Measured()
    buffer = ""
    for chunk in network_chunks:
        buffer += chunk.strip().decode()
        *messages, buffer = buffer.split("\n\n")
        if buffer.startswith("data: "):
            payload = buffer.removeprefix("data: ").strip()
            if payload == "[DONE]" or _is_json(payload):
                messages.append(buffer)
                buffer = ""
        for message in filter(None, (message.strip() for message in messages)):
            if message.startswith(":"):
                continue
            payload = message.removeprefix("data: ")
            assert not measured.is_done, "something comes after [DONE]"
            if payload == "[DONE]":
                measured.is_done = True
                continue
            data = json.loads(payload)
            measured.payloads.append(data)
            if choices := data.get("choices"):
                measured.num_token_events += 1
                first = choices[0]
                text = first.get("text") if kind == "completions" else first["delta"]["content"]
                measured.text += text or ""
            elif usage := data.get("usage"):
                measured.num_output_tokens = usage.get("completion_tokens")
                measured.num_prompt_tokens = usage.get("prompt_tokens")
    assert not buffer, f"half an event is left: {buffer!r}"
    return measured


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class FakeEngine:
    """An engine that answers every Submit with the same outputs at once."""

    def __init__(self, finish_reason: str = "length", with_logprobs: bool = False) -> None:
        self._ids = itertools.count(1)
        self._finish_reason = finish_reason
        self._with_logprobs = with_logprobs
        self.commands: list[Command] = []

    def send(self, command: Command, receive: Any) -> int:
        self.commands.append(command)
        command_id = next(self._ids)
        if isinstance(command, Submit):
            loop = asyncio.get_running_loop()
            loop.call_soon(
                receive, command_id, Submitted(request_id=command_id, num_prompt_tokens=5)
            )
            for output in self._outputs(command_id, command.stream):
                loop.call_soon(receive, command_id, output)
        return command_id

    def forget(self, command_id: int) -> None:
        return

    def _outputs(self, request_id: int, stream: bool) -> list[Output]:
        ends = range(1, len(TEXTS) + 1) if stream else [len(TEXTS)]
        outputs = []
        for begin, end in zip([0, *ends], ends, strict=False):
            texts = TEXTS[begin:end]
            reason = self._finish_reason if end == len(TEXTS) else None
            logprobs = [_position(text) for text in texts] if self._with_logprobs else None
            output = Output(
                request_id=request_id,
                token_ids=list(range(begin, end)),
                text="".join(texts),
                num_prompt_tokens=5,
                num_cached_tokens=2,
                num_output_tokens=end,
                finish_reason=reason,
                logprobs=logprobs,
            )
            outputs.append(output)
        return outputs


def _position(text: str) -> PositionLogprobs:
    chosen = TokenLogprob(1, -0.5, text)
    return PositionLogprobs(chosen, 1, [chosen, TokenLogprob(2, -1.25, "?")])


def make_job(kind: str, **fields: object) -> Job:
    if kind == "completions":
        body = json.dumps({"prompt": "abcde", **fields}).encode()
        return completion_job(decode(body, CompletionRequest), HEAD)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
    return chat_job(decode(body, ChatRequest), HEAD, 512)


async def sent(job: Job, engine: FakeEngine) -> list[bytes]:
    """The response bodies, as sent."""
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    generation = Generation(engine, job.submits)  # type: ignore[arg-type]
    await answer(job, generation, {"type": "http"}, receive, send)
    return bodies


USAGE = {"include_usage": True}
EVERY = {**USAGE, "continuous_usage_stats": True}
# The first word is the kind.
GOLDEN_CASES: dict[str, dict[str, Any]] = {
    "completions": {"stream": True},
    "completions_usage": {"stream": True, "stream_options": USAGE},
    "completions_logprobs": {"stream": True, "logprobs": 2},
    "chat": {"stream": True},
    "chat_usage_in_every_chunk": {"stream": True, "stream_options": EVERY},
    "chat_logprobs_two_choices": {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2},
    "completions_whole": {"logprobs": 2},
    "chat_whole": {"logprobs": True, "top_logprobs": 1},
}


@pytest.mark.parametrize("name", GOLDEN_CASES)
async def test_the_bytes_of_a_response_equal_those_of_the_golden_file(name: str) -> None:
    fields = GOLDEN_CASES[name]
    engine = FakeEngine(with_logprobs="logprobs" in fields)
    found = b"".join(await sent(make_job(name.partition("_")[0], **fields), engine))
    assert found == (GOLDEN / f"{name}.txt").read_bytes()


@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_vllm_bench_counts_every_token_and_reads_text_and_usage(kind: str) -> None:
    job = make_job(kind, stream=True, stream_options={"include_usage": True})
    measured = read_as_vllm_bench(await sent(job, FakeEngine()), kind)
    assert measured.num_token_events == len(TEXTS)
    assert measured.text == "".join(TEXTS)
    assert (measured.num_prompt_tokens, measured.num_output_tokens) == (5, len(TEXTS))
    assert measured.is_done
    assert [bool(data["choices"]) for data in measured.payloads] == [True] * len(TEXTS) + [False]


@given(data=st.data())
def test_vllm_bench_figures_do_not_depend_on_how_the_network_joins_events(
    data: st.DataObject,
) -> None:
    text = (GOLDEN / "completions_usage.txt").read_bytes()
    events = [event + b"\n\n" for event in text.split(b"\n\n") if event]
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, len(events) - 1)))), len(events)]
    joined = [b"".join(events[a:b]) for a, b in itertools.pairwise(edges)]
    measured = read_as_vllm_bench(joined, "completions")
    assert measured.text == "".join(TEXTS)
    assert measured.num_token_events == len(TEXTS)
    assert measured.is_done


async def test_a_request_ended_by_the_engine_gets_an_error_event_after_its_tokens() -> None:
    job = make_job("completions", stream=True)
    text = b"".join(await sent(job, FakeEngine(finish_reason="abort"))).decode()
    *tokens, error, done = [event for event in text.split("\n\n") if event]
    assert len(tokens) == len(TEXTS) - 1
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_aborted"
    assert done == "data: [DONE]"


async def test_a_request_submitted_after_its_client_has_left_is_aborted() -> None:
    engine = FakeEngine()
    generation = Generation(engine, [])  # type: ignore[arg-type]
    generation._indices.update({1: 0, 2: 1})
    generation.receive(1, Submitted(request_id=11, num_prompt_tokens=3))
    generation.abandon()
    left = [Abort(request_id=11, who="http")]
    assert engine.commands == left
    generation.receive(2, Submitted(request_id=12, num_prompt_tokens=3))
    assert engine.commands == [*left, Abort(request_id=12, who="http")]
