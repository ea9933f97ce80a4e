"""Replies of the engine's thread wake the sending thread once, and none stays unsent."""

import os
import select
import threading

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.control.outgoing import Outgoing, RemoteClient
from stepscope.engine.loop.inbox import WakingQueue
from stepscope.engine.protocol.commands import Pause
from stepscope.engine.protocol.replies import Output
from tests.support.engines.live_engine import LiveEngine


def reply(number: int, client: RemoteClient) -> Outgoing:
    return client, Output(request_id=number, token_ids=[])


def test_a_step_with_hundreds_of_replies_wakes_the_sender_once() -> None:
    outbox = WakingQueue()
    client = RemoteClient(outbox.post, b"me", b"", b"me")
    for _ in range(3):
        for number in range(300):
            outbox.post(reply(number, client))
        assert len(os.read(outbox.descriptor, 65536)) == 1
        os.write(outbox._write, b"\0")  # read only to be counted
        outbox.awake()
        assert len(list(outbox.take())) == 300
    outbox.close()


def test_replies_of_several_threads_all_arrive_and_keep_the_order_of_each_thread() -> None:
    outbox = WakingQueue()
    count, clients = 3_000, [RemoteClient(outbox.post, b"%d" % i, b"", b"") for i in range(3)]

    def post(client: RemoteClient) -> None:
        for number in range(count):
            outbox.post(reply(number, client))

    threads = [threading.Thread(target=post, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    taken: dict[bytes, list[int]] = {client.identity: [] for client in clients}
    while sum(map(len, taken.values())) < count * len(clients):
        ready, _, _ = select.select([outbox.descriptor], [], [], 10.0)
        assert ready, f"nobody woke us for the rest: {[len(each) for each in taken.values()]}"
        outbox.awake()
        for client, message in outbox.take():
            taken[client.identity].append(message.request_id)
    for thread in threads:
        thread.join()
    assert all(numbers == list(range(count)) for numbers in taken.values())
    outbox.close()


def test_a_reply_posted_at_the_start_of_shutdown_is_sent(
    live_engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = live_engine.control
    send_outbox = control._send_outbox

    def send_outbox_then_be_told_to_end() -> None:
        waiting = list(control._outbox._waiting)
        send_outbox()
        if waiting and not control._closing:
            control._outbox.post(waiting[0])
            control._closing = True

    monkeypatch.setattr(control, "_send_outbox", send_outbox_then_be_told_to_end)
    with ControlClient(live_engine.endpoint) as client:
        asked = client.send(Pause())
        for _ in range(2):
            assert client.receive(5.0)[0] == asked


def test_a_reply_posted_after_shutdown_writes_to_no_reused_descriptor() -> None:
    outbox = WakingQueue()
    outbox.close()
    read_end, write_end = os.pipe()  # on the descriptors that were free
    outbox.post(reply(1, RemoteClient(outbox.post, b"me", b"", b"me")))
    os.set_blocking(read_end, False)
    with pytest.raises(BlockingIOError):
        os.read(read_end, 1)
    os.close(read_end)
    os.close(write_end)
