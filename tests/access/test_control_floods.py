"""However much clients send to the control socket, it costs the engine a bounded time."""

import queue
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.control.outgoing import MAX_PENDING, BulkReplies, RemoteClient
from stepscope.engine.loop import inbox
from stepscope.engine.loop.audit import REFUSED_FOLD_NS, AuditTrail, ChangeEffect
from stepscope.engine.loop.inbox import (
    COMMAND_SHARE,
    MAX_ITEMS,
    MIN_COMMAND_NS,
    CommandTime,
    Departure,
    Inbox,
)
from stepscope.engine.protocol.commands import (
    Asker,
    Change,
    Drain,
    GetInfo,
    GetSnapshot,
    Pause,
    ReplayFrom,
    Resume,
    SetKnobs,
    SetWorkload,
    StepOnce,
    Submit,
)
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.replies import Ack, Error, Replayed
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Audited, Snapshot
from stepscope.engine.transport import rate_limit, sockets
from stepscope.engine.transport.rate_limit import RateLimiter
from tests.support.waiting import wait_for

# One turn of the inbox


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def items(lane: bytes, number: int) -> list[Departure]:
    return [Departure(each, lane) for each in range(number)]


def taken(turn: CommandTime, box: Inbox, clock: Clock, cost_ns: int) -> list[Departure]:
    """The items that one turn takes when each costs `cost_ns`."""
    done: list[Departure] = []

    def do(item: Any) -> None:
        done.append(item)
        clock.now_ns += cost_ns

    turn.take(box, do)
    return done


@pytest.mark.parametrize("cost_us", [3, 20, 150, 999, 7_000])
@pytest.mark.parametrize("step_ms", [2, 10, 400])
def test_control_commands_take_at_most_a_millisecond_or_two_percent_of_a_step(
    cost_us: int, step_ms: int
) -> None:
    clock, box = Clock(), Inbox()
    turn = CommandTime(clock)
    num_steps, spent_ns = 200, 0
    for _ in range(num_steps):
        for item in items(b"flooder", 200):
            box.put(item)
        done = taken(turn, box, clock, cost_us * 1_000)
        spent_ns += len(done) * cost_us * 1_000
        assert len(done) <= MAX_ITEMS
        clock.now_ns += step_ms * 1_000_000
    share_ns = max(MIN_COMMAND_NS, round(step_ms * 1.1e6 * COMMAND_SHARE))
    assert spent_ns <= num_steps * share_ns + cost_us * 1_000 * 2


def test_waiting_for_the_device_does_not_count_as_command_time() -> None:
    clock, box = Clock(), Inbox()
    turn = CommandTime(clock)
    for item in items(b"one", 3):
        box.put(item)
    done = []

    def do(item: Any) -> None:
        done.append(item)
        clock.now_ns += 50 * MIN_COMMAND_NS
        turn.excuse(50 * MIN_COMMAND_NS)

    turn.take(box, do)
    assert len(done) == 3


def test_commands_from_the_engines_own_process_are_taken_first_and_without_a_bound() -> None:
    clock, box = Clock(), Inbox()
    for item in (*items(b"flooder", 10), *items(b"", 1_000)):
        box.put(item)
    done = taken(CommandTime(clock), box, clock, MIN_COMMAND_NS)
    assert [each.lane for each in done] == [b""] * 1_000 + [b"flooder"]


def test_clients_take_turns_and_each_clients_commands_keep_their_order() -> None:
    box = Inbox()
    for item in (*items(b"flooder", 5_000), *items(b"good", 3), *items(b"other", 2)):
        box.put(item)
    assert box.qsize() == 5_005
    first = [box.get_nowait() for _ in range(900)]
    of_flooder = [item.request_id for item in first if item.lane == b"flooder"]
    assert of_flooder == sorted(of_flooder)
    while len(first) < 5_005:
        first.append(box.get_nowait())
    good = [at for at, item in enumerate(first) if item.lane == b"good"]
    # All that came is sorted after ten looks, and then a good client's turn comes each third time.
    looks = 5_005 // inbox._MAX_SORTED + 1
    assert good[-1] <= looks + 3 * 3
    assert [first[at].request_id for at in good] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        box.get_nowait()
    assert box.qsize() == 0


