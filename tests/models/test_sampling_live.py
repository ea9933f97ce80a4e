"""Sampling options sent over the control socket take effect: a real engine with a tiny model."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.execution.runner import ModelRunner
from stepscope.engine.protocol.commands import Abort, ChatMessage, Pause, Resume, StepOnce, Submit
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.replies import Output, PositionLogprobs, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.kv_cache import KVCacheManager
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.scheduler import Scheduler
from stepscope.engine.text.text_stream import StopText
from stepscope.engine.transport.endpoints import Endpoint
from tests.support.engines.live_engine import running_engine
from tests.support.engines.tiny_runner import load_tiny, run_scheduled

LIMITS = Limits(max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=256)
NUM_BLOCKS = 64
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("qwen3")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_tiny(folder, kv_memory="2MB", seq_capacity=LIMITS.max_num_seqs)


@pytest.fixture(scope="module")
def endpoint(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """The endpoint of an engine on a thread of the test's process."""
    served = {"runner": runner, "limits": LIMITS, "num_blocks": NUM_BLOCKS}
    told = {"tokenizer": runner.tokenizer, "eos_token_ids": runner.eos_token_ids}
    with running_engine(tmp_path_factory.mktemp("live"), **served, **told) as engine:
        yield engine.endpoint


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[ControlClient]:
    with ControlClient(endpoint, timeout_s=10.0) as client:
        yield client


def answered(client: ControlClient, submit: Submit) -> list[Output]:
    """All outputs of one request."""
    wanted = client.send(submit)
    received: list[Output] = []
    while not received or received[-1].finish_reason is None:
        command_id, message = client.receive(10.0) or (wanted, None)
        if command_id == wanted and not isinstance(message, Submitted):
            assert isinstance(message, Output), f"{message} after {received}"
            received.append(message)
    return received


def asked(stream: bool = True, with_text: bool = True, **sampling: object) -> Submit:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Submit(prompt=PROMPT, sampling=params, stream=stream, with_text=with_text)


def text_of(outputs: list[Output]) -> str:
    assert all(output.text is not None for output in outputs)
    return "".join(output.text or "" for output in outputs)


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_a_conversation_gets_the_same_answer_as_its_rendered_prompt(client: ControlClient) -> None:
    turns = [ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="Ho")]
    rendered = [258, *b"user\nHi", 259, *b"\n", 258, *b"assistant\nHo", 259, *b"\n"]
    rendered += [258, *b"assistant\n"]
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    by_messages = answered(client, Submit(messages=turns, sampling=sampling))
    by_ids = answered(client, Submit(prompt_token_ids=rendered, sampling=sampling))
    assert by_messages[-1].num_prompt_tokens == len(rendered)
    assert tokens_of(by_messages) == tokens_of(by_ids)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "at_once"])
@pytest.mark.parametrize("include_stop", [False, True], ids=["before", "after"])
def test_a_stop_string_ends_the_text_and_the_request(
    client: ControlClient, stream: bool, include_stop: bool
) -> None:
    unstopped = answered(client, asked())
    text = text_of(unstopped)
    stop = text[20:24]
    at = text.index(stop)
    stopped = answered(client, asked(stream, stop=(stop, "never"), include_stop=include_stop))
    last = stopped[-1]
    assert text_of(stopped) == text[: at + len(stop) if include_stop else at]
    assert (last.finish_reason, last.stop) == ("stop", stop)
    tokens = tokens_of(stopped)
    assert last.num_output_tokens == len(tokens)
    assert tokens == tokens_of(unstopped)[: len(tokens)]
    # Every token but the last was needed.
    assert stop in bytes(tokens).decode(errors="replace")
    assert stop not in bytes(tokens[:-1]).decode(errors="ignore")
    assert client.snapshot().kv.used == 0


def test_an_aborted_request_sends_the_text_held_back_for_a_stop_string(
    client: ControlClient,
) -> None:
    text = text_of(answered(client, asked(max_tokens=30)))
    client.ask(Pause())
    submitted = client.ask(asked(max_tokens=60, stop=(text[:25] + "\x00\x01",)))
    client.ask(StepOnce(n=6))
    outputs: list[Output] = []
    while len(outputs) < 6:
        _, message = client.receive(10.0)
        if isinstance(message, Output):
            outputs.append(message)
    assert text_of(outputs) == ""
    client.ask(Abort(request_id=submitted.request_id))
    _, last = client.receive(10.0)
    client.ask(Resume())
    assert last.finish_reason == "abort"
    assert last.text == bytes(tokens_of(outputs)).decode(errors="replace")


@pytest.mark.parametrize("stops", [(), ("never",)], ids=["text_by_control", "text_by_engine"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_ends_a_request_and_is_named(
    client: ControlClient, include_stop: bool, stops: tuple[str, ...]
) -> None:
    tokens = tokens_of(answered(client, asked()))
    ending = tokens[12]
    at = tokens.index(ending)
    outputs = answered(
        client, asked(stop_token_ids=(ending,), include_stop=include_stop, stop=stops)
    )
    assert tokens_of(outputs) == tokens[: at + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop) == ("stop", ending)
    spelled = tokens[: at + 1] if include_stop else tokens[:at]
    assert text_of(outputs) == bytes(spelled).decode(errors="replace")


def test_stop_strings_work_for_clients_that_want_no_text(client: ControlClient) -> None:
    text = text_of(answered(client, asked()))
    outputs = answered(client, asked(with_text=False, stop=(text[20:24],), logprobs=1))
    assert outputs[-1].stop == text[20:24]
    assert {output.text for output in outputs} == {None}
    named = [each.chosen.text for output in outputs for each in output.logprobs or []]
    assert set(named) == {""}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "at_once"])
