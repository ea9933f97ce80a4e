"""Parses steps and requests of a recording as the command line names them."""

from stepscope.recordings.export.moments import StepRange
from stepscope.tui.settings.cli_errors import WrongUsage


def step_range(first: int | None, last: int | None) -> StepRange:
    """Return the range of --from and --until.

    Raises:
        WrongUsage: the range is empty, or an end is negative.
    """
    for option, step in (("--from", first), ("--until", last)):
        if step is not None and step < 0:
            raise WrongUsage(f"{option}: expected a step of at least 0, got {step}")
    if first is not None and last is not None and first > last:
        raise WrongUsage(f"--from {first} is after --until {last}")
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
