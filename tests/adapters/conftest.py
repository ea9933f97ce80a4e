"""A scheduler of vLLM or SGLang with stepscope attached, and what it publishes."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.sglang.attachment import attach as attach_to_sglang
from stepscope.engine.adapters.vllm.attachment import attach as attach_to_vllm
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Telemetry
from tests.adapters.sglang_objects import SetInternalStateReq
from tests.adapters.sglang_stand_in import Scheduler

Attach = Callable[..., Attachment]
AttachSglang = Callable[[Scheduler], Attachment | None]


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """Attaches to a scheduler; every attachment is closed after the test."""
    with ExitStack() as stack:
        enter, address = stack.enter_context, f"ipc://{tmp_path}/vllm"
        yield lambda scheduler: enter(closing(attach_to_vllm(scheduler, address)))
    assert "stepscope" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that the adapter imports from SGLang, by name."""
    names = (
        *("sglang", "sglang.srt", "sglang.srt.runtime_context", "sglang.srt.plugins"),
        *("sglang.srt.plugins.hook_registry", "sglang.srt.managers"),
        *("sglang.srt.managers.io_struct", "sglang.srt.managers.scheduler"),
    )
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(modules["sglang.srt.managers.io_struct"]).update(SetInternalStateReq=SetInternalStateReq)
    yield modules
    assert "stepscope" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def attach_sglang(sglang: dict[str, ModuleType], tmp_path: Path) -> Iterator[AttachSglang]:
    """Attaches to a rank if the adapter would; every attachment is closed after the test."""
    with ExitStack() as stack:

        def attach(scheduler: Scheduler) -> Attachment | None:
            context: Any = sglang["sglang.srt.runtime_context"]
            context.get_parallel = lambda: scheduler.parallel
            attachment = attach_to_sglang(scheduler, f"ipc://{tmp_path}/sglang")
            return attachment and stack.enter_context(closing(attachment))

        yield attach


def published(attachment: Attachment) -> list[tuple[int, Telemetry]]:
    """Every message so far, with its sequence number."""
    found: list[tuple[int, Telemetry]] = []
    while True:
        replayed = attachment.core.sink.replay(len(found), 100_000)
        found += [(frame.sequence, wire.decode(frame.payload)) for frame in replayed.frames]
        if not replayed.frames:
            return found
