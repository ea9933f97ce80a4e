"""Narrow lines about a late token or a step drop whole fields and never cut a number."""

import re

import pytest

from stepscope.recordings.attribution.causes import Late, Piece
from stepscope.tui.views import late_text
from stepscope.tui.views.lines import Field, length_of, whole

MS = 1_000_000
LATE = Late(
    request_id=33,
    client_id="chat-1",
    token_idx=7,
    step=184_201,
    start_ns=0,
    end_ns=900 * MS,
    bound_ns=50 * MS,
    pieces=(
        Piece("between", 0, 2 * MS, 184_190),
        Piece("prefill", 2 * MS, 500 * MS, 184_191, 3, request_id=12, num_tokens=4096),
        Piece("queued", 502 * MS, 301 * MS, 184_194, 5, "seats"),
        Piece("step", 803 * MS, 21 * MS, 184_199, 5),
        Piece("held_up", 824 * MS, 76 * MS, 184_202, 1, took_ns=80 * MS, baseline_ns=4 * MS),
    ),
)
PREEMPTED = LATE._replace(
    pieces=(
        Piece("preempted", 0, 600 * MS, 184_190, 9, "kv_blocks"),
        Piece("recompute", 600 * MS, 300 * MS, 184_199, 2, num_tokens=1172),
    )
)
FULL_OF = {
    LATE: "step 184,201 prefill r12 4096 tok → ITL 900 ms",
    PREEMPTED: "step 184,201 r33 preempted, 1,172 tok again → ITL 900 ms",
}


def numbers(text: str) -> list[str]:
    return re.findall(r"[\d,.]*\d", text)


def test_a_wait_is_explained_in_full_if_there_is_room() -> None:
    assert late_text.of_wait(LATE, 400) == LATE.explanation


def test_short_lines_about_a_slow_step_keep_its_factor_if_it_fits() -> None:
    slow = LATE.pieces[-1]
    full = "the machine or the engine was held up: 1 step took 20x as long as is usual for its work"
    assert late_text.of_piece(slow, 200) == slow.text == f"{full} (4.0 ms)"
    assert late_text.of_piece(slow, 60).endswith("held up (20x as long as usual)")
    assert late_text.of_piece(slow, 35) == "held up (20x as long as usual)"
    assert late_text.of_piece(slow, 10) == "held up"


@pytest.mark.parametrize("late", [LATE, PREEMPTED], ids=["shared", "preempted"])
def test_a_wait_is_explained_in_whole_words_with_its_largest_cause_first(late: Late) -> None:
    for room in range(34, 240):
        text = late_text.of_wait(late, room)
        assert len(text) <= room
        first = max(late.pieces, key=lambda piece: piece.ns)
        assert text.startswith(f"{first.ns / 1e6:.1f} ms ")
        assert ("r12" if first.cause == "prefill" else "preempted") in text
        *told, last = text.split("; ")
        told_in_full = {n for piece in late.pieces for n in numbers(piece.text + piece.short)}
        for part in [*told, last]:
            ms = float(part.split(" ms ")[0])
            if re.fullmatch(r".* ms in \d more", part):
                ns = sorted((piece.ns for piece in late.pieces), reverse=True)[len(told) :]
                assert (ms, part[-6:]) == (sum(ns) / MS, f"{len(ns)} more")
            else:
                assert ms in [piece.ns / MS for piece in late.pieces]
                assert set(numbers(part)[1:]) <= told_in_full


def test_causes_without_room_are_summed_up() -> None:
    first, second = "500.0 ms prefill r12 4096 tok", "; 301.0 ms queued for a seat"
    assert late_text.of_wait(LATE, 60) == first + second
    assert late_text.of_wait(LATE, 50) == f"{first}; 400.0 ms in 4 more"
    waited = "600.0 ms preempted, waited for KV blocks"
    assert late_text.of_wait(PREEMPTED, 80) == f"{waited}; 300.0 ms preempted, 1172 tok again"
    assert late_text.of_wait(PREEMPTED, 39) == "600.0 ms preempted"  # no reason rather than half


@pytest.mark.parametrize("late", FULL_OF, ids=["shared", "preempted"])
def test_a_stall_described_in_one_line_keeps_its_duration(late: Late) -> None:
    for room in range(80):
        text, full = late_text.of_stall(late, room), FULL_OF[late]
        assert len(text) <= room
        if room >= len(full):
            assert text == full
        elif room >= len("ITL 900 ms"):
            assert text.endswith("ITL 900 ms")
            assert "step" not in text or text.startswith(f"step {late.step:,} ")
        else:
            assert text == ""
        if room >= 28:
            assert ("r12" if late is LATE else "preempted") in text


def test_fields_of_a_narrow_line_are_shown_whole_or_not_at_all() -> None:
    for width in range(1, 30):
        ranks = {"a": 0, "123": 2, "45": 1}
        fields = [Field(rank, ((f" {text}", "text"),)) for text, rank in ranks.items()]
        line = whole(fields, width)
        words = "".join(text for text, _ in line).split()
        assert words == (["a", "123", "45"] if width >= 9 else ["a", "45"] if width >= 5 else ["a"])
        assert length_of(line) <= width or words == ["a"]
