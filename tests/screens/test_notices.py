"""The notice line: new notices stay readable, and standing problems are not lost."""

import pytest

from stepscope.tui.views.notices import _SHOWN_S, Notices, Tone
from tests.support.screens.screen_text import line_texts

DOWN: tuple[str, Tone] = (
    "engine-0 is down: nobody answers at ipc:///run/user/0/stepscope/engine-0",
    "caution",
)
FILE = "stepscope-engine-0-20261122-184917.mcap"


def line(notices: Notices, width: int, *standing: tuple[str, Tone]) -> str:
    return line_texts([notices.line(standing, width)])[0]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_path_of_a_written_file_is_shown_beside_a_standing_problem(width: int) -> None:
    notices = Notices(lambda: 0.0)
    notices.say(f"recording ended: /home/op/incidents/november/gpu-7/{FILE}")
    alone, beside = line(notices, width), line(notices, width, DOWN)
    assert len(beside) <= width
    assert alone.endswith(f"/{FILE}")
    assert "engine-0 is down: nobo" in beside
    if width > 80:
        assert f"gpu-7/{FILE}  " in beside
    # A path too long for its line loses whole leading folders.
    notices.say("wrote a.mcap, 3 steps, in /home/operator/incidents/november")
    said = {width: line(notices, width).strip() for width in (80, 55, 40)}
    assert said[80] == "wrote a.mcap, 3 steps, in /home/operator/incidents/november"
    assert said[55] == "wrote a.mcap, 3 steps, in …/incidents/november"
    assert said[40] == "wrote a.mcap, 3 steps, in …/november"


def test_a_standing_problem_gets_the_whole_line_back_after_a_notice() -> None:
    now_s = [0.0]
    notices = Notices(lambda: now_s[0])
    notices.say("x" * 100)
    assert DOWN[0] not in line(notices, 120, DOWN)
    now_s[0] += _SHOWN_S
    assert line(notices, 120, DOWN) == " " + DOWN[0]


def test_a_notice_about_a_step_disappears_on_leaving_it_and_others_stay() -> None:
    notices = Notices(lambda: 0.0)
    notices.say_of_place("no preemption after step 7,745", "caution")
    assert line(notices, 80)
    notices.leave_place()
    assert not line(notices, 80)
    notices.say("recording to x.mcap")
    notices.leave_place()
    assert line(notices, 80)


def test_unrequested_notices_wait_until_an_answer_could_be_read() -> None:
    now_s = [0.0]
    notices = Notices(lambda: now_s[0])
    notices.say("max_num_seqs 8→4 applied at step 7")
    notices.say_later("the load is yours")
    notices.say_later("and one more")
    for said in ("max_num_seqs 8→4 applied at step 7", "the load is yours", "and one more"):
        assert line(notices, 120) == f" {said}"
        now_s[0] += _SHOWN_S
    assert notices.line([], 120) == ()


def test_a_long_notice_loses_what_stands_in_brackets_then_its_end() -> None:
    notices = Notices(lambda: 0.0)
    notices.say(f"{'a' * 50} (hint); {'b' * 40}")
    assert line(notices, 120) == f" {'a' * 50} (hint); {'b' * 40}"
    assert line(notices, 95) == f" {'a' * 50}; {'b' * 40}"
    assert line(notices, 80).startswith(f" {'a' * 50}; bbb")
    notices.say("e" * 90)
    assert line(notices, 80).startswith(" eee")
