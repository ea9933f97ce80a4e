"""`RecordingSink`: writes the messages of a simulated engine into a recording."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import KnobValue, Snapshot, Telemetry
from stepscope.engine.simulation.virtual_session import SimulatedSession, run_requests
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.file.service_levels import Levels
from stepscope.recordings.file.writing.writer import RecordingWriter
from stepscope.recordings.simulation.basis import MachineStepTimes, WhatIfBasis
from stepscope.recordings.simulation.what_if import later_knobs

_MAX_QUEUE_BYTES = 16 * 1024 * 1024  # unlike a real engine, this one can wait for the disk
_WAIT_S = 0.01


def write_what_if(
    basis: WhatIfBasis,
    text: str,
    changes: Mapping[str, KnobValue],
    levels: Levels,
    path: Path,
    on_request: Callable[[int], bool] = lambda number: False,
) -> None:
    """Simulate one session under other knobs and write it as an ordinary recording.

    `on_request`: called with the number of each request. If it returns True, the session ends
    there.

    Raises:
        ConfigError: the knobs are incompatible.
        RecordingError: the file cannot be written.
    """
    setup = basis.setup
    given = msgspec.structs.replace(
        setup,
        model=MachineStepTimes(setup.model, basis.speed, seed=0),
        knobs=setup.knobs.changed(changes, setup.limits),
        simulated=f"{setup.simulated}, what if {text}",
    )
    with RecordingSink(path, levels) as sink:
        session = SimulatedSession(given, 0, sink)
        sink.begin(session.snapshot())
        later = later_knobs(basis, changes)
        run_requests(session, basis.work.requests, changes=later, on_request=on_request)


class RecordingSink:
    """A `TelemetrySink` that writes into a recording.

    On leaving the `with` block, the file is completed, even after an error.

    Raises RecordingError: the file cannot be created or written.
    """

    num_dropped = 0

    def __init__(self, path: Path, levels: Levels) -> None:
        self.next_sequence = 0
        self.writer = RecordingWriter(path, levels)

    def begin(self, snapshot: Snapshot) -> None:
        """Write the snapshot with which the recording begins. Call it before `publish`."""
        self.writer.start(snapshot)

    def publish(self, message: Telemetry) -> None:
        writer = self.writer
        while writer.num_queued_bytes > _MAX_QUEUE_BYTES and writer.state == "recording":
            time.sleep(_WAIT_S)
        if writer.state == "failed":
            raise RecordingError(writer.error or f"{writer.path} cannot be written")
        writer.on_frame(message.topic, self.next_sequence, wire.encode(message))
        self.next_sequence += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.writer.close()
        if kind is None and self.writer.error is not None:
            raise RecordingError(self.writer.error)
