"""SGLang's own stream of forward passes gives a step's totals and leaves the rest unknown.

The messages are made as `srt/observability/forward_pass_metrics.py` of SGLang 0.5.23 makes them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from stepscope.engine.protocol.knobs import WrongValue
from stepscope.recordings.history.history import History
from stepscope.recordings.live.forward_passes import (
    ForwardPassAddress,
    ForwardPassSource,
    decode,
)
from stepscope.tui.session.live_source import addresses
from tests.support.waiting import wait_for


def frames(counter: int, prefill: int = 0, decodes: int = 0, waiting: int = 0) -> list[bytes]:
    """The frames of one message; an idle SGLang sends all zeros."""
    names = ("sum_prefill_tokens", "sum_decode_kv_tokens", "num_decode_requests")
    zeros = dict.fromkeys((*names, "num_prefill_requests", "sum_prefill_kv_tokens"), 0)
    variances = dict.fromkeys(("var_prefill_length", "var_decode_kv_tokens"), 0.0)
    scheduled = {"num_prefill_requests": int(prefill > 0), "sum_prefill_tokens": prefill}
    message: dict[str, Any] = {
        "version": 1,
        "counter_id": counter,
        "wall_time": 0.02 if prefill or decodes else 0.0,
        "scheduled_requests": zeros | variances | scheduled | {"num_decode_requests": decodes},
        "queued_requests": zeros | variances | {"num_prefill_requests": waiting},
    }
    return [b"", counter.to_bytes(8, "big"), msgspec.msgpack.encode(message)]


Stream = tuple[Callable[[list[bytes]], None], ForwardPassSource]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    """A function that sends a message, and the connected source that receives it."""
    where = f"ipc://{tmp_path}/fpm.0"
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.linger = 0
        socket.bind(where)
        source = ForwardPassSource(ForwardPassAddress(where), History())
        source.start()
        assert socket.poll(30_000)
        socket.recv()  # it has subscribed
        try:
            yield socket.send_multipart, source
        finally:
            source.stop()


def test_a_forward_pass_reported_by_sglang_is_a_step_with_totals_only(stream: Stream) -> None:
    send, source = stream
    send(frames(0, prefill=700, waiting=3))
    send(frames(1, decodes=12))
    wait_for(lambda: source.history.num_steps == 2)
    first, second = map(source.history.record, (0, 1))
    assert (first.num_prefill_tokens, first.num_decode_tokens, first.num_waiting) == (700, 0, 3)
    assert (second.num_prefill_tokens, second.num_decode_tokens) == (0, 12)
    assert first.device_ns == 20_000_000
    assert (first.batch, first.kv, first.token_budget, first.launch_ns) == (None,) * 4
    assert source.history.info.engine == "sglang"
    assert not source.history.state.is_load_known
    assert source.status == "live"


def test_lost_and_bad_messages_are_counted_and_lower_numbers_begin_anew(stream: Stream) -> None:
    send, source = stream
    send([b"", b"short", b"x"])
    send(frames(4))  # idle, which is no step
    send(frames(5, decodes=1))
    send(frames(9, decodes=1))
    wait_for(lambda: source.history.num_steps == 2)
    assert source.num_bad == 1
    assert source.history.num_lost == 3
    before = source.history.info
    send(frames(0, decodes=4))
    wait_for(lambda: source.history.info != before and source.history.num_steps == 1, "anew")


def test_another_address_or_version_of_a_forward_pass_stream_is_refused() -> None:
    assert addresses("sglang+ipc:///tmp/fpm.0") == [ForwardPassAddress("ipc:///tmp/fpm.0")]
    with pytest.raises(WrongValue):
        addresses("sglang+udp://x")
    with pytest.raises(msgspec.ValidationError, match="version 2, not 1"):
        decode(msgspec.msgpack.encode({"version": 2}))
