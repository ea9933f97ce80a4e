"""The ledger says who waited for what, who was preempted for whom, and at what cost."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Pause, Resume, Submit
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import EngineStatus, StepRecord, Telemetry
from stepscope.engine.scheduling.request import Request, RequestStatus
from stepscope.engine.scheduling.step_plan import StepPlan
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.compare.side import Side
from stepscope.recordings.history.history import History
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.session import SessionState
from tests.attribution.test_explain import MS, Script
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.seek_sessions import record
from tests.support.waiting import wait_for

Call = Callable[..., Any]

CROWD = SimulatedWorkload(rate=14.0, document_share=0.1, document_tokens=1500, output_tokens=90)


def ledger_of(messages: list[tuple[int, Telemetry]]) -> Ledger:
    ledger = Ledger(SessionState())
    for _, message in messages:
        ledger.take(message)
    return ledger


def preempted_once() -> Script:
    """r0 (prompt 2,000) and r1 (2,096) fill all 256 blocks; r0's next token takes r1's."""
    script = Script(256, reserve="none", enable_prefix_caching=False, max_num_batched_tokens=8192)
    script.submit(2000, 3)
    script.submit(2096, 2)
    script.run()
    script.submit(16, 2)  # r2 stands behind r1
    script.run(2)
    return script


def step_ns(num_tokens: int) -> int:
    return 8 * MS + 200_000 + num_tokens * 40_000  # 0.2 ms are the launch


def test_the_ledger_lists_each_waiting_request_since_when_for_what_and_how_many_behind_it() -> None:
    script = preempted_once()
    ledger = ledger_of(script.messages)
    records = [m for _, m in script.messages if isinstance(m, StepRecord)]
    first, second = ledger.waiting()
    assert (first.request_id, first.was_preempted, first.num_behind) == (1, True, 1)
    assert (second.request_id, second.was_preempted, second.num_behind) == (2, False, 0)
    assert first.since_ns == records[1].schedule_start_ns
    assert first.waited_ns(ledger.state.time_ns) == 2 * step_ns(1)
    assert first.reasons == {"preemption": step_ns(1), "kv_blocks": step_ns(1)}


def test_a_preemption_names_victim_beneficiary_and_cost() -> None:
    script = preempted_once()
    script.run(3)
    ledger = ledger_of(script.messages)
    (preemption,) = ledger.preemptions
    assert (preemption.request_id, preemption.beneficiary, preemption.step) == (1, 0, 1)
    assert (preemption.num_lost, preemption.num_blocks) == (2096, 131)
    assert (preemption.num_recomputed, preemption.num_from_cache) == (2096, 0)
    # The step that brought r1 back also computed its newest token, and the prompt of r2.
    num_tokens = 2096 + 1 + 16
    assert preemption.recompute_ns == pytest.approx(step_ns(num_tokens) * 2096 / num_tokens)
    admitted = [(wait.request_id, wait.step, wait.num_behind) for wait in ledger.admitted()]
    assert admitted[:2] == [(1, 3, 1), (2, 3, 0)]


def test_the_recompute_tax_is_a_share_of_all_tokens_and_of_the_time_in_steps() -> None:
    script = preempted_once()
    script.run(2)
    tax = ledger_of(script.messages).tax()
    steps = [2000 + 2096, 1, 1, 2096 + 1 + 16, 1]
    assert (tax.num_preemptions, tax.num_lost, tax.num_recomputed) == (1, 2096, 2096)
    assert tax.num_tokens == sum(steps)
    assert tax.step_ns == sum(map(step_ns, steps))
    assert tax.token_share == pytest.approx(2096 / sum(steps))
    assert tax.time_share == pytest.approx(step_ns(2113) * 2096 / 2113 / sum(map(step_ns, steps)))


def test_session_and_memory_figures_have_the_recompute_tax_of_the_ledger() -> None:
    messages = simulate(
        seed=2, num_steps=400, knobs=Knobs(reserve="prompt"),
        workload=SimulatedWorkload(rate=20.0, document_share=0.0, output_tokens=100),
        num_blocks=128, max_model_len=2032,
    )  # fmt: skip
    tax = ledger_of(messages).tax().time_share
    assert tax > 0.01
    history, side = History(), Side("run", SLO(), SessionState())
    for sequence, message in messages:
        history.append(sequence, message)
        side.apply(message)
    figure = history.windows.figures(None, None)["recompute_tax"]
    assert figure == pytest.approx(side.figures()["recompute_tax"])
    # The figure counts whole chunks. The last one also computes the newest output token, which
    # was not in the cache before.
    assert tax < (figure or 0.0) < tax * 1.03


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("has_cache", [True, False])
def test_the_beneficiary_of_a_preemption_is_the_request_it_made_room_for(
    monkeypatch: pytest.MonkeyPatch, policy: Any, has_cache: bool
) -> None:
    truth: list[tuple[int, int]] = []  # victim, beneficiary
    grow, preempt = StepPlan._grow, StepPlan._preempt
    wanting: list[int] = []

    def watched_grow(plan: StepPlan, request: Request, num_tokens: int) -> bool:
        wanting[:] = [request.request_id]
        return grow(plan, request, num_tokens)

    def watched_preempt(plan: StepPlan, request: Request) -> None:
        assert request.status is RequestStatus.RUNNING
        truth.append((request.request_id, wanting[0]))
        preempt(plan, request)

    monkeypatch.setattr(StepPlan, "_grow", watched_grow)
    monkeypatch.setattr(StepPlan, "_preempt", watched_preempt)
    varied = {"policy": policy, "enable_prefix_caching": has_cache}
    knobs = Knobs(max_num_batched_tokens=512, reserve="none", **varied)
    small = {"num_blocks": 200, "max_model_len": 2048}
    ledger = ledger_of(simulate(seed=5, num_steps=700, knobs=knobs, workload=CROWD, **small))
    assert len(truth) > 10
    assert [(each.request_id, each.beneficiary) for each in ledger.preemptions] == truth
    ended = {view.request_id for view in ledger.state.requests.values() if view.finish_reason}
    last = {each.request_id: each for each in ledger.preemptions if each.request_id in ended}
    assert last
    for each in last.values():
        assert each.num_lost == each.num_recomputed + each.num_from_cache


def test_what_an_engine_does_not_publish_stays_unknown() -> None:
    messages = preempted_once().messages

    def without(*kinds: type, **values: Any) -> list[tuple[int, Telemetry]]:
        replace = msgspec.structs.replace
        return [(n, replace(m, **values) if isinstance(m, kinds) else m) for n, m in messages]

    messages = without(StepRecord, EngineStatus, kv=None)
    bare = without(StepRecord, waiting_reasons=None, moves=[])
    ledger = ledger_of(bare)
    assert ledger.preemptions[0].beneficiary is None
    assert set(ledger.waiting()[0].reasons) == {""}
    ledger = ledger_of(without(StepRecord, batch=None, events=[]))
    assert not ledger.publishes_requests
    assert ledger.tax().token_share is None


def test_a_recording_that_begins_after_a_preemption_counts_its_recompute() -> None:
    script = preempted_once()
    state = SessionState()
    for _, message in script.messages:
        state.apply(message)
    num_before = len(script.messages)
    script.run(2)
    ledger = Ledger(state)
    for _, message in script.messages[num_before:]:
        ledger.take(message)
    (preemption,) = ledger.preemptions
    assert (preemption.step, preemption.num_lost, preemption.beneficiary) == (None, None, None)
    assert preemption.num_recomputed == 2097  # how many of them are new is unknown
    assert ledger.tax().num_preemptions == 0


def test_a_request_whose_end_was_lost_waits_no_longer() -> None:
    script = preempted_once()
    ledger = ledger_of(script.messages)
    script.run(300)
    state = SessionState()
    for _, message in script.messages:
        state.apply(message)
    state.requests.clear()  # long after r1 has ended
    ledger.take(state.snapshot(script.messages[-1][0]), after_gap=True)
    assert ledger.preemptions[0].num_recomputed == 0
    assert ledger.waiting() == []


def test_explain_queue_shows_a_recording(tmp_path: Path, stepscope: Call) -> None:
    script = preempted_once()
    file = record(tmp_path / "waiting.mcap", script.messages)
    text = stepscope("explain", "--queue", str(file)).stdout
    assert "waiting by the end: 2" in text
    assert "r1 (preempted)" in text
    assert "KV blocks 8.2 ms" in text
    script.run(3)
    file = record(tmp_path / "back.mcap", script.messages)
    found = json.loads(stepscope("explain", "--queue", str(file), "--json").stdout)
    assert found["waiting"] == []
    assert found["preemptions"][0]["beneficiary"] == 0
    assert found["recompute_tax"]["num_recomputed"] == 2096
    done = stepscope("explain", "--queue", str(file), "--seconds", "0.02", "--json")
    last = json.loads(done.stdout)
    assert last["recompute_tax"]["step_ms"] < found["recompute_tax"]["step_ms"]


@pytest.mark.slow
def test_explain_queue_counts_a_storm_of_preemptions(live_engine: Any, stepscope: Call) -> None:
    endpoint = live_engine.endpoint.control
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    with ControlClient(live_engine.endpoint) as client:
        client.ask(Pause())  # all requests arrive together, however busy the machine is
        for number in range(40):
            client.send(Submit(prompt_token_ids=[number] * 120, sampling=sampling))
        client.ask(Resume())
        wait_for(lambda: time.sleep(0.05) or not client.snapshot().requests, "the end of all")
    found = json.loads(stepscope("explain", "--queue", endpoint, "--json").stdout)
    assert found["recompute_tax"]["num_preemptions"] > 10
    figures = json.loads(stepscope("stats", endpoint, "--json").stdout)["figures"]
    assert found["recompute_tax"]["num_preemptions"] == figures["preemptions"]
    for each in found["preemptions"]:
        assert each["num_lost"] == each["num_recomputed"] + each["num_from_cache"]
        assert each["beneficiary"] is not None
    assert found["waiting"] == []
    assert found["num_admitted"] == 40 + found["recompute_tax"]["num_preemptions"]
    late = json.loads(stepscope("explain", endpoint, "--slo-itl", "1ms", "--json").stdout)
    assert late["recording"] == live_engine.endpoint.name
    assert late["requests"]["num_late"] > 0


def test_the_queue_and_a_late_first_token_tell_of_one_wait_alike(stepscope: Call) -> None:
    queue = json.loads(stepscope("explain", "vllm", "--queue", "--json").stdout)
    found = json.loads(stepscope("explain", "vllm", "--json").stdout)
    first = {each["request_id"]: each["pieces"] for each in found["late"] if each["kind"] == "TTFT"}
    both = [each for each in queue["longest_waits"] if each["request_id"] in first]
    assert any("held_up" in wait["for_ms"] for wait in both)
    for wait in both:
        budget = [each["ms"] for each in first[wait["request_id"]] if each["detail"] == "budget"]
        assert wait["for_ms"].get("budget") == (budget[0] if budget else None)
