"""The SGLang plugin does nothing unless asked, and whatever fails in it leaves SGLang unchanged."""

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.sglang import plugin, shapes
from stepscope.engine.adapters.sglang.watcher import PageCounts
from stepscope.engine.protocol.settings.knobs import ConfigError
from tests.adapters.conftest import AttachSglang
from tests.adapters.laws import check_detached, fail
from tests.adapters.sglang_objects import AbortReq, TokenizedGenerateReqInput
from tests.adapters.sglang_stand_in import Scheduler, turn


def outside(scheduler: Scheduler) -> dict[str, object]:
    """All that an attachment might change: the scheduler's own attributes and its settings."""
    return {
        "methods": [name for name, value in vars(scheduler).items() if callable(value)],
        "cache": [name for name, value in vars(scheduler.tree_cache).items() if callable(value)],
        "chunk": scheduler.chunked_prefill_size,
        "parallel": dict(vars(scheduler.parallel)),
    }


def play(scheduler: Scheduler) -> list[dict[str, int]]:
    """Run eight requests and an abort; return the batches that ran."""
    came = [TokenizedGenerateReqInput(f"r{i}", [i] * (9 + 5 * i), 12) for i in range(8)]
    turn([scheduler], *came)
    turn([scheduler], AbortReq("r7"))
    while scheduler.has_work:
        turn([scheduler])
    turn([scheduler])
    return scheduler.scheduled


PLACES: dict[str, Callable[[Attachment], tuple[object, str]]] = {
    "commands": lambda attachment: (attachment.core.inbox, "get_nowait"),
    "heartbeat": lambda attachment: (attachment.core.heartbeat, "publish"),
    "arrival": lambda attachment: (attachment.watcher, "queued"),
    "schedule": lambda attachment: (attachment.watcher, "scheduled"),
    "launch": lambda attachment: (attachment.watcher, "launched"),
    "result": lambda attachment: (attachment.watcher, "processed"),
    "abort": lambda attachment: (attachment.watcher, "aborted"),
    "pool": lambda attachment: (PageCounts, "drain"),
    "evictions": lambda attachment: (PageCounts, "evicted"),
    "publish": lambda attachment: (attachment.core.sink, "publish"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_anywhere_detaches_stepscope_and_changes_nothing_for_sglang(
    attach_sglang: AttachSglang,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    place: str,
    overlap: bool,
) -> None:
    scheduler = Scheduler(overlap=overlap, num_pages=24)
    expected = play(Scheduler(overlap=overlap, num_pages=24))
    before = outside(scheduler)
    attachment = attach_sglang(scheduler)
    assert attachment is not None
    monkeypatch.setattr(*PLACES[place](attachment), fail)
    attachment._next_tend_ns = 0  # commands and heartbeat are due
    assert play(scheduler) == expected
    assert outside(scheduler) == before
    assert all(req.finished() for req in scheduler.requests)
    check_detached(attachment, tmp_path, caplog, "SGLang")


@pytest.mark.parametrize("missing", shapes.NEEDED)
def test_a_scheduler_without_a_needed_attribute_is_left_alone_and_the_lack_named(
    attach_sglang: AttachSglang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    scheduler = Scheduler()
    before = outside(scheduler)
    owner = scheduler if missing in vars(scheduler) else Scheduler
    monkeypatch.delattr(owner, missing)
    with pytest.raises(shapes.UnknownSglangError, match=f"has no .*{missing}"):
        attach_sglang(scheduler)
    monkeypatch.undo()
    assert outside(scheduler) == before
    assert list(tmp_path.iterdir()) == []


NOT_WATCHED: dict[str, Callable[[Scheduler], None]] = {
    "separate servers": lambda s: vars(s.disaggregation_mode).update(value="decode"),
    "pipeline": lambda s: vars(s.parallel).update(pp_size=2),
    "multiplexed": lambda s: vars(s).update(enable_pdmux=True),
    "MLX": lambda s: vars(s).update(enable_overlap_mlx=True),
    "diffusion": lambda s: vars(s).update(dllm_config=object()),
    "speculative": lambda s: vars(s.spec_algorithm).update(is_none=lambda: False),
    "embeds": lambda s: vars(s).update(is_generation=False),
}


@pytest.mark.parametrize("what", NOT_WATCHED)
def test_an_unsupported_way_to_run_sglang_is_refused_by_name(
    attach_sglang: AttachSglang, what: str
) -> None:
    scheduler = Scheduler()
    NOT_WATCHED[what](scheduler)
    with pytest.raises(shapes.UnknownSglangError, match=f"does not watch .*{what}"):
        attach_sglang(scheduler)


def test_an_endpoint_in_use_leaves_the_scheduler_unchanged(attach_sglang: AttachSglang) -> None:
    attach_sglang(Scheduler())
    second = Scheduler()
    before = outside(second)
    with pytest.raises(ConfigError, match="already on"):
        attach_sglang(second)
    assert outside(second) == before


# The plugin


class HookRegistry:
    """The part of SGLang's hook registry that the plugin uses."""

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[..., Any]] = {}

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        assert kind == "around"
        self.hooks[target] = hook

    def apply_to(self, monkeypatch: pytest.MonkeyPatch, owner: type) -> None:
        for target, hook in self.hooks.items():
            path, name = target.rsplit(".", 1)
            assert path == f"sglang.srt.managers.scheduler.{owner.__name__}"
            monkeypatch.setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


@pytest.fixture
def registry(
    sglang: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> HookRegistry:
    """The hook registry of a process started with an endpoint for stepscope."""
    found = HookRegistry()
    vars(sglang["sglang.srt.plugins.hook_registry"]).update(
        HookRegistry=found, HookType=SimpleNamespace(AROUND="around")
    )
    monkeypatch.setenv(plugin.VARIABLE, f"ipc://{tmp_path}/sglang")
    return found


def test_the_plugin_attaches_while_the_event_loop_runs(
    registry: HookRegistry,
    sglang: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    plugin.register()
    registry.apply_to(monkeypatch, Scheduler)
    scheduler = Scheduler()
    context = sglang["sglang.srt.runtime_context"]
    context.get_parallel = lambda: scheduler.parallel  # type: ignore[attr-defined]
    num_sockets = []

    def look() -> list[Any]:
        num_sockets.append(sum(path.is_socket() for path in tmp_path.iterdir()))
        return []

    monkeypatch.setattr(scheduler, "_poll_timeout_aborts", look)
    scheduler.process_input_requests([TokenizedGenerateReqInput("a", [1] * 20)])
    assert scheduler.run_event_loop() == "SGLang's own end"
    assert scheduler.requests[0].finished()
    assert set(num_sockets) == {2}
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="stepscope")
    assert found.load() is plugin.register


def test_in_a_process_without_an_sglang_scheduler_the_plugin_hooks_nothing(
    registry: HookRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin.register()
    assert registry.hooks == {}


def test_an_error_in_the_plugin_is_logged_and_not_raised(
    registry: HookRegistry,
    sglang: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin.register()
    registry.apply_to(monkeypatch, Scheduler)
    scheduler = Scheduler()  # SGLang's context of it is missing
    scheduler.process_input_requests([TokenizedGenerateReqInput("a", [1] * 20)])
    assert scheduler.run_event_loop() == "SGLang's own end"
    monkeypatch.delattr(registry, "hooks")
    plugin.register()
    assert caplog.text.count("stepscope is not attached") == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
