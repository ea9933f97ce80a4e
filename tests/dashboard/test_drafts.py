"""The step page counts accepted drafts, and the budget that rejected ones took."""

from stepscope.engine.protocol.wire import DraftRow, StepRecord
from stepscope.tui.views.panels.inspector import draft_lines


def text_of(drafts: list[DraftRow] | None) -> str:
    record = StepRecord(
        step=3,
        schedule_start_ns=1,
        tokens_ns=2,
        num_prefill_tokens=0,
        num_decode_tokens=9,
        num_running=2,
        num_waiting=0,
        drafts=drafts,
    )
    return "".join(text for line in draft_lines(record) for text, _ in line)


def test_the_step_page_sums_accepted_and_rejected_drafts_of_all_requests() -> None:
    text = text_of([DraftRow(1, 4, 3), DraftRow(2, 3, 0)])
    assert " ".join(text.split()) == "drafts 3 of 7 accepted, 4 tokens of budget wasted"


def test_the_step_page_names_rejected_drafts_only_if_there_are_any() -> None:
    assert " ".join(text_of([DraftRow(1, 4, 4)]).split()) == "drafts 4 of 4 accepted"


def test_the_step_page_has_no_drafts_line_for_a_step_without_drafts() -> None:
    assert text_of(None) == ""
