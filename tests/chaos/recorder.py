"""`stepscope record` that also notes what it received, and how far back the engine could replay.

recorder.py LOG record ENDPOINT -o FILE ...
"""

import faulthandler
import signal
import sys

import replies

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import Snapshot
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.tui.cli.__main__ import main

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2)  # reports where it is
    with open(sys.argv.pop(1), "w", buffering=1) as log:
        replies.note_replays(log)
        on_frame = RecordingWriter.on_frame

        def noting(writer: RecordingWriter, topic: bytes, sequence: int, payload: bytes) -> None:
            if topic == b"keyframe":
                message = wire.decode(payload)
                assert isinstance(message, Snapshot)
                log.write(f"join {message.info.engine_id} {sequence}\n")
            else:
                log.write(f"got {sequence} {topic.decode()} 0\n")
            on_frame(writer, topic, sequence, payload)

        RecordingWriter.on_frame = noting  # type: ignore[method-assign]
        main()
