"""After a signal ends a screen, the terminal is restored and the recording can be read."""

import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Submit
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.reader import Recording
from tests.support.waiting import wait_for

_CLI = (sys.executable, "-m", "stepscope.tui.cli")
_ALTERNATE_SCREEN, _ALL_MOTION = 1049 << 5, 1003 << 5  # as pyte keeps private modes


def _is_drawn_on(terminal: Any) -> bool:
    return bool({_ALTERNATE_SCREEN, _ALL_MOTION} & terminal.screen.mode)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("arguments", "shown"), [((), "freeze"), (("replay", "freeze"), "step")], ids=["start", "file"]
)
def test_a_signal_ends_the_screen_and_restores_the_terminal(
    terminal: Any, tmp_path: Path, arguments: tuple[str, ...], shown: str, number: signal.Signals
) -> None:
    screen = terminal(*_CLI, *arguments, XDG_CONFIG_HOME=str(tmp_path), cwd=str(tmp_path))
    screen.wait_for(shown)
    assert _is_drawn_on(screen)
    os.kill(screen.process.pid, number)
    assert screen.wait_for_exit() == 128 + number
    wait_for(lambda: not _is_drawn_on(screen))


@pytest.mark.parametrize("is_terminal_gone", [False, True], ids=["ended", "terminal gone"])
def test_a_signal_that_ends_the_dashboard_finishes_its_recording(
    live_engine: Any, terminal: Any, tmp_path: Path, is_terminal_gone: bool
) -> None:
    folders = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = (*_CLI, "top", live_engine.endpoint.control, "--no-keep")
    screen = terminal(*command, cwd=str(tmp_path), **folders)
    screen.wait_for("LIVE")
    screen.send("R")
    screen.wait_for("REC")
    with ControlClient(live_engine.endpoint) as client:
        sampling = SamplingParams(max_tokens=900, ignore_eos=True)
        client.send(Submit(prompt_token_ids=[1] * 20, sampling=sampling))
        screen.wait_for(r"step \d+")
    if is_terminal_gone:
        os.close(screen.process.fd)  # the kernel sends SIGHUP, and no write succeeds any more
        screen.process.fd = os.open(os.devnull, os.O_RDONLY)
    else:
        os.kill(screen.process.pid, signal.SIGTERM)
    number = signal.SIGHUP if is_terminal_gone else signal.SIGTERM
    assert screen.wait_for_exit() == 128 + number
    assert not list(tmp_path.glob(f"*{PART_SUFFIX}"))
    with Recording(next(tmp_path.glob("*.mcap"))) as recording:
        assert recording.message is None
        assert recording.last_step is not None
    logged = [path.read_text("utf-8") for path in (tmp_path / "state").rglob("*.log*")]
    assert logged == []


@pytest.mark.parametrize(
    ("arguments", "shown", "key"),
    [((), b"freeze", b""), (("replay", "freeze"), b"REPLAY", b" ")],
    ids=["start", "paused replay"],
)
def test_a_terminal_that_vanishes_ends_even_a_screen_that_draws_nothing(
    tmp_path: Path, arguments: tuple[str, ...], shown: bytes, key: bytes
) -> None:
    with in_a_session_of_its_own(tmp_path, *arguments) as (process, terminal):
        read_until(terminal, shown)
        if key:
            os.write(terminal, key)
            read_until(terminal, b"PAUSED")
        while select.select([terminal], [], [], 1.0)[0]:  # until drawing has stopped
            os.read(terminal, 65536)
        os.close(terminal)
        assert process.wait(15) == 128 + signal.SIGHUP


@contextmanager
def in_a_session_of_its_own(
    folder: Path, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program without a controlling terminal, and the other end of the terminal it draws on."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    state = {"XDG_CONFIG_HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    process = subprocess.Popen(
        [*_CLI, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **state},
        cwd=folder,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()


def read_until(terminal: int, what: bytes) -> bytes:
    drawn, deadline_s = b"", time.monotonic() + 30.0
    while what not in drawn:
        assert time.monotonic() < deadline_s, f"never: {what!r}"
        if select.select([terminal], [], [], 0.2)[0]:
            drawn += os.read(terminal, 65536)
    return drawn
