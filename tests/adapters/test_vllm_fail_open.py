"""Whatever fails in stepscope, vLLM keeps its own methods, values and results."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.adapters.vllm import versions
from stepscope.engine.adapters.vllm.attachment import attach as attach_to_vllm
from stepscope.engine.adapters.vllm.kv_blocks import PublishedBlocks
from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.settings.knobs import ConfigError
from tests.adapters.conftest import Attach
from tests.adapters.laws import check_detached, fail
from tests.adapters.played_vllm import PlayedScheduler
from tests.support.waiting import wait_for

LIVE = {
    "max_num_batched_tokens": 20,
    "max_num_seqs": 2,
    "long_prefill_token_threshold": 8,
    "reserve": "none",
    "watermark": 0.25,
}


def outside(scheduler: PlayedScheduler) -> dict[str, object]:
    """All that an attachment might change: the scheduler's own attributes and its settings."""
    return {
        "methods": sorted(name for name, value in vars(scheduler).items() if callable(value)),
        "budget": scheduler.max_num_scheduled_tokens,
        "config": dict(vars(scheduler.scheduler_config)),
        "optional": {name: getattr(scheduler, name) for name in scheduler.head["optional"]},
        "manager": vars(scheduler.kv_cache_manager) | {"block_pool": None},
    }


PLACES: dict[str, Callable[[Attachment], tuple[object, str]]] = {
    "commands": lambda attachment: (attachment.core.inbox, "get_nowait"),
    "heartbeat": lambda attachment: (attachment.core.heartbeat, "publish"),
    "schedule": lambda attachment: (attachment.watcher, "scheduled"),
    "update": lambda attachment: (attachment.watcher, "updated"),
    "add": lambda attachment: (attachment.watcher, "added"),
    "finish": lambda attachment: (attachment.watcher, "note_ended"),
    "drain": lambda attachment: (PublishedBlocks, "drain"),
    "publish": lambda attachment: (attachment.core.sink, "publish"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_anywhere_detaches_stepscope_and_changes_nothing_for_vllm(
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    place: str,
) -> None:
    alone = PlayedScheduler("0.32.0", "abort")
    deque(alone.play(), 0)
    scheduler = PlayedScheduler("0.32.0", "abort")
    before = outside(scheduler)
    attachment = attach(scheduler)
    attachment.knobs.set(LIVE)
    assert outside(scheduler)["config"] != before["config"]
    play = scheduler.play()
    next(play)
    next(play)
    monkeypatch.setattr(*PLACES[place](attachment), fail)
    attachment._next_tend_ns = 0  # commands and heartbeat are due
    deque(play, 0)  # every call of vLLM returns what was recorded
    assert outside(scheduler) == before
    for name in ("num_scheduled_tokens", "total_num_scheduled_tokens", "preempted_req_ids"):
        told, expected = ([getattr(out, name) for out in s.outputs] for s in (scheduler, alone))
        assert told == expected
    check_detached(attachment, tmp_path, caplog, "vLLM")


def test_an_error_while_vllm_is_idle_detaches_stepscope_too(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside(scheduler)
    attachment = attach(scheduler)
    monkeypatch.setattr(attachment.core.heartbeat, "publish", fail)
    wait_for(lambda: not attachment.is_attached, "the pump has detached")
    deque(scheduler.play(), 0)
    assert outside(scheduler) == before
    assert caplog.text.count("stepscope has detached itself") == 1


@pytest.mark.parametrize("missing", versions.NEEDED)
def test_a_scheduler_without_a_needed_attribute_is_left_alone_and_the_lack_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside(scheduler)
    owner = scheduler if missing in vars(scheduler) else PlayedScheduler
    monkeypatch.delattr(owner, missing)
    with pytest.raises(versions.UnknownVllmError, match=f"has no .*{missing}"):
        attach_to_vllm(scheduler, f"ipc://{tmp_path}/vllm")
    monkeypatch.undo()
    assert outside(scheduler) == before
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_in_use_leaves_the_scheduler_unchanged(attach: Attach, tmp_path: Path) -> None:
    attach(PlayedScheduler("0.32.0", "chunked"))
    second = PlayedScheduler("0.32.0", "chunked")
    before = outside(second)
    with pytest.raises(ConfigError, match="or set STEPSCOPE_ENDPOINT to another name"):
        attach_to_vllm(second, f"ipc://{tmp_path}/vllm")
    assert outside(second) == before


def test_a_budget_change_takes_effect_at_the_next_schedule_up_to_the_start_value(
    attach: Attach,
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    attachment = attach(scheduler)
    endpoint = attachment.core.info.control_endpoint
    with ControlClient(endpoint) as client:
        client.set_knobs({"max_num_batched_tokens": 32}, "a test")
        assert scheduler.max_num_scheduled_tokens == 32
        with pytest.raises(Exception, match="between 1 and 64"):
            client.set_knobs({"max_num_batched_tokens": 65}, "a test")
        assert scheduler.max_num_scheduled_tokens == 32
        client.set_knobs({"max_num_batched_tokens": 48}, "a test", lease_s=0.2)
        wait_for(lambda: scheduler.max_num_scheduled_tokens == 32, "the end of the lease")
    attachment.close()
    assert scheduler.max_num_scheduled_tokens == 64


def test_on_shutdown_sockets_are_removed_before_vllm_waits_for_its_workers(
    attach: Attach, tmp_path: Path
) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    before = outside(scheduler)
    attach(scheduler)
    assert [path for path in tmp_path.iterdir() if path.is_socket()]
    scheduler.structured_output_manager.clear_backend()
    assert scheduler.structured_output_manager.num_cleared == 1
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]
    assert outside(scheduler) == before
    assert not vars(scheduler.structured_output_manager).keys() - {"num_cleared"}