# Changes


def test_a_change_of_what_holds_already_is_answered_and_not_audited(
    live_engine: Any, client: ControlClient
) -> None:
    core = live_engine.core
    for first in (SetKnobs(changes={"max_num_seqs": 5}), Pause(), Drain()):
        assert "already" not in client.ask(first).detail
    newest = core.audit.newest
    for again in (SetKnobs(changes={"max_num_seqs": 5}, who="bert"), Pause(), Drain()):
        assert "already" in client.ask(again).detail
    assert core.audit.newest == newest


def acks(client: ControlClient, commands: list[Change]) -> list[Ack]:
    """The answers to changes that are sent without awaiting each, in their order."""
    sent = [client.send(command) for command in commands]
    found: dict[int, Ack] = {}
    while len(found) < len(sent):
        command_id, reply = client.receive(5.0)
        assert isinstance(reply, Ack), reply
        found[command_id] = reply
    return [found[each] for each in sent]


def test_changes_sent_in_a_row_without_awaiting_each_ack_are_all_done(
    client: ControlClient,
) -> None:
    """The state may change between a command's arrival and its turn: none is refused or dropped."""
    acks(client, [Pause(), Resume()] * 10)
    assert client.snapshot().state == "idle"
    changes: list[Change] = [
        SetKnobs(changes={"max_num_seqs": 5 + number}, expected_version=number)
        for number in range(20)
    ]
    assert [each.version for each in acks(client, changes)] == list(range(1, 21))


def test_the_ack_of_a_change_that_had_to_wait_names_its_effective_step_too(
    live_engine: Any, client: ControlClient
) -> None:
    client.send(Submit(prompt_token_ids=[1] * 9, sampling=SamplingParams(max_tokens=900)))
    client.info()
    for number in range(5_000):
        live_engine.core.inbox.put(Departure(10**6 + number, lane=b"flooder"))
    changed = client.ask(SetKnobs(changes={"max_num_seqs": 7}, who="anna"))
    (entry,) = (each for each in live_engine.core.audit.last() if each.command == "SetKnobs")
    assert entry.effective_step == changed.effective_step


# The audit trail


def trail(clock: Clock) -> tuple[AuditTrail, list[Audited]]:
    told: list[Audited] = []
    return AuditTrail(told.append, clock), told


