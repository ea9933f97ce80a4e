"""What each waiting request of an attached vLLM waits for, by name."""

from collections import deque
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.vllm import scheduled
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.wire import EngineStatus, HeldRow
from stepscope.recordings.alerts.judge import waiting_figures
from stepscope.recordings.state.session import SessionState
from tests.adapters.conftest import Attach, published
from tests.adapters.played_vllm import PlayedScheduler
from tests.adapters.test_vllm_schedules import Played, explained
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import record


def test_a_request_that_needs_a_lora_slot_waits_for_it_and_nobody_else_does(
    attach: Attach, tmp_path: Path, stepscope: Any
) -> None:
    played = Played(attach, "0.32.0", "adapters")
    told = [line.get("held", []) for line in played.scheduler.calls if line["call"] == "schedule"]
    state, held = SessionState(), []
    for step in played.steps:
        assert (step.waiting_reasons or {}).get("lora", 0) <= step.num_waiting
    for _, message in played.messages:
        if state.apply(message) is not None:
            held.append({v.client_id: v.held for v in state.requests.values() if v.held})
    expected = [names for names, has_run in zip(told, played.ran, strict=True) if has_run]
    assert [sorted(each) for each in held] == expected
    assert {"2": "lora: a", "3": "lora: a"} in held
    late = {late.client_id: late for late in explained(played.messages).late if not late.token_idx}
    waited = "waited in the queue for a LoRA slot (max_loras), held by a"
    assert any(piece.text.startswith(waited) for piece in late["2"].pieces)
    for name in ("0", "1", "4", "5"):
        assert not any("LoRA" in piece.text for piece in late[name].pieces)
    share = history_of(played.messages).windows.sums(None, None).limits["lora"]
    assert share == sum(map(bool, expected)) / len(played.steps)
    path, picture = record(tmp_path / "adapters.mcap", played.messages), tmp_path / "step.txt"
    step = next(s.step for s in played.steps if (s.waiting_reasons or {}).get("lora") == 2)
    options = ["--page", "step", "--at", str(step), "--size", "140x50", "-o", str(picture)]
    assert stepscope("screenshot", str(path), *options).exit_code == 0
    assert picture.read_text().count("a LoRA slot (max_loras), held by a") == 2


