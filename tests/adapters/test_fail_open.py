"""Whatever fails in stepscope, vLLM and SGLang keep their own methods, values and results."""

import sys
from collections import deque
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.sglang import plugin, shapes
from stepscope.engine.adapters.sglang.watcher import PageCounts
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.attachment import attach as attach_to_vllm
from stepscope.engine.adapters.vllm.kv_blocks import PublishedBlocks
from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.keys import KeyFolder, Role, read_credentials
from tests.adapters.conftest import Attach, AttachSglang
from tests.adapters.laws import check_detached, fail
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.sglang_objects import AbortReq, TokenizedGenerateReqInput
from tests.adapters.sglang_stand_in import Scheduler, turn
from tests.support.ports import free_port
from tests.support.waiting import wait_for

LIVE = {
    "max_num_batched_tokens": 20,
    "max_num_seqs": 2,
    "long_prefill_token_threshold": 8,
    "reserve": "none",
    "watermark": 0.25,
}
Place = Callable[[Attachment], tuple[object, str]]


def own_methods(owner: object) -> set[str]:
    return {name for name, value in vars(owner).items() if callable(value)}


def outside_vllm(scheduler: PlayedScheduler) -> dict[str, object]:
    """All that an attachment might change: the scheduler's own attributes and its settings."""
    return {
        "methods": own_methods(scheduler),
        "budget": scheduler.max_num_scheduled_tokens,
        "config": dict(vars(scheduler.scheduler_config)),
        "optional": {name: getattr(scheduler, name) for name in scheduler.head["optional"]},
        "manager": vars(scheduler.kv_cache_manager) | {"block_pool": None},
    }


def play_vllm(scheduler: PlayedScheduler) -> list[object]:
    deque(scheduler.play(), 0)  # every call returns what was recorded
    return [(out.num_scheduled_tokens, out.preempted_req_ids) for out in scheduler.outputs]


def outside_sglang(scheduler: Scheduler) -> dict[str, object]:
    return {
        "methods": own_methods(scheduler),
        "cache": own_methods(scheduler.tree_cache),
        "chunk": scheduler.chunked_prefill_size,
        "parallel": dict(vars(scheduler.parallel)),
    }


def play_sglang(scheduler: Scheduler) -> list[object]:
    """Run eight requests and an abort; return the batches that ran."""
    came = [TokenizedGenerateReqInput(f"r{i}", [i] * (9 + 5 * i), 12) for i in range(8)]
    turn([scheduler], *came)
    turn([scheduler], AbortReq("r7"))
    while scheduler.has_work:
        turn([scheduler])
    turn([scheduler])
    assert all(req.finished() for req in scheduler.requests)
    return [*scheduler.scheduled]


def at(name: str) -> Place:
    return lambda attachment: (attachment.watcher, name)


class Attached(NamedTuple):
    """How the tests run one engine. `changes` are knobs that are set before an error."""

    name: str
    fixture: str  # that attaches
    make: Callable[[], Any]
    play: Callable[[Any], list[object]]
    outside: Callable[[Any], dict[str, object]]
    changes: dict[str, Any]
    places: dict[str, Place]


ALL: dict[str, Place] = {
    "commands": lambda attachment: (attachment.core.inbox, "get_nowait"),
    "heartbeat": lambda attachment: (attachment.core.heartbeat, "publish"),
    "publish": lambda attachment: (attachment.core.sink, "publish"),
}
VLLM = Attached(
    "vLLM",
    "attach",
    lambda: PlayedScheduler("0.32.0", "abort"),
    play_vllm,
    outside_vllm,
    LIVE,
    ALL
    | {name: at(name) for name in ("scheduled", "updated", "added", "note_ended")}
    | {"drain": lambda attachment: (PublishedBlocks, "drain")},
)
SGLANG = Attached(
    "SGLang",
    "attach_sglang",
    lambda: Scheduler(num_pages=24),
    play_sglang,
    outside_sglang,
    {},
    ALL
    | {name: at(name) for name in ("queued", "scheduled", "launched", "processed", "aborted")}
    | {name: lambda attachment, name=name: (PageCounts, name) for name in ("drain", "evicted")},
)
OVERLAPPED = SGLANG._replace(make=lambda: Scheduler(overlap=True, num_pages=24))


@pytest.mark.parametrize(
    ("engine", "place"),
    [(each, place) for each in (VLLM, SGLANG, OVERLAPPED) for place in each.places],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_an_error_anywhere_detaches_stepscope_and_changes_nothing_for_the_engine(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    engine: Attached,
    place: str,
) -> None:
    expected, scheduler = engine.play(engine.make()), engine.make()
    before = engine.outside(scheduler)
    attachment = request.getfixturevalue(engine.fixture)(scheduler)
    attachment.knobs.set(engine.changes)
    assert engine.outside(scheduler) != before
    monkeypatch.setattr(*engine.places[place](attachment), fail)
    attachment._next_tend_ns = 0  # commands and heartbeat are due
    assert engine.play(scheduler) == expected
    assert engine.outside(scheduler) == before
    check_detached(attachment, tmp_path, caplog, engine.name)


@pytest.mark.parametrize(
    ("engine", "missing"),
    [(VLLM, each) for each in versions.NEEDED] + [(SGLANG, each) for each in shapes.NEEDED],
    ids=lambda each: each if isinstance(each, str) else each.name,
)
def test_a_scheduler_without_a_needed_attribute_is_left_alone_and_the_lack_named(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: Attached,
    missing: str,
) -> None:
    scheduler = engine.make()
    before = engine.outside(scheduler)
    monkeypatch.delattr(scheduler if missing in vars(scheduler) else type(scheduler), missing)
    with pytest.raises(RuntimeError, match=f"has no .*{missing}"):
        request.getfixturevalue(engine.fixture)(scheduler)
    monkeypatch.undo()
    assert engine.outside(scheduler) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda each: each.name)
