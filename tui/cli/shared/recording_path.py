"""Finds the recording, the steps and the request that the user names."""

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.recordings import samples
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage

if TYPE_CHECKING:
    from stepscope.recordings.export.moments import StepRange

RECORDING_SUFFIXES = (".mcap", PART_SUFFIX)


def find_recording(file: str) -> Path:
    """Return the path of the file, or else of the shipped sample with that name."""
    if not file:
        raise WrongUsage("FILE: expected the name of a recording, got ''")
    path = Path(file)
    if path.exists() or path.with_name(path.name + PART_SUFFIX).exists():
        return path  # `Recording` opens the unfinished file if there is no finished one
    if (sample := sample_named(file)) is not None:
        return sample
    if file.startswith(("http://", "https://")):
        raise CommandFailed(
            f"{file} is a server's address: its /metrics have no steps; 'stepscope top' shows them"
        )
    shipped = samples.shipped()
    known = f"; shipped samples: {', '.join(shipped)}" if shipped else ""
    raise CommandFailed(f"there is no recording {file}{known}")


def sample_named(name: str) -> Path | None:
    """Return the path of the shipped sample with that name; None if there is none."""
    return samples.shipped().get(name.removesuffix(".mcap"))


def step_range(first: int | None, last: int | None) -> "StepRange":
    """Return the range of --from and --until.

    Raises:
        WrongUsage: the range is empty, or an end is negative.
    """
    for option, step in (("--from", first), ("--until", last)):
        if step is not None and step < 0:
            raise WrongUsage(f"{option}: expected a step of at least 0, got {step}")
    if first is not None and last is not None and first > last:
        raise WrongUsage(f"--from {first} is after --until {last}")
    from stepscope.recordings.export.moments import StepRange  # loads mcap

    return StepRange(first, last)


def request_number(text: str) -> int:
    """Return the number of the request that --request names.

    Raises:
        WrongUsage: the text does not name a request.
    """
    number = text.strip().removeprefix("r")
    if not number.isdecimal():
        raise WrongUsage(f"--request: expected a request such as r12, got {text!r}")
    return int(number)
