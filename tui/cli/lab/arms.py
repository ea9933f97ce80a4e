"""`Arm`: one run of the engine with certain knobs and requests; `ArmRun`: its recording."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import ResetPrefixCache, Submit
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.replies import Error, Output
from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue, Phase, StepRecord
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.compare.side import Side
from stepscope.recordings.compare.side_requests import RequestRun
from stepscope.recordings.file.messages import indexes
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.recordings.session.index import IndexRows
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.simulation.basis import step_records
from stepscope.recordings.state.latency import SLO
from stepscope.tui.cli.recordings.measured import side_of
from stepscope.tui.cli.shared.process import awaited
from stepscope.tui.settings.cli_errors import CommandFailed

LEVELS = SLO(ttft_ms=1500.0, itl_ms=150.0)
_BASE = Knobs(max_num_batched_tokens=256, max_num_seqs=16).as_dict()
_WHO = "stepscope lab"
_LARGEST_TOKEN_ID = 250  # every vocabulary has the ids up to this one
_MOST_S = 120.0  # time limit of an arm
_START_S = 20.0
_TIMEOUT_S = 20.0


class Work(NamedTuple):
    """A request `at_s` seconds after an arm begins, of random tokens, the first of them shared."""

    name: str
    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    num_shared: int = 0

    def submit(self) -> Submit:
        shared, own = random.Random(0), random.Random(self.seed)
        token_ids = [shared.randint(1, _LARGEST_TOKEN_ID) for _ in range(self.num_shared)]
        rest = self.num_prompt_tokens - self.num_shared
        token_ids += [own.randint(1, _LARGEST_TOKEN_ID) for _ in range(rest)]
        return Submit(
            client_id=self.name,
            prompt_token_ids=token_ids,
            sampling=SamplingParams(max_tokens=self.max_tokens, ignore_eos=True, temperature=0.0),
            with_text=False,
        )


class Arm(NamedTuple):
    """One run of the engine, with these knobs (that differ from `_BASE`) and requests."""

    name: str
    knobs: Mapping[str, KnobValue]
    work: tuple[Work, ...]
    changes: tuple[tuple[float, Mapping[str, KnobValue]], ...] = ()  # after how many seconds
    is_warm: bool = False  # the prefix cache keeps its blocks from the previous arm
    is_apart: bool = False  # on a prefill and a decode engine, with half of the cores each


@dataclass(eq=False)
class ArmRun:
    """The recorded run of an arm, its output tokens by request, and that of a decode engine."""

    name: str
    path: Path
    outputs: Mapping[str, Sequence[int]]
    decode_run: "ArmRun | None" = None

    @property
    def decoding(self) -> "ArmRun":
        return self.decode_run or self

    @cached_property
    def side(self) -> Side:
        return side_of(self.path, self.name, LEVELS)

    @cached_property
    def steps(self) -> list[StepRecord]:
        with Recording(self.path) as recording:
            return list(step_records(recording))

    def add_to(self, table: StepTable) -> None:
        with Recording(self.path) as recording:
            for _, index in list(indexes(recording))[::-1]:
                table.prepend(IndexRows(index).steps())

    def value(self, figure: str) -> float:
        """Return a figure of this run by its name in `stepscope stats`; NaN without a value."""
        value = self.side.figures()[figure]
        return float("nan") if value is None else value

    def requests(self, prefix: str) -> list[RequestRun]:
        runs = self.side.requests.values()
        return [each for each in runs if each.client_id.startswith(prefix)]

    def ttft_ms(self, prefix: str) -> float:
        """The median TTFT of the requests whose names begin with `prefix`; NaN without any."""
        runs = self.requests(prefix)
        known = sorted(each.ttft_ns for each in runs if each.ttft_ns is not None)
        return known[len(known) // 2] / 1e6 if known else float("nan")

    def num_prefill_steps(self, name: str) -> int:
        """Number of steps that computed a part of this request's prompt."""
        [request] = self.requests(name)
        rows = (row for step in self.steps for row in step.batch or ())
        own = [row for row in rows if row.request_id == request.request_id]
        return sum(row.phase != Phase.DECODE for row in own)

    def tokens_per_s_beside_prefill(self) -> float:
        steps = [each for each in self.steps if each.num_prefill_tokens]
        num_tokens = sum(each.num_prefill_tokens + each.num_decode_tokens for each in steps)
        spent_ns = sum(each.tokens_ns - each.schedule_start_ns for each in steps)
        return num_tokens / max(1e-9, spent_ns / 1e9)

    @property
    def tokens_out_per_s(self) -> float:
        """Output tokens per second of all clients, from the first arrival to the last token."""
        begin_ns = min(each.arrival_ns for each in self.side.requests.values())
        end_ns = max(run.steps[-1].tokens_ns for run in {self, self.decoding})
        return sum(map(len, self.outputs.values())) / ((end_ns - begin_ns) / 1e9)

    def main_cause(self) -> str:
        """Say which cause delayed late tokens the most, named as in `stepscope explain --json`."""
        if not self.side.cause_ns:
            return "no token was late"
        (_, cause), ns = max(self.side.cause_ns.items(), key=lambda item: item[1])
        return f"late tokens waited most for: {cause} ({ns / 1e9:.1f} s)"


