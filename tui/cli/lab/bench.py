"""`LabBench`: runs the arms of experiments on one engine, and records each into its own file.

An arm is one run of the engine with certain knobs.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeAlias

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Abort, ResetPrefixCache, Submit
from stepscope.engine.protocol.replies import Error, Output, Submitted
from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import KnobValue
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.recordings.file.service_levels import levels_of
from stepscope.recordings.live.recorder import Recorder
from stepscope.recordings.live.subscriber import Subscriber
from stepscope.tui.cli.lab.experiment import LEVELS, Arm, ArmRun, Refused, Work
from stepscope.tui.settings.cli_errors import CommandFailed

BASE = Knobs(max_num_batched_tokens=256, max_num_seqs=16).as_dict()
_WHO = "stepscope lab"
_LARGEST_TOKEN_ID = 250  # every vocabulary has the ids up to this one
_MOST_S = 120.0  # time limit of an arm
_START_S = 20.0
Pair: TypeAlias = Callable[[], AbstractContextManager[Sequence[Endpoint]]]


class LabBench:
    """Runs arms on an engine of its own, or on two of `pair`, and restores its knobs."""

    def __init__(self, endpoint: Endpoint, folder: Path, pair: Pair | None) -> None:
        self._endpoint = endpoint
        self._folder = folder
        self._pair = pair
        self._client = ControlClient(endpoint, timeout_s=20.0)
        self._before: dict[str, KnobValue] = {}
        self._done: dict[int, ArmRun] = {}  # by id of the arm; experiments may share an arm

    def __enter__(self) -> "LabBench":
        snapshot = self._client.snapshot()
        if snapshot.requests:
            raise CommandFailed("the engine has requests of others: the lab needs it for itself")
        self._before = snapshot.knobs
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._client.set_knobs(self._before, _WHO)
        finally:
            self._client.close()

    def run(self, name: str, arm: Arm, progress: Callable[[float], None]) -> ArmRun:
        """Run an arm and record it. An arm that has run already is not run again."""
        if id(arm) not in self._done:
            with ExitStack() as stack:
                endpoints, clients = [self._endpoint], [self._client]
                if arm.is_apart:
                    assert self._pair is not None, "can_try was asked"
                    endpoints = list(stack.enter_context(self._pair()))
                    clients = [
                        stack.enter_context(ControlClient(each, timeout_s=20.0))
                        for each in endpoints
                    ]
                stem = f"{name}-{arm.name}".replace(" ", "-")
                self._done[id(arm)] = self._record(endpoints, clients, stem, arm, progress)
        return self._done[id(arm)]

    def can_try(self, arms: Sequence[Arm]) -> bool:
        """Whether the engines that these arms need are available."""
        return self._pair is not None or not any(arm.is_apart for arm in arms)

    def _record(
        self,
        endpoints: Sequence[Endpoint],
        clients: Sequence[ControlClient],
        stem: str,
        arm: Arm,
        progress: Callable[[float], None],
    ) -> ArmRun:
        for client in clients:
            client.set_knobs(BASE | dict(arm.knobs), _WHO)
            if not arm.is_warm:
                client.ask(ResetPrefixCache(who=_WHO))
        paths = [self._folder / f"{stem}{end}.mcap" for end in ("", "-decode")[: len(endpoints)]]
        for path in paths:
            path.unlink(missing_ok=True)
        sources = [Subscriber(each) for each in endpoints]
        recorders = [
            Recorder(source, path, lambda: levels_of(LEVELS))
            for source, path in zip(sources, paths, strict=True)
        ]
        for source in sources:
            source.start()
        try:
            for source in sources:
                _wait_for(source, None)
            outputs, refused = self._drive(clients[0], arm, progress)
            for source, client in zip(sources, clients, strict=True):
                _wait_for(source, client.snapshot().step)
        finally:
            for recorder, source in zip(recorders, sources, strict=True):
                recorder.stop()
                source.stop()
        for recorder in recorders:
            if recorder.error is not None:
                raise CommandFailed(recorder.error)
        decoding = ArmRun(arm.name, paths[1], {}, []) if len(paths) > 1 else None
        return ArmRun(arm.name, paths[0], outputs, refused, decoding)

    @staticmethod
    def _drive(
        client: ControlClient, arm: Arm, progress: Callable[[float], None]
    ) -> tuple[Mapping[str, list[int]], list[Refused]]:
        """Send the requests and changes of an arm; return tokens by request, and refusals."""
        waiting = sorted(arm.work, key=lambda each: each.at_s)
        changes = sorted(arm.changes, key=lambda each: each.at_s)
        sent: dict[int, Work] = {}
        outputs: dict[str, list[int]] = {each.name: [] for each in arm.work}
        refused: list[Refused] = []
        most = sum(each.max_tokens for each in arm.work)
        num_open, num_tokens, begin_s = len(waiting), 0, time.monotonic()
        running: set[int] = set()
        try:
            while num_open:
                now_s = time.monotonic() - begin_s
                if now_s > _MOST_S:
                    raise CommandFailed(f"arm {arm.name!r} did not end within {_MOST_S:.0f} s")
                while waiting and now_s >= waiting[0].at_s:
                    work = waiting.pop(0)
                    sent[client.send(_submit(work))] = work
                while changes and now_s >= changes[0].at_s:
                    client.set_knobs(changes.pop(0).knobs, _WHO)
                received = client.receive(0.005)
                if received is None or received[0] not in sent:
                    continue
                work, reply = sent[received[0]], received[1]
                if isinstance(reply, Error):
                    refused.append(Refused(work.name, reply.message))
                    num_open -= 1
                elif isinstance(reply, Submitted):
                    running.add(reply.request_id)
                elif isinstance(reply, Output):
                    outputs[work.name] += reply.token_ids
                    num_tokens += len(reply.token_ids)
                    progress(num_tokens / most)
                    if reply.finish_reason is not None:
                        running.discard(reply.request_id)
                        num_open -= 1
        finally:
            for request_id in running:
                client.send(Abort(request_id=request_id))
        return outputs, refused


def _submit(work: Work) -> Submit:
    shared, own = random.Random(0), random.Random(work.seed)
    token_ids = [shared.randint(1, _LARGEST_TOKEN_ID) for _ in range(work.num_shared)]
    rest = work.num_prompt_tokens - work.num_shared
    token_ids += [own.randint(1, _LARGEST_TOKEN_ID) for _ in range(rest)]
    return Submit(
        client_id=work.name,
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=work.max_tokens, ignore_eos=True, temperature=0.0),
        priority=work.priority,
        with_text=False,
    )


def _wait_for(source: Subscriber, step: int | None) -> None:
    deadline_s = time.monotonic() + _START_S
    while source.history.info is None or (step and (source.history.last_step or 0) < step):
        if time.monotonic() > deadline_s:
            is_silent = source.history.info is None
            raise CommandFailed(
                "the engine publishes nothing" if is_silent else "steps were not received"
            )
        time.sleep(0.01)
