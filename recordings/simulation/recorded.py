"""`recorded_work`: the requests and knobs of a recording, to be run again by a simulation.

A recording need not have tokens. Shared prefixes of prompts are known if the engine published
hashes of their blocks (`prefix_hashes`), or else from hits in its prefix cache (`PrefixBook`).
"""

from typing import NamedTuple

import msgspec

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import Knobs, Limits
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.simulation.virtual_requests import SimulatedRequest
from stepscope.engine.simulation.virtual_session import TimedKnobs
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.moments import Moment, Progress, moments
from stepscope.recordings.export.mooncake import RequestReader, TracedRequest
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.step_range import StepRange
from stepscope.recordings.simulation.figures import RunFigures, RunSums
from stepscope.recordings.state.latency import SLO
from stepscope.recordings.state.latency_samples import RequestWatch
from stepscope.recordings.state.outcome import Outcome

_ONE_BEGINNING = 1 << 40  # first of the ids for an assumed common prefix; no chain has these
_DEFAULT_LEN = 131_072  # for an engine that does not publish its own


class RecordedWork(NamedTuple):
    """The requests, knobs and figures of a recorded session. Times are since the first arrival."""

    requests: list[SimulatedRequest]
    knobs: Knobs  # in force at the beginning
    changes: list[TimedKnobs]
    limits: Limits
    num_blocks: int
    block_size: int
    overlap: bool  # whether a step was scheduled while the one before it ran
    figures: RunFigures  # as recorded, of the requests that finished
    num_begun: int  # requests from before the recording, which are left out
    num_unfinished: int  # requests included with the tokens they had at the end
    num_hits: int
    num_unknown_hits: int  # hits whose origin is unknown


def recorded_work(
    recording: Recording, level: SLO, progress: Progress = lambda share: None
) -> RecordedWork:
    """Read the requests, knobs and figures of a recorded session.

    Raises RecordingError: the recording lacks data that a simulation needs.
    """
    info = recording.info
    if info.num_blocks is None or info.block_size is None:
        raise RecordingError(
            f"{recording.path.name} does not say how large the KV cache was: it cannot be simulated"
        )
    if info.kv_groups is not None:
        kinds = ", ".join(group.kind for group in info.kv_groups)
        raise RecordingError(
            f"{recording.path.name} has KV blocks of {kinds}: it cannot be simulated"
        )
    if info.role is not None:
        raise RecordingError(
            f"{recording.path} is of a {info.role} engine: one of two engines cannot be simulated"
        )
    snapshot, _ = recording.keyframe_before(Position(0, 0))
    max_model_len = info.max_model_len or _DEFAULT_LEN
    knobs = _known_knobs(snapshot.knobs)
    limits = Limits(
        max_num_batched_tokens=info.max_num_batched_tokens or max(8192, max_model_len),
        max_num_seqs=max(info.max_num_seqs or 256, knobs.max_num_seqs),
        max_model_len=min(max_model_len, info.num_blocks * info.block_size),
    )
    reader = _WorkReader(info.block_size, knobs, level)
    last: Moment | None = None
    for last in moments(recording, StepRange(), progress):
        reader.apply(last)
    requests, changes = reader.finished_with(last)
    if not requests:
        raise RecordingError(f"{recording.path} holds no request from its arrival on")
    book = reader.reader.book
    has_hashes = any(each.arrived.prefix_hashes is not None for each in reader.requests)
    return RecordedWork(
        requests=requests, knobs=knobs, changes=changes, limits=limits, num_blocks=info.num_blocks,
        block_size=info.block_size, overlap=bool(info.overlap), figures=reader.figures.result(),
        num_begun=len(reader.reader.begun),
        num_unfinished=sum(not isinstance(each.end, wire.Finished) for each in reader.requests),
        num_hits=book.num_hits, num_unknown_hits=0 if has_hashes else book.num_unknown,
    )  # fmt: skip


