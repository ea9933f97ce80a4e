"""A command is done once, by the engine it was meant for, and the audit names its sender."""

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import ANY

import msgspec
import pytest
import zmq

from stepscope.engine.client.client import CommandRefused, ControlClient
from stepscope.engine.control.intake import MAX_ANSWERS, Changes
from stepscope.engine.control.outgoing import RemoteClient
from stepscope.engine.loop import changes
from stepscope.engine.loop.inbox import Inbox
from stepscope.engine.protocol import commands, replies
from stepscope.engine.protocol.commands import (
    Abort,
    Asker,
    Change,
    Command,
    Drain,
    GetAudit,
    GetInfo,
    GetSnapshot,
    Pause,
    ResetPrefixCache,
    Resume,
    SetKnobs,
    SetWorkload,
    StepOnce,
    Submit,
)
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Ack, AnyReply, Error, Submitted
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Audited, Snapshot
from stepscope.engine.transport import rate_limit
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.state.audit_text import change_text
from tests.support.sessions.following import joined
from tests.support.waiting import wait_for


class Raw:
    """A DEALER socket that sends raw frames."""

    def __init__(self, engine: Any) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(engine.endpoint.control)

    def send(self, number: int, command: Command | bytes) -> None:
        payload = command if isinstance(command, bytes) else commands.encode(command)
        self._socket.send_multipart([number.to_bytes(8, "big"), payload])

    def reply(self) -> tuple[int, AnyReply]:
        assert self._socket.poll(30_000), "silence"
        number, payload = self._socket.recv_multipart()
        return int.from_bytes(number, "big"), replies.decode_reply(payload)

    def is_silent(self) -> bool:
        return not self._socket.poll(100)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def raw(live_engine: Any) -> Iterator[Callable[[], Raw]]:
    made: list[Raw] = []

    def make() -> Raw:
        made.append(Raw(live_engine))
        return made[-1]

    yield make
    for each in made:
        each.close()


def trail(client: ControlClient) -> list[Audited]:
    return client.ask(GetAudit()).entries


# Once


@pytest.mark.parametrize("name", ["", "a name of its own"])
def test_a_resent_command_is_done_once_and_answered_each_time(
    client: ControlClient, raw: Callable[[], Raw], name: str
) -> None:
    client.ask(Pause())
    sampling = SamplingParams(max_tokens=9)
    client.ask(Submit(prompt_token_ids=[1] * 9, sampling=sampling, stream=False))
    first, once = raw(), StepOnce(n=1, who="me", once=name)
    # With a name: by another connection and number, perhaps before it was done.
    sent = [(first, 1), (raw(), 5), (first, 2)] if name else [(first, 1)] * 3
    for sender, number in sent:
        sender.send(number, once)
    answers = [sender.reply() for sender, _ in sent]
    assert sorted(number for number, _ in answers) == sorted(number for _, number in sent)
    assert len({msgspec.msgpack.encode(reply) for _, reply in answers}) == 1
    wait_for(lambda: client.snapshot().state == "paused", "the step")
    last = raw() if name else first  # long after
    last.send(1, once)
    assert last.reply()[1] == answers[0][1]
    assert client.snapshot().step == 0
    assert [entry.command for entry in trail(client)] == ["Pause", "StepOnce"]
    assert first.is_silent()


