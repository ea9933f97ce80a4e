"""A paste goes into the text field that is open, as one line, and runs no command."""

from typing import Any

import pytest
from textual.events import Key, Paste
from textual.pilot import Pilot

from stepscope.tui.screens.overlay import Overlay, pasted_line
from tests.support.screens.running import running
from tests.support.screens.screen_text import screen_text
from tests.support.screens.still_dashboard import dashboard
from tests.support.waiting import until


async def paste(pilot: Pilot[Any], text: str) -> None:
    pilot.app.post_message(Paste(text))
    await pilot.pause(0.02)
    await pilot.pause()


@pytest.mark.parametrize(
    ("pasted", "line"),
    [
        ("vllm-0", "vllm-0"),
        ("vllm-0\n", "vllm-0"),
        ("\r\n\n vllm-0\r\nrm -r x\r\n", " vllm-0"),
        ("\x1b[31mred\x07\x9b\t\u2028x", "[31mred"),
        ("Zürich 東京", "Zürich 東京"),
        ("\n\x00\n", ""),
        ("", ""),
    ],
)
def test_of_a_paste_the_first_line_counts_without_control_characters(
    pasted: str, line: str
) -> None:
    assert pasted_line(pasted) == line


@pytest.mark.parametrize(
    ("keys", "text", "shown"),
    [
        ("/", "state:dec\nq\n", "state:dec_"),
        ("g", "1,200\n", "1,200_"),
        ("B", " 1,024\n", " 1024_ "),
        ("M", "Zürich", "note: Zürich_"),
    ],
)
async def test_a_paste_goes_into_each_field(source: Any, keys: str, text: str, shown: str) -> None:
    async with running(dashboard(source, control_endpoint="ipc:///nobody/here")) as (app, pilot):
        await pilot.press(keys)
        await paste(pilot, text)
        assert isinstance(app.screen, Overlay)
        assert shown in screen_text(app)


async def test_a_paste_in_one_burst_with_keys_around_it_keeps_its_order(source: Any) -> None:
    async with running(dashboard(source)) as (app, _):
        for event in (Key("slash", "/"), Key("i", "i"), Paste("d:1\n"), Key("2", "2")):
            app.post_message(event)
        app.post_message(Key("enter", "\r"))
        await until(lambda: app.main.view.filter == "id:12", "no filter")


@pytest.mark.parametrize("keys", [(), ("question_mark",), ("2",)])
async def test_a_paste_without_a_text_field_does_nothing(
    source: Any, keys: tuple[str, ...]
) -> None:
    async with running(dashboard(source)) as (app, pilot):
        await pilot.press(*keys)
        before = screen_text(app)
        await paste(pilot, "q2\n")
        assert screen_text(app) == before
