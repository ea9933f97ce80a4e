"""Telemetry of an attached SGLang equals what its scheduler did."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.recordings.check.verify import verify
from tests.adapters.conftest import AttachSglang, published
from tests.adapters.laws import check_computed_tokens, check_no_token_id, check_rows
from tests.adapters.sglang_objects import PAGE, AbortReq, TokenizedGenerateReqInput
from tests.adapters.sglang_stand_in import SECRET_TOKEN, Scheduler, turn
from tests.attached.published import Published
from tests.support.sessions.seek_sessions import record

LOOPS: dict[str, dict[str, bool]] = {
    "normal": {},
    "overlap": {"overlap": True},
    "mixed": {"mixed": True},
    "overlap, mixed": {"overlap": True, "mixed": True},
}
NUM_PAGES = 20  # so few that requests are retracted
SHARED = [7] * 8  # two pages of every prompt


class Run(Published):
    """Twelve requests with a shared prefix in a small KV pool; three of them are aborted.

    Attributes:
        first: the state before them.
        aborted_when: by id, what the request did when the abort came.
    """

    def __init__(self, attach: AttachSglang, loop: str) -> None:
        self.scheduler = Scheduler(num_pages=NUM_PAGES, **LOOPS[loop])  # type: ignore[arg-type]
        attachment: Any = attach(self.scheduler)
        came = [
            TokenizedGenerateReqInput(
                f"r{i}", SHARED + [i] * (5 + i * 7 % 30), 6 + i % 9, 3 if i % 5 == 0 else None
            )
            for i in range(12)
        ]
        self.first = attachment.core.snapshot()
        self.aborted_when: dict[str, str] = {}
        while came or self.scheduler.has_work:
            turn([self.scheduler], *came[:1], *self._aborts())
            del came[:1]
            assert attachment.is_attached
        attachment.close()
        self.messages = published(attachment)
        super().__init__([message for _, message in self.messages])

    def _aborts(self) -> list[AbortReq]:
        """Abort at most one request a turn: the first in a state in which none was aborted yet."""
        scheduler = self.scheduler
        states = {
            "in a chunk": [scheduler.chunked_req],
            "waiting": scheduler.waiting_queue[1:],
            "running": scheduler.running_batch.reqs,
        }
        for state, reqs in states.items():
            if len(scheduler.requests) > 4 and state not in self.aborted_when.values():
                for req in reqs:
                    if req is not None and not req.finished() and req.rid not in self.aborted_when:
                        self.aborted_when[req.rid] = state
                        return [AbortReq(req.rid)]
        return []


@pytest.fixture(params=LOOPS)
def run(attach_sglang: AttachSglang, request: pytest.FixtureRequest) -> Run:
    return Run(attach_sglang, request.param)


def test_every_token_of_a_batch_is_in_a_row_or_counted_as_wasted(run: Run) -> None:
    check_rows(run, run.scheduler.scheduled)
    for step in run.steps:
        if step.num_prefill_tokens:
            assert step.num_prefill_tokens + step.num_decode_tokens <= step.token_budget == 16
    check_computed_tokens(run)
    check_no_token_id(run.messages, SECRET_TOKEN)
    # Only with overlap a request may end while it is in flight.
    is_ahead = run.scheduler.enable_overlap
    assert any(step.num_wasted_tokens for step in run.steps) is is_ahead
    assert any(step.hidden_ns is not None for step in run.steps) is is_ahead


def test_every_request_has_the_finish_reason_that_sglang_gave_it(run: Run) -> None:
    aborted = {run.names[number] for number in run.aborted}
    assert aborted == run.aborted_when.keys()
    assert len(run.aborted) == 3
    found = {run.names[each.request_id]: each for each in run.of(wire.Finished)}
    ends = {rid: (each.reason, each.num_output_tokens) for rid, each in found.items()}
    reqs = {req.rid: (req.finished_reason.type, req) for req in run.scheduler.requests}
    assert {rid for rid, (reason, _) in reqs.items() if reason == "abort"} == aborted
    rest = [(rid, end) for rid, end in reqs.items() if rid not in aborted]
    assert ends == {rid: (reason, len(req.output_ids)) for rid, (reason, req) in rest}
    assert {reason for reason, _ in ends.values()} == {"stop", "length"}
    assert len(run.of(wire.Finished)) + len(run.aborted) == len(run.names) == 12


def test_sglangs_retractions_are_published_as_preemptions_with_their_recompute(run: Run) -> None:
    preempted = [run.names[each.request_id] for each in run.of(wire.Preempted)]
    assert Counter(preempted) == Counter(run.scheduler.retracted)
    assert {each.reason for each in run.of(wire.Preempted)} == {"out of KV blocks"}
    rows = [row for step in run.steps for row in step.batch or ()]
    again = {row.request_id for row in rows if row.phase == wire.Phase.RECOMPUTE}
    assert run.preempted - set(run.aborted) <= again <= run.preempted


def test_published_prefix_hits_equal_those_of_sglangs_radix_cache(run: Run) -> None:
    hits = {run.names[number]: count for number, count in run.cached.items()}
    assert sum(step.kv.hit_tokens for step in run.steps) == sum(hits.values()) > 4 * PAGE
    for rid in [rid for rid, state in run.aborted_when.items() if state == "in a chunk"]:
        # With overlap its only chunk was wasted, so it was never admitted.
        assert hits.pop(rid, None) in (None, run.scheduler.hits.pop(rid))
    assert hits == run.scheduler.hits


def test_after_every_step_published_used_and_evicted_pages_equal_those_of_sglang(run: Run) -> None:
    info, num_evicted = run.infos[0], 0
    assert (info.engine, info.num_blocks, info.block_size) == ("sglang", None, PAGE)
    assert run.first.blocks is None  # only page counts are known
    for step, (used, evicted) in zip(run.steps, run.scheduler.num_used, strict=True):
        assert step.kv.used == used
        assert step.kv.used + step.kv.cached + step.kv.empty == NUM_PAGES
        num_evicted += step.kv.evicted
        assert num_evicted == evicted
    assert num_evicted > 0


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_recording_of_sglang_passes_verify(run: Run, tmp_path: Path, is_joined: bool) -> None:
    messages = run.messages
    if is_joined:  # it begins with a snapshot, as the recording of a running engine does
        first = run.first.sequence
        messages = [(first, run.first), *((n, m) for n, m in messages if n > first)]
    report = verify(record(tmp_path / "run.mcap", messages), lambda share: None)
    assert {check.name: check.problems for check in report.checks if check.problems} == {}