def run_arm(
    endpoints: Sequence[Endpoint], path: Path, arm: Arm, progress: Callable[[float], None]
) -> ArmRun:
    paths = [path, path.with_stem(f"{path.stem}-decode")][: len(endpoints)]
    with ExitStack() as stack:
        clients = [stack.enter_context(ControlClient(each, _TIMEOUT_S)) for each in endpoints]
        for client in clients:
            client.set_knobs(_BASE | dict(arm.knobs), _WHO)
            if not arm.is_warm:
                client.ask(ResetPrefixCache(who=_WHO))
        sources = [Subscriber(each) for each in endpoints]
        for source, file in zip(sources, paths, strict=True):
            file.unlink(missing_ok=True)
            recorder = Recorder(source, file, levels_of(LEVELS))
            stack.callback(source.stop)
            stack.callback(recorder.stop)
            source.start()
            _wait_for(source, 0)
        outputs = _send(clients[0], arm, progress)
        for source, client in zip(sources, clients, strict=True):
            _wait_for(source, client.snapshot().step)
    return ArmRun(arm.name, path, outputs, ArmRun(arm.name, paths[-1], {}) if paths[1:] else None)


def _send(
    client: ControlClient, arm: Arm, progress: Callable[[float], None]
) -> Mapping[str, list[int]]:
    waiting = sorted(arm.work, key=lambda each: each.at_s)
    changes = list(arm.changes)
    sent: dict[int, Work] = {}
    outputs: dict[str, list[int]] = {each.name: [] for each in arm.work}
    most = sum(each.max_tokens for each in arm.work)
    num_open, begin_s = len(waiting), time.monotonic()
    while num_open:
        now_s = time.monotonic() - begin_s
        if now_s > _MOST_S:
            raise CommandFailed(f"arm {arm.name!r} did not end within {_MOST_S:.0f} s")
        while waiting and now_s >= waiting[0].at_s:
            work = waiting.pop(0)
            sent[client.send(work.submit())] = work
        while changes and now_s >= changes[0][0]:
            client.set_knobs(changes.pop(0)[1], _WHO)
        number, reply = client.receive(0.005) or (None, None)
        if number not in sent:
            continue
        if isinstance(reply, Error):
            raise CommandFailed(f"the engine refused {sent[number].name}: {reply.message}")
        if isinstance(reply, Output):
            outputs[sent[number].name] += reply.token_ids
            progress(sum(map(len, outputs.values())) / most)
            num_open -= reply.finish_reason is not None
    return outputs


def _wait_for(source: Subscriber, step: int) -> None:
    history = source.history
    if not awaited(lambda: history.info is not None and (history.last_step or 0) >= step, _START_S):
        is_silent = history.info is None
        raise CommandFailed("the engine publishes nothing" if is_silent else "steps are missing")