def test_logprobs_sent_to_a_client_are_those_of_the_model(
    client: ControlClient, folder: Path, stream: bool
) -> None:
    outputs = answered(
        client, asked(stream, logprobs=4, temperature=0.8, seed=3, presence_penalty=1.0)
    )
    tokens = tokens_of(outputs)
    found: list[PositionLogprobs] = []
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids)
        found += output.logprobs
    prompt = list(PROMPT.encode())
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    best = expected.topk(4)
    for i, (token, position) in enumerate(zip(tokens, found, strict=True)):
        assert position.chosen.token_id == token
        assert position.chosen.logprob == pytest.approx(float(expected[i, token]), abs=1e-3)
        assert position.rank == 1 + int((expected[i] > expected[i, token]).sum())
        assert [top.token_id for top in position.top] == best.indices[i].tolist()
        assert [t.logprob for t in position.top] == pytest.approx(best.values[i].tolist(), abs=1e-3)
        for each in (position.chosen, *position.top):
            if each.token_id < 128:
                assert each.text == chr(each.token_id)


def test_messages_that_the_chat_template_rejects_are_refused(client: ControlClient) -> None:
    with pytest.raises(CommandRefused) as refused:
        client.ask(Submit(messages=[]))
    assert refused.value.code == "bad_messages"


# A seed


def run_all(
    runner: ModelRunner, requests: list[Request], num_blocks: int, budget: int
) -> list[list[int]]:
    """Run the real scheduler with the runner until all requests have ended."""
    knobs = Knobs(
        max_num_batched_tokens=budget, max_num_seqs=16, reserve="none", enable_prefix_caching=False
    )
    scheduler = Scheduler(KVCacheManager(num_blocks, 16), knobs, LIMITS)
    run_scheduled(runner, scheduler, requests)
    return [request.output_token_ids for request in requests]


def requests_of(kinds: list[dict[str, object]]) -> list[Request]:
    rng = random.Random(4)
    return [
        Request(
            i,
            [rng.randrange(256) for _ in range(60 + 7 * i)],
            SamplingParams(max_tokens=50, ignore_eos=True, **kind),  # type: ignore[arg-type]
            arrival_ns=0,
        )
        for i, kind in enumerate(kinds)
    ]


KINDS: list[dict[str, object]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 4, "min_p": 0.05, "logprobs": 2, "presence_penalty": 1.0},
    {"repetition_penalty": 1.3},
    {},
]


@settings(max_examples=6)
@given(
    chosen=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=6),
    budget=st.sampled_from([16, 50, 1024]),
    num_blocks=st.sampled_from([16, 18, NUM_BLOCKS]),
)
def test_a_seed_gives_the_same_text_in_any_batch_and_after_preemptions(
    runner: ModelRunner,
    alone: dict[tuple[int, int], list[int]],
    chosen: list[int],
    budget: int,
    num_blocks: int,
) -> None:
    requests = requests_of([KINDS[kind] for kind in chosen])
    texts = run_all(runner, requests, num_blocks, budget)
    for i, (kind, text) in enumerate(zip(chosen, texts, strict=True)):
        if (i, kind) not in alone:
            alone_request = requests_of([KINDS[kind]] * (i + 1))[i]
            alone[i, kind] = run_all(runner, [alone_request], NUM_BLOCKS, 1024)[0]
        assert text == alone[i, kind], f"request {i}, {KINDS[kind]}"


@pytest.fixture(scope="module")
def alone() -> dict[tuple[int, int], list[int]]:
    return {}


def test_the_load_of_the_seed_tests_causes_preemptions(runner: ModelRunner) -> None:
    requests = requests_of(KINDS)
    run_all(runner, requests, 16, 50)
    assert sum(request.num_preemptions for request in requests) > 2


def test_a_preempted_request_ends_at_the_same_stop_string(runner: ModelRunner) -> None:
    kinds = [KINDS[0]] * 4
    texts = run_all(runner, requests_of(kinds), 16, 50)
    requests = requests_of(kinds)
    for request, text in zip(requests, texts, strict=True):
        stop = runner.tokenizer.decode(text[40:43])
        request.stop_text = StopText(runner.tokenizer.text_stream(), (stop,), False)
    stopped = run_all(runner, requests, 16, 50)
    assert sum(request.num_preemptions for request in requests) > 1
    for request, text, tokens in zip(requests, texts, stopped, strict=True):
        assert tokens == text[: len(tokens)]
        assert request.finish_reason == "stop"
        whole = runner.tokenizer.decode(text)
        assert request.stop_text.take() == whole[: whole.index(str(request.stop))]
