"""The control socket answers every message once, and bad input changes nothing."""

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.control.intake import LONG_TEXT, Intake, num_chars
from stepscope.engine.control.server import ControlServer
from stepscope.engine.loop.audit import ControlTally
from stepscope.engine.loop.inbox import Inbox
from stepscope.engine.protocol import commands, replies, wire
from stepscope.engine.protocol.knobs import Limits
from stepscope.engine.protocol.replies import Ack, Output, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.step import ScheduledStep, StepResult
from stepscope.engine.telemetry.kept_snapshots import KeptSnapshots
from stepscope.engine.telemetry.publisher import Publisher
from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from tests.support.engines.simulated_run import simulated_info
from tests.support.sessions.received import every_message
from tests.support.waiting import wait_for


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first * 31 + i) % 4096 for i in range(length)]


def submit(length: int = 20, max_tokens: int = 8, **fields: object) -> commands.Submit:
    return commands.Submit(
        prompt_token_ids=prompt(length),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


NAN = float("nan")
HELLO = commands.ChatMessage(role="user", content="hello")


def sampled(**sampling: object) -> commands.Submit:
    return commands.Submit(prompt_token_ids=prompt(20), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def outputs(client: ControlClient, command_id: int) -> list[Output]:
    """All outputs of one Submit."""
    received: list[Output] = []
    while not received or received[-1].finish_reason is None:
        reply = client.receive(5.0)
        assert reply is not None, f"no more output after {received}"
        if reply[0] == command_id and isinstance(reply[1], Output):
            received.append(reply[1])
    return received


def events_of(client: ControlClient) -> list[wire.RequestEvent]:
    return [each for message in every_message(client) for each in getattr(message, "events", [])]


def test_a_request_sent_during_a_step_arrives_when_sent_not_when_the_step_ends(
    live_engine: Any, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no one would account for the time it waited for a long step."""
    core = live_engine.core
    has_begun, may_go_on = threading.Event(), threading.Event()
    execute = core.runner.execute

    def held(step: ScheduledStep) -> StepResult:
        has_begun.set()
        assert may_go_on.wait(60)
        return execute(step)

    monkeypatch.setattr(core.runner, "execute", held)
    client.send(submit())
    assert has_begun.wait(60)
    second = client.send(submit())
    wait_for(lambda: core.inbox.qsize() == 1, "the second request")
    came_ns = time.monotonic_ns()
    may_go_on.set()
    outputs(client, second)
    arrivals = [event for event in events_of(client) if isinstance(event, wire.Arrived)]
    first_step = next(m for m in every_message(client) if isinstance(m, wire.StepRecord))
    assert len(arrivals) == 2
    assert arrivals[1].time_ns <= came_ns < first_step.tokens_ns


def test_a_knob_change_takes_effect_exactly_at_the_step_in_its_ack(
    live_engine: Any, client: ControlClient
) -> None:
    command_id = client.send(submit(length=900, max_tokens=60))
    client.send(submit(length=900, max_tokens=60))
    wait_for(lambda: live_engine.core.next_step > 5, "five steps")
    ack = client.set_knobs({"max_num_batched_tokens": 16}, who="test", expected_version=0)
    assert ack.version == 1
    outputs(client, command_id)
    messages = every_message(client)
    (change,) = [m for m in messages if isinstance(m, wire.KnobsChanged)]
    assert change.effective_step == ack.effective_step
    old, new = {"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 16}
    assert (change.who, change.old, change.new) == ("test", old, new)
    steps = [m for m in messages if isinstance(m, wire.StepRecord)]
    for step in steps:
        after = step.step >= ack.effective_step
        assert step.token_budget == (16 if after else 2048)
        assert step.knobs_version == (1 if after else 0)
        assert step.num_prefill_tokens + step.num_decode_tokens <= step.token_budget
    assert any(step.step >= ack.effective_step for step in steps)


@pytest.mark.parametrize(
    ("changes", "expected_version", "code"),
    [
        ({"no_such_knob": 1}, None, "unknown_knob"),
        ({"max_num_batched_tokens": 0}, None, "out_of_bounds"),
        ({"max_num_batched_tokens": 1_000_000}, None, "out_of_bounds"),
        ({"max_num_batched_tokens": "many"}, None, "wrong_type"),
        ({"order": "random"}, None, "out_of_bounds"),
        ({"max_num_seqs": 3, "watermark": 2.0}, None, "out_of_bounds"),
        ({"max_num_seqs": 3}, 17, "conflict"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, None, "out_of_bounds"),
    ],
)
def test_a_change_of_several_knobs_is_refused_whole_if_one_value_is_bad(
    client: ControlClient, changes: Any, expected_version: int | None, code: str
) -> None:
    before = client.snapshot()
    with pytest.raises(CommandRefused) as refused:
        client.set_knobs(changes, who="test", expected_version=expected_version)
    assert refused.value.code == code
    after = client.snapshot()
    assert (after.knobs, after.knobs_version) == (before.knobs, before.knobs_version)


def test_a_paused_engine_holds_requests_and_runs_exactly_the_steps_asked_for(
    live_engine: Any, client: ControlClient
) -> None:
    client.ask(commands.Pause())
    command_id = client.send(submit(max_tokens=10))
    assert client.snapshot().state == "paused"
    before = live_engine.core.next_step
    assert isinstance(client.ask(commands.StepOnce(n=3)), Ack)
    wait_for(lambda: live_engine.core.pipeline.steps_allowed == 0, "three steps")
    assert live_engine.core.next_step == before + 3
    snapshot = client.snapshot()
    assert snapshot.state == "paused"
    assert [r.num_output_tokens for r in snapshot.requests] == [3]
    client.ask(commands.Resume())
    assert outputs(client, command_id)[-1].num_output_tokens == 10


def test_an_aborted_request_ends_at_once_and_frees_its_blocks(
    live_engine: Any, client: ControlClient
) -> None:
    command_id = client.send(submit(length=400, max_tokens=500))
    wait_for(lambda: live_engine.core.next_step > 3, "some steps")
    (view,) = client.snapshot().requests
    client.ask(commands.Abort(request_id=view.request_id))
    assert outputs(client, command_id)[-1].finish_reason == "abort"
    snapshot = client.snapshot()
    assert (snapshot.requests, snapshot.kv.used) == ([], 0)
    aborted = [each.request_id for each in events_of(client) if isinstance(each, wire.Aborted)]
    assert aborted == [view.request_id]
    with pytest.raises(CommandRefused) as refused:
        client.ask(commands.Abort(request_id=view.request_id))
    assert refused.value.code == "not_found"


def test_draining_refuses_new_requests_and_finishes_old_ones(client: ControlClient) -> None:
    command_id = client.send(submit(max_tokens=30))
    client.ask(commands.Drain())
    with pytest.raises(CommandRefused) as refused:
        client.ask(submit())
    assert refused.value.code == "draining"
    assert outputs(client, command_id)[-1].finish_reason == "length"
    client.ask(commands.Resume())
    assert isinstance(client.ask(submit()), Submitted)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (commands.Submit(), "bad_prompt"),
        (commands.Submit(prompt="x", prompt_token_ids=[1]), "bad_prompt"),
        (commands.Submit(prompt="x", messages=[HELLO]), "bad_prompt"),
        (commands.Submit(messages=[]), "bad_messages"),
        (commands.Submit(messages=[HELLO]), "no_chat_template"),
        (sampled(stop_token_ids=(4096,)), "bad_sampling"),
        (sampled(min_tokens=9, max_tokens=8), "bad_sampling"),
        (commands.Submit(prompt_token_ids=[]), "bad_prompt"),
        (commands.Submit(prompt_token_ids=[99_999]), "bad_prompt"),
        (submit(length=1024), "prompt_too_long"),
        (submit(length=1000, max_tokens=100), "prompt_too_long"),
    ],
)
def test_an_invalid_prompt_is_refused_and_the_refusal_is_published(
    client: ControlClient, command: Any, code: str
) -> None:
    with pytest.raises(CommandRefused) as refused:
        client.ask(command)
    assert refused.value.code == code
    client.snapshot()
    reasons = [each.reason for each in events_of(client) if isinstance(each, wire.Rejected)]
    assert reasons == [refused.value.message]


def test_a_prompt_that_is_slow_to_tokenise_delays_no_other_prompt(
    client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    prepare = Intake.prepare

    def slow(self: Intake, command: commands.Submit) -> list[int]:
        if num_chars(command) > LONG_TEXT:
            go_on.wait(20)
        return prepare(self, command)

    monkeypatch.setattr(Intake, "prepare", slow)
    refused = client.send(commands.Submit(prompt="x" * (LONG_TEXT + 1)))
    cut = client.send(commands.Submit(prompt="y" * (LONG_TEXT + 1), max_prompt_tokens=20))
    assert outputs(client, client.send(submit()))[-1].finish_reason == "length"
    go_on.set()
    answers = dict(client.receive(5.0) for _ in range(2))
    assert answers[refused].code == "prompt_too_long"
    assert answers[cut].num_prompt_tokens == 20


def test_after_a_prefix_cache_reset_the_same_prompt_gets_no_prefix_hit(
    client: ControlClient,
) -> None:
    assert outputs(client, client.send(submit(length=100)))[-1].num_cached_tokens == 0
    assert outputs(client, client.send(submit(length=100)))[-1].num_cached_tokens == 96
    client.ask(commands.ResetPrefixCache())
    assert outputs(client, client.send(submit(length=100)))[-1].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", -0.1), ("temperature", NAN), ("top_k", -1), ("top_p", 0.0)),
        *(("top_p", NAN), ("min_p", 1.5), ("repetition_penalty", 0.0), ("presence_penalty", 2.5)),
        *(("frequency_penalty", NAN), ("seed", -1), ("max_tokens", 0), ("max_tokens", "many")),
        *(("best_of", 1.0), ("min_tokens", -1), ("stop", [""]), ("stop", ["x"] * 17)),
        *(("stop", "x"), ("stop_token_ids", [-1]), ("logprobs", 21), ("logprobs", True)),
    ],
)
def test_an_impossible_sampling_value_is_refused_naming_its_field(
    field: str, value: object
) -> None:
    body = {"type": "Submit", "prompt_token_ids": [1], "sampling": {field: value}}
    with pytest.raises(msgspec.ValidationError, match=field):
        commands.decode_command(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"short", b"x"],
        [bytes(8)],
        [bytes(8), b""],
        [bytes(8), b"\xc1\xff"],
        [bytes(8), b"\x91" * 3_000],
        [bytes(8), msgspec.msgpack.encode({"type": "Nonsense"})],
        [bytes(8), msgspec.msgpack.encode({"type": "Step", "n": -1})],
        [bytes(8), msgspec.msgpack.encode({"type": "SetKnobs", "changes": {}})],
        [bytes(8), msgspec.msgpack.encode({"type": "Pause"}), b"one frame too many"],
    ],
)
def test_frames_that_are_no_command_are_answered_with_an_error_and_change_nothing(
    live_engine: Any, client: ControlClient, frames: Any
) -> None:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(live_engine.endpoint.control)
    raw.send_multipart(frames)
    assert raw.poll(30_000), "silence"
    assert replies.decode_reply(raw.recv_multipart()[1]).code == "bad_message"
    raw.close()
    assert client.snapshot().state == "idle"
    assert live_engine.core.control_tally.num_bad_messages == 1


class AttachedEngine:
    """An engine that is not ours: it has what `ServedEngine` asks for, and nothing else."""

    def __init__(self) -> None:
        limits = Limits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=256)
        self.inbox = Inbox()
        self.max_waiting = 10
        self.control_tally = ControlTally()
        self.info = simulated_info(limits, 64, 16, seed=0, is_served=True)
        self.next_step = 0
        self.kept_snapshots = KeptSnapshots()

    def clock(self) -> int:
        return time.monotonic_ns()


def test_the_control_server_can_serve_an_attached_engine(tmp_path: Path) -> None:
    engine, publisher = AttachedEngine(), Publisher(None, 64)
    endpoint = Endpoint.parse(f"{tmp_path}/attached")
    with EndpointLock(endpoint):
        control = ControlServer(
            endpoint.control, engine, Intake(None, 4096, 256), None, publisher.replay
        )
        control.start()
        with ControlClient(endpoint) as client:
            assert client.ask(commands.GetInfo()) == engine.info
            client.send(commands.Pause(who="anna"))
            assert engine.inbox.get(timeout=30).command == commands.Pause(who="anna")
        control.close()
        publisher.close()
