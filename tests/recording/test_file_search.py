"""The search of a file leaves no thread or handle behind, whenever its replay is closed."""

import os
import threading
from pathlib import Path

import pytest

from stepscope.recordings.file.reader import Recording
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from tests.support.sessions.seek_sessions import busy, record
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("search") / "session.mcap", enumerate(busy(3, 400)))


def opened(file: Path) -> int:
    """How many handles this process has on the file."""
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(each) == str(file.resolve()) for each in links)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts handles in /proc")
@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_closed_replay_leaves_no_search_thread_and_no_file_handle(
    file: Path, is_at_work: bool
) -> None:
    before = set(threading.enumerate())
    replay = ReplaySource(Recording(file), playing=False)
    replay.start()
    if is_at_work:
        wait_for(lambda: opened(file) > 1, "a search at work")
    replay.stop()
    assert set(threading.enumerate()) <= before
    assert opened(file) == 0
    assert replay.file_index.is_done


def test_a_reading_ends_at_once_when_stopped(file: Path) -> None:
    found = FileIndex(file, is_busy=lambda: True)
    found.start()
    assert not found.is_done
    found.stop()
    assert found.is_done
    found.stop()  # stopping again does nothing


def test_a_reading_that_was_never_started_can_be_stopped(file: Path) -> None:
    FileIndex(file).stop()