def test_a_grammar_that_an_idle_engine_compiles_is_named_without_a_step(attach: Attach) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    attachment = attach(scheduler)
    watcher: Any = attachment.watcher
    play = scheduler.play()
    next(play)
    request = scheduler.requests["0"]
    request.status = SimpleNamespace(name="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
    vars(scheduler.deferred_waiting).update(held=[request], num_waiting=1)
    with attachment.notes.done():
        held = watcher.held_anew()
        assert watcher.held_anew() is None
        watcher.recorder.hold_between(held)
        attachment.core.heartbeat.publish_status("running")
    deque(play, 0)
    attachment.close()
    messages = published(attachment)
    held = [message.held for _, message in messages if isinstance(message, EngineStatus)]
    assert [rows for rows in held if rows] == [[HeldRow(0, "grammar")]]
    first = next(late for late in explained(messages).late if late.request_id == 0)
    said = "waited in the queue for a grammar to be compiled"
    assert said in [piece.text for piece in first.pieces]


@pytest.mark.parametrize(
    ("status", "connector", "reason"),
    [
        ("WAITING_FOR_REMOTE_KVS", None, "remote_kv"),
        ("WAITING_FOR_STREAMING_REQ", None, "input"),
        ("WAITING", object(), "remote_kv"),
        ("PREEMPTED", None, "deferred"),
    ],
)
def test_requests_that_vllm_passes_over_are_held_for_what_it_says_of_them(
    status: str, connector: object, reason: str
) -> None:
    request = SimpleNamespace(request_id="a", status=SimpleNamespace(name=status))
    scheduler: Any = SimpleNamespace(skipped_waiting=[request], connector=connector)
    assert scheduled.HeldRequests(scheduler).look(1) == {"a": reason}


def test_requests_that_vllm_0_33_passes_over_wait_for_the_encoder_and_nobody_behind_them_does(
    attach: Attach,
) -> None:
    reasons = {
        version: [step.waiting_reasons for step in Played(attach, version, "encoder").steps[:2]]
        for version in ("0.32.0", "0.33.0")
    }
    no_blocks = {"kv_blocks": 1, "queued": 2}
    assert reasons["0.32.0"] == [{"encoder": 1, "queued": 4}, no_blocks]
    # Then 3 would get its picture encoded, but has no blocks either.
    assert reasons["0.33.0"] == [{"kv_blocks": 1, "encoder": 2}, {"kv_blocks": 1, "queued": 1}]
    late = explained(Played(attach, "0.33.0", "encoder").messages).late
    said = {each.client_id: each.explanation for each in late if not each.token_idx}
    assert {name for name in said if "encoder budget" in said[name]} == {"1", "3"}
    assert {name for name in said if "for KV blocks" in said[name]} == {"3", "5"}


@pytest.mark.parametrize(
    ("state", "held"),
    [
        ({}, {"a": "encoder"}),
        ({"num_stale_output_tokens": 2}, {"a": "deferred"}),
        ({"ec_connector": object()}, {"a": "deferred"}),
        ({"connector": object()}, {"a": "remote_kv"}),
        ({"num_tokens": 113}, {}),  # does not fit into seven blocks
    ],
)
def test_a_picture_is_waited_for_only_if_nothing_else_is(
    state: dict[str, object], held: dict[str, str]
) -> None:
    status = SimpleNamespace(name="WAITING")
    picture = {"request_id": "a", "status": status, "has_encoder_inputs": True, "num_tokens": 100}
    pool = SimpleNamespace(get_num_free_blocks=lambda: 7)
    manager = SimpleNamespace(block_pool=pool)
    request = SimpleNamespace(**picture | state)
    own = {"deferred_waiting": [request], "kv_cache_manager": manager, "block_size": 16}
    scheduler: Any = SimpleNamespace(**own | state)
    assert scheduled.HeldRequests(scheduler).look(1) == (held or None)
    bound = scheduled.HeldRequests(scheduler).look(1, is_bound=True)
    assert bound == ({name: why for name, why in held.items() if why != "encoder"} or None)


def test_the_blocks_that_a_held_request_has_are_known_while_it_waits(attach: Attach) -> None:
    played = Played(attach, "0.32.0", "connector")
    loads = {k: v for line in played.scheduler.calls for k, v in line.get("loads", {}).items()}
    given = {name: sum(map(bool, chain(*tables))) for name, (_, tables) in loads.items()}
    state, seen = SessionState(), {}
    for _, message in played.messages:
        state.apply(message)
        waiting = [each for each in state.requests.values() if each.status == "waiting"]
        seen |= {each.client_id: each.num_blocks for each in waiting if each.held == "remote_kv"}
        if state.waiting_reasons is not None:
            held_blocks = sum(each.num_blocks for each in waiting)
            assert waiting_figures(state)["waiting_blocks"] == held_blocks
    assert seen == given
    assert set(given) == {"1", "3"}


def test_steps_that_vllm_keeps_free_of_prefills_are_named(attach: Attach) -> None:
    played = Played(attach, "0.33.0", "cadence")
    held = [step.held_prefills for step in played.steps]
    calls = played.scheduler.calls
    assert held == [line["held_prefills"] for line in calls if line.get("tokens")]
    assert set(held) == {True, False}
    assert {"cadence"} in [set(step.waiting_reasons or {}) for step in played.steps]
    for step in played.steps:
        assert not (step.held_prefills and step.num_prefill_tokens)
        assert "kv_blocks" not in (step.waiting_reasons or {})
    late = explained(played.messages).late
    said = " ".join(each.explanation for each in late if not each.token_idx)
    assert "waited in the queue for a step that takes prefills" in said
    assert "without prefills (prefill_schedule_interval)" in said


def test_the_prefill_cadence_of_vllm_0_33_changes_while_it_runs(attach: Attach) -> None:
    scheduler: Any = PlayedScheduler("0.33.0", "cadence")
    attachment = attach(scheduler)
    with pytest.raises(ConfigError, match="1 or more"):
        attachment.knobs.set({"prefill_schedule_interval": 0})
    attachment.knobs.set({"prefill_schedule_interval": 7})
    assert scheduler.local_prefill_interval == 7
    attachment.close()
    assert scheduler.local_prefill_interval == 4  # vLLM's own
    before = attach(PlayedScheduler("0.32.0", "chunked")).knobs
    with pytest.raises(ConfigError):
        before.changed({"prefill_schedule_interval": 7})


def test_a_request_overtaken_by_later_ones_waits_for_priority(attach: Attach) -> None:
    played = Played(attach, "0.32.0", "priority")
    told = [(s.step, [(row.request_id, row.reason) for row in s.held or []]) for s in played.steps]
    # 4 was admitted in step 4, before 2 and 3, which came earlier; 5 came last.
    assert [each for each in told if each[1]] == [(4, [(2, "priority"), (3, "priority")])]
    late = {late.client_id: late for late in explained(played.messages).late if not late.token_idx}
    text = "later requests of higher priority went ahead"
    assert {name for name in late if text in late[name].explanation} == {"2", "3"}
    assert "for a seat (max_num_seqs)" in late["2"].explanation  # until then
    state, most = SessionState(), 0.0
    assert set(waiting_figures(state).values()) == {None}  # the engine has not said yet
    for _, message in played.messages:
        state.apply(message)
        state.knobs = {"policy": "priority"}
        most = max(most, waiting_figures(state)["waiting_priority"] or 0.0)
    assert most == 2


def test_a_step_without_prefills_and_a_full_encoder_are_not_taken_for_missing_blocks() -> None:
    decoding, prefilling = (SimpleNamespace(is_prefill_chunk=each) for each in (False, True))
    scheduler: Any = SimpleNamespace(running=[prefilling], prefill_capacity_bound=False)
    assert not scheduled.leaves_out_prefills(scheduler, is_throttled=True)
    scheduler.running.append(decoding)
    assert scheduled.leaves_out_prefills(scheduler, is_throttled=True)
    assert not scheduled.leaves_out_prefills(scheduler, is_throttled=False)
    scheduler.prefill_capacity_bound = True
    assert not scheduled.leaves_out_prefills(scheduler, is_throttled=True)

    picture = SimpleNamespace(request_id="a", has_encoder_inputs=True, num_tokens=100)
    pool = SimpleNamespace(get_num_free_blocks=lambda: 7)
    scheduler.max_num_encoder_input_tokens, scheduler.block_size = 512, 16
    scheduler.waiting = [SimpleNamespace(request_id="held"), picture]
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=pool)
    assert scheduled.lacks_encoder_budget(scheduler, {"held"})
    picture.num_tokens = 113  # does not fit into seven blocks
    assert not scheduled.lacks_encoder_budget(scheduler, {"held"})
