"""`StepRange`: some consecutive steps of a session."""

from typing import TYPE_CHECKING, NamedTuple

from stepscope.recordings.errors import NotInRecording, TooLittleData

if TYPE_CHECKING:
    from stepscope.recordings.file.reader import Recording  # needs mcap


class StepRange(NamedTuple):
    """Steps from `first` to `last`, both included."""

    first: int | None = None  # None: from the oldest recorded
    last: int | None = None  # None: to the newest


def bounds(recording: "Recording", steps: StepRange) -> tuple[int, int]:
    """The first and last step of a range.

    Raises:
        NotInRecording: the range contains no step.
        TooLittleData: the recording contains no step.
    """
    if recording.first_step is None or recording.last_step is None:
        raise TooLittleData(f"{recording.path} holds no step")
    first = recording.first_step if steps.first is None else max(steps.first, recording.first_step)
    last = recording.last_step if steps.last is None else min(steps.last, recording.last_step)
    if first > last:
        if steps.last is None:
            wanted = f"them from {steps.first:,} on"
        elif steps.first is None:
            wanted = f"them up to {steps.last:,}"
        else:
            wanted = f"{steps.first:,} to {steps.last:,}"
        raise NotInRecording(
            f"{recording.path} holds steps {recording.first_step:,} to {recording.last_step:,}, "
            f"none of {wanted}"
        )
    return first, last