def test_an_endpoint_in_use_changes_nothing(
    request: pytest.FixtureRequest, engine: Attached
) -> None:
    attach, second = request.getfixturevalue(engine.fixture), engine.make()
    attach(engine.make())
    before = engine.outside(second)
    with pytest.raises(ConfigError, match="or set STEPSCOPE_ENDPOINT to another name"):
        attach(second)
    assert engine.outside(second) == before


def test_an_error_while_vllm_is_idle_detaches_stepscope_too(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside_vllm(scheduler)
    attachment = attach(scheduler)
    monkeypatch.setattr(attachment.core.heartbeat, "publish", fail)
    wait_for(lambda: not attachment.is_attached, "the pump has detached")
    deque(scheduler.play(), 0)
    assert outside_vllm(scheduler) == before
    assert caplog.text.count("stepscope has detached itself") == 1


def test_a_budget_change_takes_effect_up_to_the_start_value(attach: Attach) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    attachment = attach(scheduler)
    with ControlClient(attachment.core.info.control_endpoint) as client:
        client.set_knobs({"max_num_batched_tokens": 32}, "a test")
        assert scheduler.max_num_scheduled_tokens == 32
        with pytest.raises(Exception, match="between 1 and 64"):
            client.set_knobs({"max_num_batched_tokens": 65}, "a test")
        assert scheduler.max_num_scheduled_tokens == 32
        client.set_knobs({"max_num_batched_tokens": 48}, "a test", lease_s=0.2)
        wait_for(lambda: scheduler.max_num_scheduled_tokens == 32, "the end of the lease")
    attachment.close()
    assert scheduler.max_num_scheduled_tokens == 64


def test_a_prompt_is_refused_with_advice_and_the_audit_trail_says_whose(attach: Attach) -> None:
    attachment = attach(PlayedScheduler("0.32.0", "chunked"))
    with ControlClient(attachment.core.info.control_endpoint) as client:
        with pytest.raises(CommandRefused, match="send requests to vLLM's own server") as refused:
            client.ask(Submit(client_id="anna", prompt="Hello"))
        assert refused.value.code == "unsupported"
        wait_for(lambda: client.snapshot().audit, "the refusal in the audit trail")
        (entry,) = client.snapshot().audit or ()
    assert (entry.command, entry.who, entry.code) == ("Submit", "anna", "unsupported")


def test_sockets_are_removed_before_vllm_waits_for_its_workers(
    attach: Attach, tmp_path: Path
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside_vllm(scheduler)
    attach(scheduler)
    assert [path for path in tmp_path.iterdir() if path.is_socket()]
    scheduler.structured_output_manager.clear_backend()
    assert scheduler.structured_output_manager.num_cleared == 1
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]
    assert outside_vllm(scheduler) == before
    assert not vars(scheduler.structured_output_manager).keys() - {"num_cleared"}


def test_holders_of_keys_watch_or_steer_and_nobody_else_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "vllm"))
    monkeypatch.setattr(Endpoint, "is_private", False)
    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside_vllm(scheduler)
    with pytest.raises(ConfigError, match="no key is authorised"):
        attach_to_vllm(scheduler, address)
    assert outside_vllm(scheduler) == before

    def holder(name: str, role: Role) -> Endpoint:
        KeyFolder().add(name, role, tmp_path / f"{name}.key", None)
        return Endpoint(address, read_credentials(tmp_path / f"{name}.key"))

    viewer = holder("vera", "viewer")
    attachment = attach_to_vllm(scheduler, address)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "laptop"))
    change = {"max_num_batched_tokens": 32}
    with closing(attachment):
        with ControlClient(viewer) as client:
            assert client.info().engine == "vllm"
            with pytest.raises(CommandRefused, match="takes an operator's key"):
                client.set_knobs(change, "vera")
        with ControlClient(holder("otto", "operator")) as client:  # made while it runs
            client.set_knobs(change, "otto")
        assert scheduler.max_num_scheduled_tokens == 32
        with (
            ControlClient(address, timeout_s=1) as client,
            pytest.raises(EngineUnreachable, match="asks for a key"),
        ):
            client.info()
        assert [each.key for each in attachment.core.audit.last()] == ["vera", "otto"]


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
def test_an_unwatched_kind_of_sglang_is_named(attach_sglang: AttachSglang, what: str) -> None:
    scheduler = Scheduler()
    NOT_WATCHED[what](scheduler)
    with pytest.raises(RuntimeError, match=f"does not watch .*{what}"):
        attach_sglang(scheduler)


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
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "sglang.srt.managers.scheduler")
        plugin.register()
        assert registry.hooks == {}  # this process runs no scheduler
    (found,) = entry_points(group="sglang.srt.plugins", name="stepscope")
    found.load()()
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


def test_an_error_in_the_plugin_is_logged_and_not_raised(
    registry: HookRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
