"""The recording that a command is given: a file, or a sample that is shipped."""

from pathlib import Path

from stepscope.recordings import samples
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage


def find_recording(file: str) -> Path:
    """The file of that name, or the sample that is shipped under it."""
    if not file:
        raise WrongUsage("FILE: expected the name of a recording, got ''")
    path = Path(file)
    if path.exists() or path.with_name(path.name + PART_SUFFIX).exists():
        return path  # `Recording` opens the unfinished file where there is no other
    shipped = samples.shipped()
    if (sample := shipped.get(file.removesuffix(".mcap"))) is not None:
        return sample
    known = f"; shipped samples: {', '.join(shipped)}" if shipped else ""
    raise CommandFailed(f"there is no recording {file}{known}")


def is_recorded(path: Path) -> bool:
    """Whether it can be a recording, and not the socket of an engine or a folder of sockets."""
    return not path.is_dir() and not path.is_socket()
