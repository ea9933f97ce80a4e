"""The screens count accepted drafts, what rejected ones took, and what speculation bought."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import BatchRow, DraftRow, Phase, StepRecord
from stepscope.recordings import samples
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.history.history import History
from stepscope.recordings.session.drafts import DraftCount, Speculation
from stepscope.tui.views.panels.inspector import draft_lines
from tests.adapters.conftest import Attach, attach
from tests.adapters.test_vllm_schedules import Played

__all__ = ["attach"]  # a fixture
MS = 1_000_000


@pytest.mark.parametrize(
    ("drafts", "said"),
    [
        (
            [DraftRow(1, 4, 3), DraftRow(2, 3, 0)],
            "drafts 3 of 7 accepted, 4 tokens of budget wasted",
        ),
        ([DraftRow(1, 4, 4)], "drafts 4 of 4 accepted"),
        (None, ""),
    ],
)
def test_the_step_page_sums_the_drafts_of_requests(
    drafts: list[DraftRow] | None, said: str
) -> None:
    counts = {"num_prefill_tokens": 0, "num_decode_tokens": 9, "num_running": 2, "num_waiting": 0}
    record = StepRecord(step=3, schedule_start_ns=1, tokens_ns=2, drafts=drafts, **counts)
    text = "".join(text for line in draft_lines(record) for text, _ in line)
    assert " ".join(text.split()) == said


def by_hand(steps: list[StepRecord]) -> tuple[list[DraftCount], dict[int, DraftCount]]:
    """Drafts checked and accepted, by position and by request, counted one by one."""
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    of_request: dict[int, DraftCount] = {}
    for row in (row for step in steps for row in step.drafts or ()):
        drafted.update(range(row.num_drafted))
        accepted.update(range(row.num_accepted))
        before, now = of_request.get(row.request_id, (0, 0)), (row.num_drafted, row.num_accepted)
        of_request[row.request_id] = DraftCount(before[0] + now[0], before[1] + now[1])
    return [DraftCount(drafted[at], accepted[at]) for at in sorted(drafted)], of_request


def check_counts(found: Speculation | None, steps: list[StepRecord]) -> None:
    positions, of_request = by_hand(steps)
    assert found.positions == positions
    assert found.requests == of_request
    assert found.total == tuple(map(sum, zip(*of_request.values(), strict=True)))
    alone = [step for step in steps if step.num_decode_tokens and not step.num_prefill_tokens]
    assert sum(group.num_steps for group in found.groups) == len(alone)


@pytest.mark.parametrize("sample", ["speculation", "freeze"])
def test_drafts_of_our_engine_are_counted_by_position_request_and_batch_size(sample: str) -> None:
    history, steps = History(), []
    with Recording(samples.shipped()[sample]) as recording:
        for frame, _ in recording.frames():
            message = wire.decode(frame.payload)
            history.append(frame.sequence, message)
            steps += [message] if isinstance(message, StepRecord) else []
    found, figures = history.speculation(None, None), history.windows.figures(None, None)
    if sample == "freeze":
        assert found is None
        assert (figures["draft_acceptance"], figures["tokens_per_decode"]) == (None, 1.0)
        return
    check_counts(found, steps)
    copying = found.groups[0]  # at the end one copy runs on alone
    assert copying.high == 1
    assert copying.tokens_per_decode > 3
    assert figures["draft_acceptance"] == found.total.share


@pytest.mark.parametrize("case", ["speculation", "speculation_ahead"])
def test_drafts_of_an_attached_vllm_are_counted_in_the_same_way(attach: Attach, case: str) -> None:
    played = Played(attach, "0.32.0", case)
    history = History()
    for sequence, message in played.messages:
        history.append(sequence, message)
    check_counts(history.speculation(None, None), played.steps)


def made_up(draft_ms: float, *, always: bool = False) -> History:
    """4 or 16 requests decode; each has 0 to 4 drafts in a step, of which half are right.

    Args:
        always: each has 4 drafts in every step.
    """
    history, now_ns = History(), 0
    for number in range(200):
        num_rows, num_drafts = (4, 16)[number // 100], 4 if always else number % 5
        took_ns = round((2 + 0.1 * num_rows + draft_ms * num_drafts * num_rows) * MS)
        num_right = num_drafts // 2
        rows = [
            BatchRow(each, int(Phase.DECODE), 10 + number, 1 + num_right, 0, 1, 1)
            for each in range(num_rows)
        ]
        drafts = [DraftRow(each, num_drafts, num_right) for each in range(num_rows)]
        record = StepRecord(
            step=number,
            schedule_start_ns=now_ns,
            tokens_ns=now_ns + took_ns,
            num_prefill_tokens=0,
            num_decode_tokens=num_rows * (1 + num_drafts),
            num_running=num_rows,
            num_waiting=0,
            batch=rows,
            drafts=drafts if num_drafts else None,
        )
        history.append(number, record)
        now_ns += took_ns
    return history


def test_speculation_stops_paying_where_drafts_take_longer_than_their_tokens_are_worth() -> None:
    found = made_up(draft_ms=0.15).speculation(None, None)
    assert [(each.low, each.high) for each in found.groups] == [(3, 4), (9, 16)]
    assert [each.tokens_per_decode for each in found.groups] == [1.8, 1.8]
    # Two drafts on average; without them the steps take 2.4 and 3.6 ms.
    assert [each.extra for each in found.groups] == pytest.approx([1.2 / 2.4, 4.8 / 3.6])
    assert [each.gain for each in found.groups] == pytest.approx([1.8 / 1.5, 1.8 / (8.4 / 3.6)])
    assert found.pays_up_to == 4
    cheap = made_up(draft_ms=0.0).speculation(None, None)
    assert [each.gain for each in cheap.groups] == pytest.approx([1.8, 1.8])
    assert cheap.pays_up_to == 16
    # Where every request always has drafts it is unknown what they cost.
    found = made_up(draft_ms=0.15, always=True).speculation(None, None)
    assert [(each.extra, each.gain) for each in found.groups] == [(None, None), (None, None)]
    assert found.pays_up_to is None


def test_the_latency_page_says_what_speculation_bought(tmp_path: Path, stepscope: Any) -> None:
    picture = tmp_path / "latency.txt"
    options = ["--page", "latency", "--size", "120x40", "-o", str(picture)]
    assert stepscope("screenshot", "speculation", *options).exit_code == 0
    text = picture.read_text()
    assert "accepted 308 of 547 drafts (56%)" in text
    assert "pays for up to 8 requests at once" in text
    assert stepscope("screenshot", "freeze", *options).exit_code == 0
    assert "speculation" not in picture.read_text()
