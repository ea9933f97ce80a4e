"""Errors of recordings. Imports nothing, so that code that only catches them needs no `mcap`."""


class RecordingError(Exception):
    """A file cannot be read or written. The message is one line to show to a person."""


class NotInRecording(RecordingError):  # noqa: N818 - reads as what happened
    """The file can be read, but does not contain the requested step or request."""


class TooLittleData(RecordingError):  # noqa: N818 - reads as what happened
    """The file can be read, but has no step, or too few steps or requests to answer."""
