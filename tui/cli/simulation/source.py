"""Opens the requests to simulate: a trace, a recording, or a random mix drawn from a seed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from stepscope.engine.protocol.settings.workload_spec import WorkloadSpec
from stepscope.engine.simulation.virtual.requests import SimulatedRequest, of_mix, of_trace
from stepscope.engine.workload.arrivals import describe
from stepscope.engine.workload.traces import read_trace
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.simulation.recorded import RecordedWork, recorded_work
from stepscope.tui.cli.shared.recording_path import RECORDING_SUFFIXES, find_recording
from stepscope.tui.settings.cli_errors import WrongUsage

MIX = "mix"


class SimulatedSource(NamedTuple):
    """Requests to simulate, and where they come from.

    Attributes:
        text: where the requests come from, in words.
        recorded: the work of the recording, if they come from one.
    """

    text: str
    num_requests: int | None  # None if there is no end
    requests: Callable[[int], Iterable[SimulatedRequest]]  # makes the requests of a seed
    recorded: RecordedWork | None = None


def is_recording_name(source: str) -> bool:
    """Whether a source is a recording or a sample, by its name: not a mix, and not a trace."""
    path = Path(source)
    return source != MIX and (path.suffix in RECORDING_SUFFIXES or not path.exists())


def open_source(
    source: str, spec: WorkloadSpec, max_model_len: int, time_scale: float, limit: int | None
) -> SimulatedSource:
    """Open the requests that `source` names: `mix`, or a trace, a recording or a shipped sample.

    Raises:
        WrongUsage: an option cannot be used with the mix.
        TraceError, RecordingError, CommandFailed: the file cannot be read.
    """
    if source == MIX:
        return _mix(spec, max_model_len, limit)
    path = Path(source)
    if is_recording_name(source):
        with Recording(find_recording(source)) as recording:
            work = recorded_work(recording)
        requests = [
            each._replace(arrival_ns=round(each.arrival_ns * time_scale))
            for each in work.requests[:limit]
        ]
        return SimulatedSource(source, len(requests), lambda seed: requests, work)
    rows = read_trace(path, limit)
    requests = list(of_trace(rows, max_model_len, time_scale))
    return SimulatedSource(path.name, len(requests), lambda seed: requests)


def _mix(spec: WorkloadSpec, max_model_len: int, limit: int | None) -> SimulatedSource:
    if spec.max_concurrency is not None:
        raise WrongUsage(
            "--max-concurrency: a simulated mix sends every request at its time; leave it out"
        )
    num_requests = limit or spec.num_requests
    assert num_requests is not None, "the command has a default"

    def requests(seed: int) -> Iterable[SimulatedRequest]:
        given = {"seed": seed, "num_requests": num_requests}
        return of_mix(structs.replace(spec, **given), max_model_len)

    return SimulatedSource(describe(spec), num_requests, requests)
