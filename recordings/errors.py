"""What can be wrong with a recording. Imports nothing: who only catches it needs no `mcap`."""


class RecordingError(Exception):
    """A file that cannot be read or written; the message is one line for a person."""


class NotInRecording(RecordingError):  # noqa: N818 - reads as what happened
    """The file can be read, and a step or a request that was asked for is not in it."""
