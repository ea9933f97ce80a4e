"""`stepscope compare` as a table or JSON, without the screen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import Audited, Mark, StepRecord
from stepscope.recordings.file.reader import Recording
from stepscope.tui.cli.dashboards import compare as compare_command
from stepscope.tui.settings.cli_errors import WrongUsage
from tests.support.engines.simulated_run import SimulatedWorkload, simulate
from tests.support.sessions.seek_sessions import record


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, recorded_to: Callable[..., Any]) -> Path:
    """A smaller budget from step 200 to 320, marks at 300 and 380, a new workload at 360."""
    path = tmp_path_factory.mktemp("compare") / "session.mcap"
    messages = simulate(
        seed=3, num_steps=400, knobs=Knobs(max_num_batched_tokens=2048, max_num_seqs=16),
        changes={200: {"max_num_batched_tokens": 256}, 320: {"max_num_batched_tokens": 2048}},
        workload=SimulatedWorkload(rate=8.0, document_tokens=2500, output_tokens=60),
        num_blocks=512,
    )  # fmt: skip
    last = messages[-1][0]
    told = [Mark(step=0, time_ns=0, text="breakfast", who="me"),
            Mark(step=300, time_ns=0, text="after lunch", who="me"),
            Mark(step=380, time_ns=0, text="at the end", who="me")]  # fmt: skip
    load = Audited(number=9, command="SetWorkload", who="me", time_ns=0, effective_step=360)
    refused = Audited(number=10, command="SetWorkload", who="me", time_ns=0, code="not_allowed")
    with recorded_to(path) as source:
        for sequence, message in [*messages, *((last, mark) for mark in told)]:
            source.take(sequence, message)
        for sequence, message in enumerate((load, refused), last + 1):
            source.take(sequence, message)
    return path


def printed(capsys: pytest.CaptureFixture[str], a: str, b: str | None, **options: Any) -> str:
    usual = {"mark": None, "as_table": False, "as_json": False, "flags": {}}
    compare_command.compare(a, b, **usual | options)
    return capsys.readouterr().out


def document(capsys: pytest.CaptureFixture[str], *names: Any, **options: Any) -> dict[str, Any]:
    return json.loads(printed(capsys, *names, as_json=True, **options))


def test_the_samples_show_what_chunked_prefill_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "freeze", "chunked")
    told = {line[:9].strip(): line[10:] for line in text.split("\n\n")[1].splitlines()}
    b, a = told["B better"], told["A better"]
    assert b.startswith("ITL p99 766→90.1 ms (8.5x, at least 4x), within 150 ms 98.4%→100%")
    assert a.startswith("ITL p95 8.0→62.8 ms (7.8x, at least 3.4x)")
    assert "ITL p50 (of 4,893)" in text
    assert "ITL beside a prefill p50 742→51.6 ms (14x, at least" in text
    assert "ITL decode only p50, p99 (of" in text
    assert text.split("\n\n")[1].startswith(
        "B is better than A in ITL p99 766→90.1 ms (8.5x), worse"
    )
    assert told["set"] == "max_num_batched_tokens 8192 | 256"
    assert "enable_chunked_prefill off | on" in text
    assert "shared a step with a prefill 99.9%" in text
    assert "no winner" not in text
    figures = text.split("\n\n")[2]
    assert "lower in B" in next(line for line in figures.splitlines() if "ITL max" in line)
    assert "may be chance" in next(line for line in figures.splitlines() if "TTFT p99" in line)


def test_what_is_not_told_is_a_dash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = [
        (number, replace(each, batch=None, events=[]) if isinstance(each, StepRecord) else each)
        for number, each in simulate(seed=3, num_steps=50)
    ]
    path = record(tmp_path / "bare.mcap", bare)
    text = printed(capsys, str(path), "freeze")
    assert "— requests, — tokens in, — out" in text.splitlines()[0]
    assert "loads unknown, so nothing is judged: A without requests" in text
    assert "ITL >150 ms    A: unknown" in text
    work = document(capsys, str(path), "freeze")["a"]
    assert (work["num_requests"], work["num_in_tokens"], work["num_out_tokens"]) == (None,) * 3


def test_the_json_of_compare_holds_all_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "freeze", "chunked")
    itl = found["figures"]["itl_p99"]
    assert (round(itl["a"], 1), round(itl["b"], 1)) == (765.7, 90.1)
    assert itl["ratio"] == itl["b"] / itl["a"]
    assert (itl["better"], itl["verdict"], itl["num_a"]) == ("lower", "b", 4893)
    assert found["a"]["num_steps"] == 454
    assert found["settings"][0]["name"] == "max_num_batched_tokens"
    assert found["percentile_error"] == 0
    assert all(sum(found[side]["limits"].values()) == pytest.approx(1) for side in "ab")
    pairs = found["requests"]["pairs"]
    assert len(pairs) == 19
    assert {pair["name"] for pair in pairs} >= {"chat-0", "document-6"}


@pytest.mark.parametrize(
    ("mark", "since", "step", "until"),
    [
        ("max_num_batched_tokens=256", 0, 200, 320),
        ("max_num_batched_tokens=2048", 200, 320, 360),  # back again, until the load is another
        ("after lunch", 200, 300, 320),
        ("lunch", 200, 300, 320),
        ("at the end", 360, 380, None),
        ("120", 0, 120, None),
        ("1,2", 0, 12, None),
    ],
)
def test_parts_before_and_after_a_mark_reach_only_to_the_nearest_other_knob_change(
    session: Path,
    capsys: pytest.CaptureFixture[str],
    mark: str,
    since: int,
    step: int,
    until: int | None,
) -> None:
    found = document(capsys, str(session), None, mark=mark)
    with Recording(session) as recording:
        end = recording.last_step + 1 if until is None else until
    assert (found["a"]["num_steps"], found["b"]["num_steps"]) == (step - since, end - step)
    names = found["a"]["name"], found["b"]["name"]
    assert names[0].endswith(f" since the change at step {since}") is (since > 0)
    assert names[1].endswith(f" until the change at step {until}") is (until is not None)
    if mark.endswith("=2048"):
        (knob,) = [each for each in found["settings"] if each["is_knob"]]
        assert (knob["name"], knob["a"], knob["b"]) == ("max_num_batched_tokens", [256], [2048])


def test_a_mark_at_one_end_is_refused(session: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = r"'breakfast' is at step 0, and the file holds steps 0 to \d+: one of the two parts is"
    with pytest.raises(WrongUsage, match=said):
        printed(capsys, str(session), None, mark="breakfast")


def test_a_screen_is_drawn_into_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "both.txt"
    said = printed(capsys, "freeze", "chunked", output=str(picture), size="90x30")
    assert said == f"{picture}: freeze and chunked, 90x30\n"
    rows = picture.read_text().splitlines()
    assert "A freeze  B chunked  by time" in rows[0]
    assert any("B better ITL p99 766→90.1 ms (8.5x, at least 4x)" in row for row in rows)
