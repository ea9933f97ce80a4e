"""The notice line: new notices stay readable, and standing problems are not lost."""

import pytest

from stepscope.tui.views.lines import Line
from stepscope.tui.views.notices import _SHOWN_S, Notices, Tone

DOWN: tuple[str, Tone] = (
    "engine-0 is down: nobody answers at ipc:///run/user/0/stepscope/engine-0",
    "caution",
)
FILE = "stepscope-engine-0-20261122-184917.mcap"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def text(line: Line) -> str:
    return "".join(part for part, _ in line)


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_path_of_a_written_file_is_shown_beside_a_standing_problem(width: int) -> None:
    notices = Notices(Clock())
    notices.say(f"recording ended: /home/op/incidents/november/gpu-7/{FILE}")
    alone, beside = text(notices.line([], width)), text(notices.line([DOWN], width))
    assert len(beside) <= width
    assert alone.endswith(f"/{FILE}")
    assert "engine-0 is down: nobo" in beside
    if width > 80:
        assert f"gpu-7/{FILE}  " in beside


def test_a_path_too_long_for_its_line_loses_whole_leading_folders() -> None:
    notices = Notices(Clock())
    notices.say("wrote a.mcap, 3 steps, in /home/operator/incidents/november")
    said = {width: text(notices.line([], width)).strip() for width in (80, 55, 40)}
    assert said[80] == "wrote a.mcap, 3 steps, in /home/operator/incidents/november"
    assert said[55] == "wrote a.mcap, 3 steps, in …/incidents/november"
    assert said[40] == "wrote a.mcap, 3 steps, in …/november"


def test_a_standing_problem_gets_the_whole_line_back_after_a_notice() -> None:
    clock = Clock()
    notices = Notices(clock)
    notices.say("x" * 100)
    assert DOWN[0] not in text(notices.line([DOWN], 120))
    clock.now_s += _SHOWN_S
    assert text(notices.line([DOWN], 120)) == " " + DOWN[0]


def test_unrequested_notices_wait_until_an_answer_could_be_read() -> None:
    clock = Clock()
    notices = Notices(clock)
    notices.say("max_num_seqs 8→4 applied at step 7")
    notices.say_later("the load is yours")
    notices.say_later("and one more")
    for said in ("max_num_seqs 8→4 applied at step 7", "the load is yours", "and one more"):
        assert text(notices.line([], 120)) == f" {said}"
        clock.now_s += _SHOWN_S
    assert notices.line([], 120) == ()


def test_a_long_notice_loses_what_stands_in_brackets_then_its_end() -> None:
    notices = Notices(Clock())
    notices.say(f"{'a' * 50} (hint); {'b' * 40}")
    assert text(notices.line([], 120)) == f" {'a' * 50} (hint); {'b' * 40}"
    assert text(notices.line([], 95)) == f" {'a' * 50}; {'b' * 40}"
    assert text(notices.line([], 80)).startswith(f" {'a' * 50}; bbb")
    notices.say("e" * 90)
    assert text(notices.line([], 80)).startswith(" eee")
