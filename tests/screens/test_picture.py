"""Pictures of the screen: `S` and `stepscope screenshot`, as SVG and text."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.samples import shipped
from stepscope.tui.app.picture import text
from stepscope.tui.screens.handlers import new_picture
from tests.support.screens.screen_text import cells
from tests.support.screens.still_dashboard import dashboard


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def test_screenshot_draws_a_step_of_a_recording_in_every_format(stepscope: Any) -> None:
    code, *said = stepscope("screenshot", "freeze", "--at", "300", "-o", "a.txt")
    assert code == 0, said
    assert "a.txt: step 300, 120x40" in "".join(said)
    lines = Path("a.txt").read_text("utf-8").splitlines()
    assert len(lines) == 40
    assert re.search(r"REPLAY PAUSED.*step 300 ", lines[0])
    assert "requests × steps" in "".join(lines)

    for name, theme in (("a", "dark"), ("light", "light")):
        options = ("--at", "300", "-o", f"{name}.svg", "--theme", theme, "--size", "100x30")
        assert stepscope("screenshot", "freeze", *options).exit_code == 0
    document = Path("a.svg").read_text("utf-8")
    assert document.startswith("<svg ")
    assert "BUDGET" in document
    assert document.count("<text ") == document.count('xml:space="preserve"')
    assert "#fbfaf7" in Path("light.svg").read_text("utf-8").lower()  # the theme's background
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a.svg", "a.txt", "light.svg"]


def test_screenshot_can_draw_any_screen_and_any_request(stepscope: Any) -> None:
    for arguments, words in (
        (("--page", "kv"), "KV map by state"),
        (("--page", "latency", "--slo-itl", "70ms"), "ITL <70"),
        (("--page", "main", "--ascii"), "requests x steps"),
        (("--request", "r3"), "request r3"),
        (("--zoom", "5"), "(1 col = 50 ms)"),  # the sample is about time, and opens on that axis
        (("--axis", "step"), "(1 col = 1 step)"),
    ):
        done = stepscope("screenshot", "chunked", "--at", "200", "-o", "b.txt", *arguments)
        assert done.exit_code == 0, done.stderr
        assert words in Path("b.txt").read_text("utf-8")
    nothing = "no setting stands out in the last minute"
    for sample, step, words in (
        ("freeze", 420, "set enable_chunked_prefill=true"),
        ("vllm", 420, f"{nothing}; 'stepscope tune' simulates others  "),
        ("vllm", 30, f"{nothing}  "),  # 3 s are too short for `tune`
    ):
        at = ("--at", str(step), "--page", "knobs", "-o", "b.txt")
        assert stepscope("screenshot", sample, *at).exit_code == 0
        assert f"what would help: {words}" in Path("b.txt").read_text("utf-8")
    assert stepscope("screenshot", "chunked", "-o", "last.txt")[0] == 0
    with Recording(shipped()["chunked"]) as recording:
        last = Path("last.txt").read_text("utf-8")
    assert f"step {recording.last_step:,} " in last
    assert "▐REPLAY END▌" in last


def test_at_the_end_of_a_replay_its_place_is_its_length(stepscope: Any) -> None:
    """The recording goes on for a second after its last step."""
    assert stepscope("screenshot", "speculation", "-o", "last.txt").exit_code == 0
    place = re.search(r"▐REPLAY END▌ (.....) of (.....) ", Path("last.txt").read_text("utf-8"))
    assert place is not None
    assert place[1] == place[2]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("chunked", "-o", "a.png"), 2, "ends in .svg or .txt, got a.png"),
        (("chunked", "-o", "a.svg", "--at", "99999"), 2, "holds steps 0 to "),
        (("chunked", "-o", "a.svg", "--page", "cellar"), 2, "'cellar' is not one of 'main'"),
        (("chunked", "-o", "a.svg", "--size", "10x5"), 2, "expected 80x20 to 1000x500, got '10x5'"),
        (("chunked", "-o", "a.svg", "--zoom", "3"), 2, "expected one of 1, 2, 5, 10, 20, 50"),
        (("chunked", "-o", "a.svg", "--request", "r99999"), 2, "r99999 is not known any more"),
        (("chunked", "-o", "no/where/a.svg"), 1, "is not a folder"),
        (("chunked", "-o", "."), 1, "is a folder"),
        (("nothing.mcap", "-o", "a.svg"), 1, "there is no recording"),
    ],
)
def test_a_picture_that_cannot_be_drawn_gives_one_line_and_no_file(
    stepscope: Any, arguments: tuple[str, ...], code: int, words: str
) -> None:
    ended, said, error = stepscope("screenshot", *arguments)
    assert (ended, said) == (code, "")
    assert error.startswith("stepscope: error: ")
    assert error.count("\n") == 1
    assert words in error
    assert list(Path.cwd().iterdir()) == []


def test_pictures_of_one_second_are_files_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [new_picture(f"number {number}", "gpu-7:5555") for number in range(3)]
    assert [path.read_text() for path in paths] == ["number 0", "number 1", "number 2"]
    pattern = r"stepscope-gpu-7-5555-\d{8}-\d{6}(-\d)?\.svg"
    assert all(re.fullmatch(pattern, path.name) for path in paths)


async def test_a_picture_that_cannot_be_written_is_reported_on_the_screen(
    still_source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = dashboard(still_source())
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    async with app.run_test(size=(120, 40)) as pilot:
        gone.rmdir()
        await pilot.press("S")
        assert "no screenshot: " in app.main.canvas.text_of("notice")[0]
        os.chdir(tmp_path)
        await pilot.press("S")
        assert f"{tmp_path.name}/stepscope-still-" in app.main.canvas.text_of("notice")[0]


@pytest.mark.parametrize("keys", [(), ("question_mark",), ("K",), ("g", "1")])
async def test_a_picture_as_text_is_what_textual_composes_with_the_overlay_above(
    still_source: Any, keys: tuple[str, ...]
) -> None:
    app = dashboard(still_source(), control_endpoint="ipc:///nobody/here")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press(*keys)
        await pilot.pause()
        rows = ["".join(run for run, _ in row).rstrip() for row in cells(app)]
        assert text(app).splitlines() == rows