class _WorkReader:
    def __init__(self, block_size: int, knobs: Knobs, level: SLO) -> None:
        self.figures = RunSums(level)
        self.reader = RequestReader(block_size, id_tokens=block_size)
        self._block_size = block_size
        self._knobs = knobs
        self._changes: list[TimedKnobs] = []
        self._watch: RequestWatch | None = None
        self._worst_ns: dict[int, int] = {}  # longest gap of each request, without pauses

    @property
    def requests(self) -> list[TracedRequest]:
        return list(self.reader.requests.values())

    def apply(self, moment: Moment) -> None:
        message, outcome = moment.message, moment.outcome
        if self._watch is None:
            self._watch = RequestWatch(0.0, moment.state)
        if isinstance(message, wire.KnobsChanged):
            self._knobs = _known_knobs({**self._knobs.as_dict(), **message.new})
            self._changes.append(TimedKnobs(message.time_ns, self._knobs))
        self.reader.apply(moment)
        if isinstance(message, wire.StepRecord) and outcome is not None:
            self._watch.take(outcome, moment.state, message.tokens_ns)
            self._worst_ns.update(outcome.longer)
            self._count(message, outcome)
        for event in getattr(message, "events", ()):
            if isinstance(event, wire.Finished) and event.request_id in self.reader.requests:
                self._end(moment.state.requests.get(event.request_id), moment.state.pauses)

    def finished_with(self, last: Moment | None) -> tuple[list[SimulatedRequest], list[TimedKnobs]]:
        """All requests and knob changes, with times since the first arrival.

        Requests that had not ended at the moment `last` are included, with the tokens they had.
        """
        self.reader.close(last)
        begin_ns = min((each.arrived.time_ns for each in self.requests), default=0)
        work = [
            SimulatedRequest(
                arrival_ns=each.arrived.time_ns - begin_ns,
                num_prompt_tokens=max(1, each.arrived.num_prompt_tokens),
                num_output_tokens=max(1, each.num_output_tokens),
                name=each.arrived.client_id,
                priority=each.arrived.priority,
                prefix=self._prefix(each),
                prefix_tokens=self._block_size,
                names_output=each.arrived.prefix_hashes is not None,
            )
            for each in self.requests
        ]
        work.sort(key=lambda each: each.arrival_ns)
        changes = [each._replace(time_ns=each.time_ns - begin_ns) for each in self._changes]
        return work, changes

    def _prefix(self, request: TracedRequest) -> tuple[int, ...]:
        """Equal ids mean equal blocks. If no hit can be traced, all are of one prefix."""
        if (hashes := request.arrived.prefix_hashes) is not None:
            return (*hashes, *(getattr(request.end, "prefix_hashes", None) or ()))
        if 0 < self.reader.book.num_hits == self.reader.book.num_unknown:
            num_blocks = request.num_cached_tokens // self._block_size
            return tuple(range(_ONE_BEGINNING, _ONE_BEGINNING + num_blocks))
        return tuple(request.prefix or ())

    def _count(self, step: wire.StepRecord, outcome: Outcome) -> None:
        figures = self.figures
        figures.add_step(step.num_prefill_tokens, step.num_decode_tokens, 1)
        for gap_ns, count in outcome.gaps_ns.items():
            figures.add_gaps(gap_ns, count)
        for request_id, ttft_ns in outcome.ttft_ns:
            if request_id in self.reader.requests:
                figures.add_first(ttft_ns)
        for _ in range(outcome.num_preempted):
            figures.add_preemption()

    def _end(self, view: wire.RequestView | None, pauses: PauseTrail) -> None:
        if view is None or view.is_partial or view.first_token_ns is None:
            return
        worst_ns = self._worst_ns.pop(view.request_id, 0)
        self.figures.add_finished(_without_pauses(view, pauses), worst_ns)


def _without_pauses(view: wire.RequestView, pauses: PauseTrail) -> wire.RequestView:
    """Return the view of a finished request with its times as if its pauses had come before it."""
    first_ns, last_ns = view.first_token_ns, view.last_token_ns
    if first_ns is None or last_ns is None or not pauses.within(view.arrival_ns, last_ns):
        return view
    return msgspec.structs.replace(
        view,
        arrival_ns=view.arrival_ns + pauses.within(view.arrival_ns, last_ns),
        first_token_ns=first_ns + pauses.within(first_ns, last_ns),
    )


def _known_knobs(values: dict[str, bool | int | float | str]) -> Knobs:
    """The knobs that our scheduler has. Other knobs of another engine are left out."""
    names = Knobs.__struct_fields__
    return msgspec.convert({name: values[name] for name in names if name in values}, Knobs)
