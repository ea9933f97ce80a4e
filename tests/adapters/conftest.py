"""A recorded vLLM scheduler with stepscope attached, and what it publishes."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.vllm.attachment import attach as attach_to_vllm
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from tests.adapters.played_vllm import PlayedScheduler

Attach = Callable[..., Attachment]


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """Attaches to a scheduler; whatever is attached is closed in the end."""
    attached: list[Attachment] = []

    def attach(scheduler: PlayedScheduler) -> Attachment:
        attachment = attach_to_vllm(scheduler, f"ipc://{tmp_path}/vllm")
        attached.append(attachment)
        return attachment

    yield attach
    for attachment in attached:
        attachment.close()
    assert "stepscope" not in [thread.name for thread in threading.enumerate()]


def published(attachment: Attachment) -> list[tuple[int, Telemetry]]:
    """Every message so far, with its sequence number."""
    found: list[tuple[int, Telemetry]] = []
    while True:
        replayed = attachment.core.sink.replay(len(found), 100_000)
        found += [(frame.sequence, wire.decode(frame.payload)) for frame in replayed.frames]
        if not replayed.frames:
            return found
