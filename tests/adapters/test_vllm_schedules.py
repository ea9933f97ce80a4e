"""Telemetry of schedules recorded from several releases of a real vLLM."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.attribution.explain import Explainer
from stepscope.recordings.attribution.ledger import Ledger
from stepscope.recordings.check.verify import verify
from stepscope.recordings.state.session import SessionState
from tests.adapters.conftest import Attach, published
from tests.adapters.laws import check_computed_tokens, check_no_token_id, check_rows
from tests.adapters.played_vllm import SCHEDULES, SECRET_TOKEN, PlayedScheduler
from tests.attached.published import Published
from tests.support.sessions.seek_sessions import record

VERSIONS = sorted({path.name.split("-")[0] for path in SCHEDULES.glob("*.jsonl")})
CASES = ("chunked", "preemption", "prefix", "abort", "asynchronous")


class Played(Published):
    """One recorded schedule, played to its end with stepscope attached.

    Args:
        is_read_late: notes are read only where they must be read at once.
        prepare: called with the scheduler before stepscope attaches.
        each: called with the scheduler and the line of each call that was made.
    """

    def __init__(
        self,
        attach: Attach,
        version: str,
        case: str,
        *,
        is_read_late: bool = False,
        prepare: Callable[[PlayedScheduler], object] = lambda scheduler: None,
        each: Callable[[PlayedScheduler, dict[str, Any]], object] = lambda scheduler, line: None,
        with_snapshot: bool = False,
    ) -> None:
        self.scheduler = scheduler = PlayedScheduler(version, case)
        prepare(scheduler)
        self.attachment = attach(scheduler)
        self.num_used: list[int] = []  # blocks in use after each update, as vLLM counts them
        self.budgets: list[int] = []  # in force at each `schedule()` that ran something
        with self.attachment.notes.done() if is_read_late else nullcontext():
            for line, call in zip(scheduler.calls, scheduler.play(), strict=True):
                assert self.attachment.is_attached
                if call == "update":
                    self.num_used.append(scheduler.head["num_blocks"] - 1 - scheduler.num_free)
                if call == "schedule" and scheduler.outputs[-1].num_scheduled_tokens:
                    self.budgets.append(scheduler.max_num_scheduled_tokens)
                each(scheduler, line)
        with self.attachment.notes.done():
            self.snapshot = self.attachment.core.snapshot() if with_snapshot else None
        self.attachment.close()
        self.messages = published(self.attachment)
        super().__init__([message for _, message in self.messages])

    @property
    def ran(self) -> list[bool]:
        """Whether each step ran something."""
        return [bool(output.num_scheduled_tokens) for output in self.scheduler.outputs]

    @property
    def scheduled(self) -> list[dict[str, int]]:
        """Tokens of each request in each step that ran something."""
        tokens = [output.num_scheduled_tokens for output in self.scheduler.outputs]
        return [each for each in tokens if each]

    @property
    def last(self) -> dict[str, list[Any]]:
        """The last state of each request: tokens computed, tokens, output tokens, status."""
        found: dict[str, list[Any]] = {}
        for line in self.scheduler.calls:
            found.update(line.get("requests", {}))
        return found


def explained(messages: Iterable[tuple[int, wire.Telemetry]]) -> Explainer:
    explainer = Explainer(0, 0)
    for _, message in messages:
        explainer.take(message)
    return explainer


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(path.stem for path in SCHEDULES.glob("*.jsonl")))
def played(attach: Attach, request: pytest.FixtureRequest) -> Played:
    return Played(attach, *request.param.split("-"))


def test_every_scheduled_token_is_told_and_none_by_its_id(played: Played, tmp_path: Path) -> None:
    check_rows(played, played.scheduled)
    for step, budget in zip(played.steps, played.budgets, strict=True):
        assert step.num_prefill_tokens + step.num_decode_tokens <= budget == step.token_budget
    check_computed_tokens(played)
    check_no_token_id(played.messages, SECRET_TOKEN)
    report = verify(record(tmp_path / "played.mcap", played.messages), lambda share: None)
    assert {check.name: check.problems for check in report.checks if check.problems} == {}
    assert report.blocks.num_checked == len(played.steps)


def test_every_request_has_the_finish_reason_that_vllm_gave_it(played: Played) -> None:
    names, last = played.names, played.last
    assert len(names) == len(played.of(wire.Arrived)) == len(set(names.values()))
    finished = {names[each.request_id]: each for each in played.of(wire.Finished)}
    aborted = {names[each.request_id] for each in played.of(wire.Aborted)}
    assert aborted == {name for name, state in last.items() if state[3] == "FINISHED_ABORTED"}
    assert finished.keys() == last.keys() - aborted
    assert all(each.num_output_tokens == last[name][2] for name, each in finished.items())
    reasons = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_STOPPED": "stop"}
    assert all(each.reason == reasons[last[name][3]] for name, each in finished.items())
    assert len(played.of(wire.Finished)) + len(played.of(wire.Aborted)) == len(names)


@pytest.mark.parametrize("is_read_late", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case != "asynchronous"])
def test_after_every_step_published_used_blocks_equal_those_of_vllm(
    attach: Attach, version: str, case: str, is_read_late: bool
) -> None:
    played = Played(attach, version, case, is_read_late=is_read_late)
    used = [step.kv.used for step in played.steps]
    assert used == [used for used, ran in zip(played.num_used, played.ran, strict=True) if ran]
    assert max(used) > 0


def test_a_step_is_under_way_until_vllm_has_finished_it(attach: Attach) -> None:
    scheduler = PlayedScheduler("0.32.0", "chunked")
    attachment = attach(scheduler)
    for call in scheduler.play():
        with attachment.notes.done():
            step: Any = attachment.watcher.recorder.step_under_way
        if call != "schedule" or not (tokens := scheduler.outputs[-1].num_scheduled_tokens):
            assert step is None
            continue
        said = step.message(step.since_ns + 5_000_000_000)
        assert said.token_budget == scheduler.max_num_scheduled_tokens
        assert said.num_prefill_tokens + said.num_decodes == sum(tokens.values())


def test_published_preemptions_are_vllms_with_what_they_cost(attach: Attach, version: str) -> None:
    played = Played(attach, version, "preemption")
    expected = sum(len(call.get("preempted", ())) for call in played.scheduler.calls)
    assert len(played.of(wire.Preempted)) == expected > 2
    num_computed: Counter[int] = Counter()
    recomputed: set[int] = set()
    for step in played.steps:
        for row in step.batch or ():
            is_again = row.start < num_computed[row.request_id]
            assert (row.phase == wire.Phase.RECOMPUTE) is is_again
            end = row.start + row.num_tokens
            num_computed[row.request_id] = max(num_computed[row.request_id], end)
            recomputed |= {row.request_id} if is_again else set()
    assert recomputed
    assert recomputed <= played.preempted
    ledger = Ledger(SessionState())
    for _, message in played.messages:
        ledger.take(message)
    assert len(ledger.preemptions) == expected
    for each in ledger.preemptions:
        assert each.num_lost == each.num_recomputed + each.num_from_cache
        assert each.beneficiary is not None
    assert ledger.waiting() == []
    assert ledger.num_admitted == len(played.of(wire.Admitted))


def test_prefix_hits_and_evictions_equal_those_of_vllm(attach: Attach, version: str) -> None:
    played = Played(attach, version, "prefix")
    hits = {played.names[number]: count for number, count in played.cached.items()}
    news = [new for output in played.scheduler.outputs for new in output.scheduled_new_reqs]
    assert hits == {new.req_id: new.num_computed_tokens for new in news}
    assert sum(map(bool, hits.values())) > 3
    counts: list[Any] = [step.kv for step in played.steps]
    assert sum(kv.hit_tokens for kv in counts) == sum(hits.values())
    cached: set[int] = set()  # as before the call
    num_evicted = 0
    for line in played.scheduler.calls:
        for _, (blocks,), num_hit_tokens in line.get("new", ()):
            num_evicted += len(cached.intersection(blocks[num_hit_tokens // 16 :]))
        for _, groups, _ in line.get("again", ()):
            num_evicted += len(cached.intersection(groups[0] if groups else ()))
        cached.difference_update(line.get("unhashed", ()))
        cached.update(line.get("hashed", ()))
    assert sum(kv.evicted for kv in counts) == num_evicted > 0


def test_rows_of_requests_aborted_in_flight_are_wasted(attach: Attach, version: str) -> None:
    played = Played(attach, version, "asynchronous")
    assert played.aborted
    assert sum(step.num_wasted_tokens or 0 for step in played.steps) > 0
    assert any(step.hidden_ns is not None for step in played.steps)
    ended_at = {
        event.request_id: number
        for number, message in played.messages
        for event in getattr(message, "events", ())
        if isinstance(event, wire.Aborted | wire.Finished)
    }
    for number, message in played.messages:
        if isinstance(message, wire.StepRecord):
            assert all(ended_at[row.request_id] >= number for row in message.batch or ())


def outcomes_of(played: Played) -> list[Any]:
    session = SessionState()
    return [found for _, m in played.messages if (found := session.apply(m)) is not None]


def test_output_is_what_vllm_accepted_not_what_was_drafted(attach: Attach) -> None:
    played = Played(attach, "0.32.0", "speculation")
    drafts = [draft for step in played.steps for draft in step.drafts or ()]
    assert any(0 < draft.num_accepted < draft.num_drafted for draft in drafts)
    num_output = sum(outcome.num_output_tokens for outcome in outcomes_of(played))
    assert num_output == sum(state[2] for state in played.last.values())


def test_a_request_that_only_reads_its_prompt_has_no_token_and_no_ttft(attach: Attach) -> None:
    played = Played(attach, "0.32.0", "pooling")
    assert not played.of(wire.FirstToken)
    outcomes = outcomes_of(played)
    assert not any(each.num_output_tokens or each.ttft_ns for each in outcomes)
    assert sum(len(each.e2e_ns) for each in outcomes) == 4
    assert [each.num_cut_rows for each in outcomes] == [1, 1, 0, 0]


def test_an_abort_of_a_request_with_stop_strings_may_be_its_stop(attach: Attach) -> None:
    def stops(scheduler: PlayedScheduler, line: dict[str, Any]) -> None:
        for request in scheduler.requests.values():
            stop = ["\n\n"] if request.request_id == "2" else []
            request.sampling_params = SimpleNamespace(stop=stop)

    played = Played(attach, "0.32.0", "abort", each=stops)
    reasons = {played.names[each.request_id]: each.reason for each in played.of(wire.Aborted)}
    assert reasons.pop("2") == "by a stop string, or its client left"
    assert set(reasons.values()) == {"aborted in vLLM"}
