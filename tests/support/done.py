"""`Done`: what a command printed, and how it ended."""

from typing import NamedTuple


class Done(NamedTuple):
    """A command that has ended."""

    exit_code: int
    stdout: str
    stderr: str
