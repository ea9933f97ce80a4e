"""A recording in many files: when the next file begins, their names, and which are deleted.

Names sort in the order of recording: `NAME-20261121T101500Z-000.mcap`. A file is deleted only if
its name, its MCAP profile and the series in its metadata all match.
"""

import logging
import os
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.mcap.index import read_metadata
from stepscope.recordings.file.reader import is_being_written
from stepscope.recordings.file.writing.recording_file import RecordingFile

log = logging.getLogger("stepscope.recordings")

MIN_ROTATE_BYTES = 1_000_000
MIN_ROTATE_S = 1.0
SERIES = "series"  # key in the metadata of each file
_MAX_FILES_A_SECOND = 1000

_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SECONDS = {"S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 86_400, "W": 604_800}
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


class SeriesLimits(NamedTuple):
    """Limits of size, of age, or of both. The one that is reached first counts."""

    num_bytes: int | None = None
    age_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> "SeriesLimits":
        """Parse `1GB`, `48h` or `500MB,1h`.

        Raises ValueError: the text is invalid; the message tells what was expected.
        """
        num_bytes: int | None = None
        age_s: float | None = None
        for part in text.split(","):
            match = _LIMIT.fullmatch(part.strip())
            unit = "" if match is None else match[2].upper()
            if match is not None and unit in _BYTES and num_bytes is None:
                num_bytes = int(Fraction(match[1]) * _BYTES[unit])
            elif match is not None and unit in _SECONDS and age_s is None:
                age_s = float(match[1]) * _SECONDS[unit]
            else:
                raise ValueError(
                    f"expected a size (500MB, 1GB), an age (30m, 48h, 7d) or both with a comma, "
                    f"got {text!r}"
                )
        if num_bytes == 0 or age_s == 0:
            raise ValueError(f"expected a size or an age above zero, got {text!r}")
        return cls(num_bytes, age_s)


class FileSeries:
    """The files of one recorder, in one folder.

    Args:
        path: pattern of the names: `session.mcap` makes `session-TIME-NUMBER.mcap`.
        rotate: limits at which a file is full.
        keep: how much is not deleted, besides files being written; None: all.
    """

    def __init__(self, path: Path, rotate: SeriesLimits, keep: SeriesLimits | None = None) -> None:
        self._folder = path.parent
        self.name = path.stem
        self._suffix = path.suffix or ".mcap"
        self._rotate = rotate
        self._keep = keep
        self._last_stamp = ""
        self._newest: str | None = None  # name of the newest file
        # When earlier files of this recorder ended, by the monotonic clock. The wall clock may jump
        # by years (a start without a network) and must not make a new file look old.
        self._ended_s: dict[str, float] = {}
        name, suffix, part = map(re.escape, (self.name, self._suffix, PART_SUFFIX))
        self._pattern = re.compile(rf"{name}-\d{{8}}T\d{{6}}Z-\d{{3}}{suffix}(?:{part})?")

    def open_next(self) -> RecordingFile:
        """Create the next file. Existing files are not touched.

        Raises RecordingError: the file cannot be created.
        """
        # If the clock is set back, a later file must still sort after an earlier one.
        stamp = max(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), self._last_stamp)
        self._last_stamp = stamp
        for number in range(_MAX_FILES_A_SECOND):
            path = self._folder / f"{self.name}-{stamp}-{number:03}{self._suffix}"
            try:
                file = RecordingFile(path, is_new=True)
            except FileExistsError:
                continue
            if self._newest is not None:
                self._ended_s[self._newest] = time.monotonic()
            self._newest = path.name
            return file
        raise RecordingError(f"{self._folder} holds too many files {self.name}-{stamp}-*")

    def is_full(self, file: RecordingFile) -> bool:
        limits = self._rotate
        if limits.num_bytes is not None and file.num_bytes >= limits.num_bytes:
            return True
        return limits.age_s is not None and time.monotonic() - file.opened_s >= limits.age_s

    def delete_old(self, current: RecordingFile) -> None:
        """Delete the oldest files of this series beyond the limit."""
        if self._keep is None:
            return
        members = self._members(current)
        total = sum(status.st_size for _, status in members)
        for path, status in members:
            ended_s = self._ended_s.get(path.name)
            age_s = time.time() - status.st_mtime
            if ended_s is not None:
                age_s = time.monotonic() - ended_s
            is_old = self._keep.age_s is not None and age_s > self._keep.age_s
            is_much = self._keep.num_bytes is not None and total > self._keep.num_bytes
            if not is_old and not is_much:
                continue
            try:
                path.unlink()
            except OSError as error:
                log.warning("cannot delete %s: %s", path, error)
                continue
            self._ended_s.pop(path.name, None)
            total -= status.st_size

    def _members(self, current: RecordingFile) -> list[tuple[Path, os.stat_result]]:
        members = []
        for entry in sorted(os.scandir(self._folder), key=lambda each: each.name):
            path = Path(entry.path)
            if not self._pattern.fullmatch(entry.name) or path == current.part_path:
                continue
            if not entry.is_file(follow_symlinks=False):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if path.suffix == PART_SUFFIX and is_being_written(path):
                continue  # from another recorder with the same name
            if (read_metadata(path) or {}).get(SERIES) == self.name:
                members.append((path, status))
        return members
