"""Outputs that are ready together may be sent in one message (a bundle); nothing else changes."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from stepscope.engine.client.client import ControlClient
from stepscope.engine.control.outgoing import MAX_BUNDLE, Replies
from stepscope.engine.protocol import commands, replies
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.transport.connections import Connections
from tests.support.waiting import wait_for

QUEUE = 4


class Peer:
    """A client of a ROUTER socket, and `Replies` to it."""

    def __init__(self) -> None:
        # A new address: sockets close in the background, and an earlier one may still hold its own.
        self._context = context = zmq.Context()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = self._router.rcvhwm = QUEUE
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        connections = Connections(self._router, None)
        self._connections = connections
        self._router.bind("inproc://replies")
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.linger = 0
        self._dealer.sndhwm = self._dealer.rcvhwm = QUEUE
        self._dealer.connect("inproc://replies")
        self._dealer.send(b"")
        self.identity = self._router.recv_multipart()[0]
        self.forgotten: list[tuple[bytes, str]] = []
        self.replies = Replies(
            self._router, connections, lambda identity, why: self.forgotten.append((identity, why))
        )

    def bundle(self, number: int, logprobs: list[replies.PositionLogprobs] | None = None) -> None:
        output = replies.Output(request_id=number, token_ids=[number], text="x", logprobs=logprobs)
        self.replies.bundle(self.identity, number.to_bytes(8, "big"), output)

    def received(self) -> list[tuple[int, replies.AnyReply]]:
        messages = []
        while self._dealer.poll(0):
            number, payload = self._dealer.recv_multipart()
            messages.append((int.from_bytes(number, "big"), replies.decode_reply(payload)))
        return messages

    def close(self) -> None:
        self._connections.close()
        self._router.close()
        self._dealer.close()
        self._context.term()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def ids(reply: replies.AnyReply) -> list[int]:
    assert all(command_id == output.request_id for command_id, output in reply.outputs)
    return [command_id for command_id, _ in reply.outputs]


def test_outputs_are_bundled_in_order_up_to_a_limit_and_a_single_one_is_not(peer: Peer) -> None:
    for number in range(1, 2 * MAX_BUNDLE + 2):
        peer.bundle(number)
    peer.replies.send_bundles()
    *bundles, (last_id, last) = peer.received()
    assert [ids(reply) for _, reply in bundles] == [
        list(range(1, MAX_BUNDLE + 1)),
        list(range(MAX_BUNDLE + 1, 2 * MAX_BUNDLE + 1)),
    ]
    assert last_id == last.request_id == 2 * MAX_BUNDLE + 1
    peer.replies.send_bundles()
    assert peer.received() == []


def test_no_reply_overtakes_an_output_waiting_to_be_bundled(peer: Peer) -> None:
    position = replies.PositionLogprobs(replies.TokenLogprob(3, -1.0), 1, [])
    peer.bundle(1)
    peer.bundle(2)
    peer.bundle(3, logprobs=[position])  # too large to come with others
    peer.bundle(4)
    peer.replies.send(peer.identity, (5).to_bytes(8, "big"), replies.Ack(effective_step=0))
    (_, first), (third_id, third), (fourth_id, _), (fifth_id, _) = peer.received()
    assert ids(first) == [1, 2]
    assert third.logprobs == [position]
    assert [third_id, fourth_id, fifth_id] == [3, 4, 5]


def test_a_client_that_does_not_read_is_dropped_at_a_bounded_number_of_messages(peer: Peer) -> None:
    number = 0
    while not peer.forgotten:
        number += 1
        assert number <= 100 * MAX_BUNDLE, "its queue has no end"
        peer.bundle(number)
    assert {identity for identity, _ in peer.forgotten} == {peer.identity}
    got = [command_id for _, reply in peer.received() for command_id in ids(reply)]
    assert got == list(range(1, number - MAX_BUNDLE + 1))
    assert len(got) <= 3 * QUEUE * MAX_BUNDLE


def test_a_vanished_client_is_reported_once_for_each_bundle(peer: Peer) -> None:
    output = replies.Output(request_id=1, token_ids=[1])
    for _ in range(2):
        peer.replies.bundle(b"nobody", bytes(8), output)
    peer.bundle(7)
    peer.replies.send_bundles()
    assert [identity for identity, _ in peer.forgotten] == [b"nobody"]
    assert [command_id for command_id, _ in peer.received()] == [7]


def submit(first: int, max_tokens: int) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Submit(prompt_token_ids=[first] * 20, sampling=sampling)


def test_a_client_gets_each_output_once_and_in_order_bundled_or_not(live_engine: Any) -> None:
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(live_engine.endpoint.control)
    outputs: dict[int, list[replies.Output]] = {number: [] for number in range(1, 41)}
    for number in outputs:
        payload = commands.encode(submit(number, 12))
        raw.send_multipart([number.to_bytes(8, "big"), payload])
    accepted: set[int] = set()
    num_bundles, num_open = 0, len(outputs)
    while num_open:
        assert raw.poll(10_000), "silence"
        identifier, payload = raw.recv_multipart()
        command_id, reply = int.from_bytes(identifier, "big"), replies.decode_reply(payload)
        if isinstance(reply, replies.Submitted):
            accepted.add(command_id)
            continue
        told = reply.outputs if isinstance(reply, replies.Bundle) else [(command_id, reply)]
        if isinstance(reply, replies.Bundle):
            num_bundles += 1
            assert command_id == 0
            assert 2 <= len(told) <= MAX_BUNDLE
        for each, output in told:
            assert each in accepted
            outputs[each].append(output)
            num_open -= output.finish_reason is not None
    raw.close()
    assert num_bundles
    for received in outputs.values():
        assert [output.num_output_tokens for output in received] == list(range(1, 13))
        assert [output.finish_reason for output in received] == [None] * 11 + ["length"]
        assert len({output.request_id for output in received}) == 1


def test_a_client_unpacks_bundles_even_while_awaiting_another_reply(live_engine: Any) -> None:
    with ControlClient(live_engine.endpoint, timeout_s=10.0) as client:
        assert client.info().bundles
        sent = [client.send(submit(number, 10)) for number in range(30)]
        assert client.snapshot().requests
        tokens = dict.fromkeys(sent, 0)
        num_open = len(sent)
        while num_open:
            command_id, reply = client.receive(10.0)
            if isinstance(reply, replies.Output):
                tokens[command_id] += 1
                num_open -= reply.finish_reason is not None
        assert set(tokens.values()) == {10}


def test_requests_with_bundled_outputs_of_a_vanished_client_are_aborted(live_engine: Any) -> None:
    with ControlClient(live_engine.endpoint, timeout_s=10.0) as client:
        with ControlClient(live_engine.endpoint) as other:
            for number in range(20):
                other.send(submit(number, 900))
            wait_for(lambda: len(client.snapshot().requests) == 20, "the requests")
        wait_for(lambda: not client.snapshot().requests, "the requests of the vanished client end")