def test_the_last_change_by_another_client_is_found() -> None:
    audit, told = trail(Clock())
    changes: list[Change] = [Pause(), SetKnobs(changes={"a": 1}), SetWorkload(), StepOnce()]
    names = ["anna", "bert", "carl"]
    for number in range(300):
        command = changes[number * 7 % 4]
        audit.done(command, Asker(names[number * number % 3]), number, ChangeEffect({}, {}))
        if number % 5 == 0:
            audit.refused("Pause", Asker("dora"), "viewer", "no")
        for asked in changes:
            for name in (*names, "dora"):
                for since in (0, number // 2, audit.newest - 1):
                    found = audit.changed_since(since, asked, Asker(name))
                    kinds = [{"Pause", "StepOnce"}, {"SetKnobs"}, {"SetWorkload"}]
                    kind = next(each for each in kinds if type(asked).__name__ in each)
                    expected = [
                        each
                        for each in told
                        if each.command in kind and not each.code and each.who != name
                    ]
                    last = expected[-1] if expected and expected[-1].number > since else None
                    assert found == last


def test_refusals_of_a_flooding_viewer_share_audit_entries_and_push_no_change_out() -> None:
    clock = Clock()
    audit, told = trail(clock)
    audit.done(Pause(), Asker("anna"), 1, ChangeEffect())
    viewer = Asker("anna", "looker")
    num_refused, seconds = 0, 600
    for _ in range(seconds):
        for _ in range(58):
            clock.now_ns += 1_000_000_000 // 58
            audit.refused("Resume", viewer, "viewer", "no")
            num_refused += 1
        audit.publish_if_due()
        audit.page(0, 1_000)  # reading the audit adds no entries
    audit.publish_all()
    refusals = [each for each in told if each.code]
    assert sum(each.count for each in refusals) == num_refused
    assert len(refusals) <= 2 + seconds * 1_000_000_000 / REFUSED_FOLD_NS
    assert audit.page(0, 1).entries[0].command == "Pause"
    assert [each.number for each in told] == list(range(1, len(told) + 1))
    assert [each.command for each in audit.last()] == ["Pause", "Resume"]


def test_the_audit_bounds_refusals_apart_from_changes_and_drops_the_oldest_first() -> None:
    clock = Clock()
    audit, _ = trail(clock)
    audit._lists["refusals"] = deque(maxlen=10)
    for number in range(100):
        audit.refused(f"Kind{number}", Asker("anna"), "viewer", "no")
        clock.now_ns += REFUSED_FOLD_NS
        audit.publish_if_due()
        if number % 10 == 0:
            audit.done(Pause(), Asker("bert"), number, ChangeEffect())
    page = audit.page(0, 1_000)
    assert Counter(each.code for each in page.entries) == {"viewer": 10, "": 10}
    assert "refusals before entry" in page.detail
    numbers = [each.number for each in page.entries]
    assert numbers == sorted(numbers)
    assert [e.number for e in audit.page(numbers[3], 4).entries] == numbers[4:8]


# Answers of many bytes


class Asked:
    """Queries to an engine that never answers, and to a ring of one message."""

    def __init__(self) -> None:
        self.answered: queue.Queue[bytes] = queue.Queue()
        self.inbox: list[Any] = []
        engine: Any = SimpleNamespace(inbox=SimpleNamespace(put=self.inbox.append))
        ring = Replayed(frames=[], oldest_sequence=0, next_sequence=1)
        self.bulk = BulkReplies(engine, lambda sequence, limit: ring, self._posted)

    def _posted(self, outgoing: Any) -> None:
        self.answered.put(outgoing[0].account)

    def take(self, account: bytes, command: ReplayFrom | GetSnapshot) -> None:
        client = RemoteClient(lambda outgoing: None, account, b"", account, is_bulk=True)
        self.bulk.begin(command, client)


def test_a_client_has_a_bounded_number_of_pending_bulk_replies() -> None:
    asked, replay = Asked(), ReplayFrom(sequence=0, limit=1)
    with asked.bulk._changed:  # nothing is answered before all have asked
        for _ in range(MAX_PENDING):
            asked.take(b"a", replay)
        for command in (replay, GetSnapshot()):
            with pytest.raises(ConfigError, match="waits for an answer"):
                asked.take(b"a", command)
        asked.take(b"b", replay)
    assert {asked.answered.get(timeout=30) for _ in range(2)} == {b"a", b"b"}
    asked.take(b"a", GetSnapshot())
    assert len(asked.inbox) == 1
    asked.bulk.close()


def test_the_client_with_the_fewest_open_questions_is_answered_first() -> None:
    asked = Asked()
    with asked.bulk._changed:  # nothing is answered before all have asked
        for account in (b"many", b"many", b"many", b"gone", b"one", b"two", b"two"):
            asked.take(account, ReplayFrom(sequence=0, limit=1))
        asked.bulk.forget(b"gone")
    order = [asked.answered.get(timeout=30) for _ in range(6)]
    assert order == [b"one", b"two", b"two", b"many", b"many", b"many"]
    asked.bulk.close()


def test_a_client_that_was_sent_too_many_bytes_may_send_again_after_a_while() -> None:
    now_s = 0.0
    limiter = RateLimiter(lambda: now_s)
    limiter.charge_bytes(b"greedy", 10_000_000)
    assert not limiter.admit(b"greedy", 40)
    assert limiter.admit(b"other", 40)
    now_s = 0.5
    assert limiter.admit(b"greedy", 40)


def test_during_a_flood_of_replay_requests_other_commands_are_answered(
    live_engine: Any, client: ControlClient
) -> None:
    for _ in range(4):
        client.ask(Submit(prompt_token_ids=[1], sampling=SamplingParams(max_tokens=200)))
    wait_for(lambda: client.snapshot().state == "idle", "they have ended")
    with ControlClient(live_engine.endpoint, timeout_s=20.0) as flooder:
        asked = {flooder.send(ReplayFrom(sequence=0, limit=10_000)) for _ in range(150)}
        assert isinstance(client.ask(GetSnapshot()), Snapshot)
        while asked:
            command_id, reply = flooder.receive(20.0)
            asked.discard(command_id)
            if isinstance(reply, Error):
                assert reply.code == "rate_limited"
            else:
                assert len(reply.frames) > 200


# Limits on reading


class Flooded:
    """A limiter of clients who send as fast as it lets them, and a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_pauses = 0
        self.limiter = RateLimiter(lambda: self.now_s)

    def during(self, seconds: float, step_s: float = 1e-5) -> Iterator[bytes]:
        """Yield for each message that is read one of a thousand clients."""
        number = 0
        while self.now_s < seconds:
            if pause_s := self.limiter.pause_s():
                self.num_pauses += 1
                self.now_s += pause_s + 1e-6
                continue
            number += 1
            yield str(number % 1_000).encode()
            self.now_s += step_s


def test_after_a_flood_messages_are_read_in_batches_not_one_by_one() -> None:
    """Each time the control thread wakes, the engine's thread has to hand over the interpreter."""
    flooded = Flooded()
    num_refused = sum(not flooded.limiter.admit(b"flooder", 40) for _ in flooded.during(5.0))
    assert flooded.num_pauses <= 5.0 / rate_limit.PAUSE_S
    refused_at_most = rate_limit.TOTAL_RATE / rate_limit.REFUSED * flooded.now_s
    assert 0 < num_refused <= refused_at_most + rate_limit.TOTAL_BURST
    flooded.now_s += rate_limit.PAUSE_S + 0.01
    assert flooded.limiter.pause_s() == 0
    assert flooded.limiter.admit(b"other", 40)


@pytest.mark.parametrize(
    "command", [GetSnapshot(), ReplayFrom(sequence=0), GetInfo(), None, Resume()]
)
def test_commands_are_read_at_a_bounded_total_rate_however_many_clients_send(command: Any) -> None:
    flooded, num_read = Flooded(), 0
    for account in flooded.during(20.0):
        num_read += 1
        if flooded.limiter.admit(account, 40):
            flooded.limiter.charge(account, command)
    assert num_read <= (rate_limit.TOTAL_BURST + rate_limit.TOTAL_RATE * flooded.now_s) / 20


def test_no_client_exceeds_its_command_rate_whatever_it_sends() -> None:
    flooded, used = Flooded(), 0.0
    for number, _ in enumerate(flooded.during(20.0, 1e-4)):
        size = number * 7_919 % 200_000
        if flooded.limiter.admit(b"one", size):
            flooded.limiter.charge(b"one", GetSnapshot())
            used += rate_limit.MESSAGE + 25 + size / rate_limit.BYTES_PER_UNIT
    most = rate_limit.CLIENT_BURST + rate_limit.CLIENT_RATE * flooded.now_s
    assert most / 2 < used <= most + 25


def test_short_prompts_are_tokenised_at_a_bounded_rate() -> None:
    """The control thread tokenises short prompts itself, within one bound for all clients."""
    flooded, num_chars = Flooded(), 0
    for account in flooded.during(20.0, 1e-4):
        if flooded.limiter.admit(account, 16_000):
            flooded.limiter.charge_text(account, 16_001)
            num_chars += 16_001
    most = rate_limit.TOTAL_BURST + rate_limit.TOTAL_RATE * flooded.now_s
    assert num_chars <= most * rate_limit.TOTAL_CHARS


def _send_both_ways(server: "zmq.Socket[bytes]", identity: bytes, client: socket.socket) -> None:
    for _ in range(1_000):
        server.send_multipart([identity, bytes(250_000)], zmq.NOBLOCK)
        client.sendall(b"\x00\x01y")
        time.sleep(0.02)


def test_a_client_that_sends_but_reads_nothing_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "STALLED_MS", 500)
    with closing(sockets.server_socket(zmq.ROUTER, None)) as server:
        server.linger = 0
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)) as client:
            # Hello of ZMTP 3.0 (NULL), then a message of one byte.
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
            client.sendall(greeting)
            client.recv(len(greeting), socket.MSG_WAITALL)
            client.sendall(bytes([4, len(ready)]) + ready + b"\x00\x01x")
            identity, _ = server.recv_multipart()
            with pytest.raises((zmq.ZMQError, OSError)):  # whoever notices first
                _send_both_ways(server, identity, client)