def test_a_change_whose_ack_is_lost_is_resent_and_done_once(
    client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.info()
    monkeypatch.setattr("stepscope.engine.client.client.CHANGE_AGAIN_S", 0.1)
    receive = ControlClient._receive
    lost: list[object] = []

    def lossy(self: ControlClient, timeout_s: float) -> tuple[int, AnyReply] | None:
        received = receive(self, timeout_s)
        if received is not None and len(lost) < 2:
            lost.append(received)
            return None
        return received

    monkeypatch.setattr(ControlClient, "_receive", lossy)
    assert client.ask(SetKnobs(changes={"max_num_seqs": 7}, who="me")).version == 1
    assert len(lost) == 2
    monkeypatch.undo()
    assert [entry.version for entry in trail(client)] == [1]


def test_a_command_for_a_dead_engine_is_refused_by_its_successor(client: ControlClient) -> None:
    with pytest.raises(CommandRefused) as refused:
        client.ask(Pause(engine_id="of the one before"))
    assert refused.value.code == "another_engine"
    assert client.snapshot().state == "idle"


class OneClient:
    """`Connections` without keys."""

    def key(self, identity: bytes) -> bytes:
        return b""

    def asker(self, identity: bytes, who: str) -> Asker:
        return Asker(who)


def test_kept_acks_are_forgotten_oldest_first() -> None:
    inbox = Inbox()
    sent: list[tuple[bytes, bytes, AnyReply]] = []
    changes = Changes(
        inbox,
        OneClient(),  # type: ignore[arg-type]
        lambda identity, command_id, reply: sent.append((identity, command_id, reply)),
    )

    def apply(identity: bytes, command_id: bytes, command: Change, payload: bytes = b"x") -> None:
        client = RemoteClient(lambda _: None, identity, command_id, identity)
        changes.apply(client, command, payload)

    ack, first = Ack(effective_step=3), Pause(once="1")
    apply(b"a", b"1", first)
    apply(b"b", b"2", first)  # not answered yet
    assert sent == []
    changes.answered((b"", b"1"), ack)
    apply(b"a", b"3", first)
    assert sent == [(b"b", b"2", ack), (b"a", b"3", ack)]
    with pytest.raises(ConfigError, match="another command was sent as '1'") as refused:
        apply(b"a", b"4", first, b"y")
    assert refused.value.code == "once_reused"
    for number in range(MAX_ANSWERS):
        apply(b"c", str(number).encode(), Pause())
    assert inbox.qsize() == 1 + MAX_ANSWERS
    apply(b"a", b"5", first)  # long after
    assert inbox.qsize() == 2 + MAX_ANSWERS


# Two operators

SEATS, ORDER = {"max_num_seqs": 8}, {"order": "arrival"}


def test_a_change_with_a_stale_version_is_refused_and_the_conflicting_change_is_named(
    client: ControlClient,
) -> None:
    client.set_knobs({"max_num_seqs": 8}, who="anna", expected_version=0)
    with pytest.raises(CommandRefused) as refused:
        client.set_knobs({"max_num_seqs": 16}, who="bert", expected_version=0)
    assert refused.value.code == "conflict"
    assert "anna: max_num_seqs 64→8 at step 0" in str(refused.value)
    assert client.snapshot().knobs["max_num_seqs"] == 8
    entry = trail(client)[-1]
    assert (entry.who, entry.code, entry.effective_step) == ("bert", "conflict", None)


@pytest.mark.parametrize(
    ("theirs", "mine", "is_conflict"),
    [
        (Pause(who="anna"), Resume(who="bert", seen=0), True),
        (Pause(who="anna"), StepOnce(who="bert", seen=0), True),
        (Resume(who="anna"), Pause(who="bert", seen=0), False),  # it ran: nothing was changed
        (Drain(who="anna"), Pause(who="bert", seen=0), True),
        (SetWorkload(who="anna"), SetWorkload(who="bert", seen=0), True),
        (SetKnobs(changes=SEATS, who="anna"), SetKnobs(changes=ORDER, who="bert", seen=0), True),
        (Pause(who="anna"), Resume(who="bert", seen=1), False),  # has seen it
        (Pause(who="anna"), Resume(who="bert"), False),  # does not care
        (Pause(who="bert"), Resume(who="bert", seen=0), False),  # it was the same one
        (Pause(who="anna"), ResetPrefixCache(who="bert", seen=0), False),  # of another kind
    ],
)
def test_an_unseen_change_of_the_same_kind_by_another_client_is_a_conflict(
    client: ControlClient, theirs: Command, mine: Command, is_conflict: bool
) -> None:
    client.ask(theirs)
    before = client.snapshot()
    if is_conflict:
        said = "another client made a change first \\(anna"
        with pytest.raises(CommandRefused, match=said) as refused:
            client.ask(mine)
        assert refused.value.code == "conflict"
        after = client.snapshot()
        assert (after.state, after.knobs) == (before.state, before.knobs)
    else:
        assert isinstance(client.ask(mine), Ack)


# The audit trail


@pytest.mark.parametrize(
    "command", [each for each in get_args(commands.AnyCommand) if issubclass(each, Change)]
)
def test_every_audited_change_has_a_text_whether_done_or_refused(command: type[Command]) -> None:
    name = command.__name__
    done = Audited(number=1, command=name, who="anna", time_ns=2, effective_step=3)
    refused = Audited(number=1, command=name, who="anna", time_ns=2, code="viewer", detail="no")
    for text in (change_text(done), change_text(refused)):
        assert name not in text
        assert text[0].islower()
    assert change_text(refused).endswith(" refused: no")


def test_every_change_is_in_audit_and_recording_with_its_old_and_new_values(
    live_engine: Any, client: ControlClient, tmp_path: Path, stepscope: Callable[..., Any]
) -> None:
    client.set_knobs({"max_num_seqs": 5}, who="before")  # before anybody watched
    subscriber = joined(live_engine.endpoint)
    recorder = Recorder(subscriber, tmp_path / "audit.mcap")
    client.ask(Pause(who="anna"))
    sampling = SamplingParams(max_tokens=900)
    client.ask(Submit(prompt_token_ids=[1] * 40, sampling=sampling, stream=False))
    step = client.ask(StepOnce(n=2, who="anna"))
    wait_for(lambda: client.snapshot().state == "paused", "two steps")
    client.ask(Resume(who="bert"))
    client.set_knobs({"order": "arrival"}, who="bert")
    client.ask(SetWorkload(who="bert"))
    client.ask(Abort(request_id=0, who="anna"))
    with pytest.raises(CommandRefused, match="there is no request 7"):
        client.ask(Abort(request_id=7, who="anna"))
    client.ask(ResetPrefixCache(who="anna"))
    client.ask(Drain(who="anna"))
    entries = trail(client)
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    assert [(e.command, e.who, e.old, e.new, e.code) for e in entries[1:]] == [
        ("Pause", "anna", {"state": "idle"}, {"state": "paused"}, ""),
        ("StepOnce", "anna", {"state": "paused"}, {"state": "step"}, ""),
        ("Resume", "bert", {"state": "paused"}, {"state": "running"}, ""),
        ("SetKnobs", "bert", {"order": "decode_first"}, {"order": "arrival"}, ""),
        ("SetWorkload", "bert", {"workload": "none"}, {"workload": "none"}, ""),
        ("Abort", "anna", {"r0": "running"}, {"r0": "aborted"}, ""),
        ("Abort", "anna", None, None, "not_found"),
        ("ResetPrefixCache", "anna", {"cached_blocks": ANY}, {"cached_blocks": 0}, ""),
        ("Drain", "anna", {"state": "idle"}, {"state": "draining"}, ""),
    ]
    assert entries[2].effective_step == step.effective_step
    # The observer has the same, and so has the file.
    wait_for(lambda: subscriber.history.state.audit == entries, "telemetry of the last one")
    lines = [event.text for event in subscriber.history.events(kinds=frozenset({"engine"}))]
    assert "anna: paused the engine" in lines
    subscriber.stop()
    recorder.stop()
    with Recording(tmp_path / "audit.mcap") as recording:
        frames = [frame for frame, _ in recording.frames() if frame.topic == b"audit"]
    told = [msgspec.msgpack.decode(frame.payload)["number"] for frame in frames]
    assert told == [e.number for e in entries[1:]]
    shown = stepscope("snapshot", "--audit", f"{tmp_path}/audit.mcap").stdout.splitlines()
    assert len(shown) == len(entries)
    for number, words in ((0, "before"), (1, "anna"), (1, "paused the engine"), (7, "refused")):
        assert words in shown[number]


def test_the_audit_of_a_recording_says_which_entries_are_from_before_it(
    live_engine: Any, client: ControlClient, tmp_path: Path, stepscope: Callable[..., Any]
) -> None:
    client.ask(Pause(who="anna"))
    for _ in range(3):
        client.send(Submit(prompt_token_ids=[1] * 40, sampling=SamplingParams(max_tokens=900)))
    client.ask(Abort(request_id=0, who="bert"))
    client.set_knobs({"max_num_seqs": 5}, who="anna")
    client.ask(Abort(request_id=1, who="bert"))
    assert [entry.number for entry in trail(client)] == [1, 2, 3, 4]
    subscriber = joined(live_engine.endpoint)
    recorder = Recorder(subscriber, tmp_path / "audit.mcap")
    client.ask(Abort(request_id=2, who="bert"))
    assert trail(client)[-1].number == 5
    wait_for(lambda: subscriber.history.state.audit[-1].number == 5, "telemetry of it")
    subscriber.stop()
    recorder.stop()
    note, *shown = stepscope("snapshot", "--audit", f"{tmp_path}/audit.mcap").stdout.splitlines()
    first = "the first 4 entries are from before the recording, which has 3 of them, alike ones as"
    assert note == f"{first} one"
    assert [line.split()[0] for line in shown] == ["1", "3", "4", "5"]
    assert "aborted 2 requests (first r0, last r1)" in shown[2]
    assert "aborted r2" in shown[3]


def test_dry_runs_change_nothing_and_leave_no_audit_entry(client: ControlClient) -> None:
    assert client.set_knobs({"max_num_seqs": 5}, who="me", dry_run=True).version == 0
    with pytest.raises(CommandRefused):
        client.set_knobs({"max_num_seqs": 0}, who="me", dry_run=True)
    assert client.snapshot().knobs["max_num_seqs"] == 64
    assert trail(client) == []


def test_an_audit_page_says_when_older_entries_are_no_longer_kept(
    client: ControlClient, live_engine: Any
) -> None:
    live_engine.core.audit._lists["changes"] = deque(maxlen=3)
    for number in range(1, 8):
        client.set_knobs({"max_num_seqs": number}, who="me")
    page = client.ask(GetAudit(after=1))
    assert [entry.number for entry in page.entries] == [5, 6, 7]
    assert "changes before entry 5 are not kept any more" in page.detail
    for after, numbers in ((4, [5]), (7, []), (2**63 - 1, [])):
        page = client.ask(GetAudit(after=after, limit=1))
        assert ([entry.number for entry in page.entries], page.detail) == (numbers, "")


def test_aborts_never_push_changes_out_of_the_audit(
    live_engine: Any, client: ControlClient, stepscope: Callable[..., Any]
) -> None:
    """When `stepscope load` ends, it aborts each of its requests with a command of its own."""
    subscriber = joined(live_engine.endpoint)
    client.set_knobs({"max_num_seqs": 5}, who="anna")
    num_requests = 60
    for _ in range(num_requests):
        client.send(Submit(prompt_token_ids=[1] * 40, sampling=SamplingParams(max_tokens=900)))
    client.ask(Pause(who="anna"))
    for number in range(num_requests // 2):  # at once
        client.send(Abort(request_id=number, who="load"))
    client.info()
    assert [entry.command for entry in trail(client)][:3] == ["SetKnobs", "Pause", "Abort"]
    for number in range(num_requests // 2, num_requests):  # one by one
        client.ask(Abort(request_id=number, who="load"))
        trail(client)  # reading the audit publishes pending entries
    entries = trail(client)
    assert [entry.number for entry in entries] == list(range(1, len(entries) + 1))
    assert len(entries) > 30
    aborts = [entry for entry in entries if entry.command == "Abort"]
    assert sum(entry.count for entry in aborts) == num_requests
    told = client.snapshot().audit or []
    counts = [("SetKnobs", 1), ("Pause", 1), ("Abort", num_requests)]
    assert [(entry.command, entry.count) for entry in told] == counts
    wait_for(lambda: subscriber.history.state.audit == told, "telemetry of the last one")
    subscriber.stop()
    shown = stepscope("snapshot", "--audit", live_engine.endpoint.control).stdout.splitlines()
    assert len(shown) == 3
    assert "load                  aborted 60 requests (first r0, last r59)" in shown[2]


def test_an_abort_of_an_ended_request_is_answered_and_leaves_no_audit_entry(
    client: ControlClient,
) -> None:
    """As when an HTTP client hangs up while the last token is on its way."""
    submitted = client.ask(Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1)))
    wait_for(lambda: client.snapshot().state == "idle", "it has ended")
    with pytest.raises(CommandRefused, match="request 0 has ended already") as refused:
        client.ask(Abort(request_id=submitted.request_id, who="http"))
    assert refused.value.code == "not_found"
    assert trail(client) == []


def test_an_abort_is_published_soon_even_if_no_message_follows(
    live_engine: Any, client: ControlClient
) -> None:
    subscriber = joined(live_engine.endpoint)
    sampling = SamplingParams(max_tokens=900)
    client.ask(Submit(prompt_token_ids=[1] * 40, sampling=sampling, stream=False))
    client.ask(Abort(request_id=0, who="anna"))
    wait_for(lambda: len(subscriber.history.state.audit) == 1, "telemetry of it")
    subscriber.stop()


# Floods


def test_a_flood_of_commands_is_refused_and_counted_and_others_are_answered(
    client: ControlClient, raw: Callable[[], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "CLIENT_BURST", 100.0)
    monkeypatch.setattr(rate_limit, "CLIENT_RATE", 1.0)  # on a busy machine 600 take seconds
    flooder = raw()
    for number in range(600):
        flooder.send(number, GetInfo())
    assert client.info().name  # in its turn, not after the whole flood
    replies = [flooder.reply()[1] for _ in range(600)]
    refused = [reply for reply in replies if isinstance(reply, Error)]
    assert {reply.code for reply in refused} == {"rate_limited"}
    assert 300 < len(refused) < 600
    assert client.snapshot().control.limited == len(refused)


# Bytes that are no command


def test_an_oversized_command_is_refused_and_a_huge_one_closes_the_connection(
    client: ControlClient, raw: Callable[[], Raw]
) -> None:
    sender = raw()
    sender.send(1, bytes(commands.MAX_COMMAND_BYTES + 1))
    assert "at most" in sender.reply()[1].message
    sender.send(2, bytes(2 * commands.MAX_COMMAND_BYTES + 1))
    assert sender.is_silent()
    assert client.info().name
    with pytest.raises(CommandRefused, match="it was not sent") as refused:
        client.ask(Submit(prompt="x" * commands.MAX_COMMAND_BYTES))
    assert refused.value.code == "too_big"
    assert client.info().name


def test_a_client_that_speaks_zmtp_2_0_is_answered_and_other_clients_still_are(
    live_engine: Any, client: ControlClient
) -> None:
    """ZMTP 2.0 frames carry no metadata about their connection."""
    with socket.socket(socket.AF_UNIX) as old:
        old.connect(str(live_engine.endpoint.path))
        dealer, identity = bytes([5]), bytes([0, 0])
        old.sendall(b"\xff" + bytes(8) + b"\x7f" + bytes([1]) + dealer + identity)
        payload = commands.encode(GetInfo())
        old.sendall(bytes([1, 8]) + bytes(8) + struct.pack(">BB", 0, len(payload)) + payload)
        old.settimeout(5)
        received = b""
        while b"simulated" not in received:
            received += old.recv(65536)
    assert client.info().name


def test_a_command_that_raises_in_the_engine_is_answered_with_an_error(
    client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("of the engine's own making")

    monkeypatch.setattr(changes, "_change_state", broken)
    with pytest.raises(CommandRefused) as refused:
        client.ask(Drain())
    assert refused.value.code == "internal"
    assert isinstance(client.ask(Submit(prompt_token_ids=[1] * 5)), Submitted)
    assert isinstance(client.ask(GetSnapshot()), Snapshot)
