"""`StepRecorder`: builds step records from what an engine received, scheduled and finished.

An engine may have two steps in flight. Steps are published in order. The effects of a step on
requests and blocks are applied when that step ends. A row counts as wasted if its request ended or
was preempted before the step ended.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic_ns
from typing import Any

from stepscope.engine.adapters.attached.hold_ups import HoldUps
from stepscope.engine.adapters.attached.settlement import (
    BlockGroups,
    Judged,
    PublishedPool,
    Settlement,
)
from stepscope.engine.adapters.attached.tracked import (
    EngineRequest,
    Freed,
    TrackedRequest,
    UnfinishedStep,
    gives_first_token,
    gives_token,
    num_tokens_of,
)
from stepscope.engine.protocol import wire
from stepscope.engine.protocol.wire import HeldRow, RequestEvent
from stepscope.engine.telemetry.step_draft import StepDraft
from stepscope.engine.telemetry.step_watcher import StepUnderWay


class StepRecorder:
    """Builds step records. Use it only inside `with attachment.notes.done()`.

    Args:
        pool: the published state of the KV pool. None if the engine does not report its blocks.
        caches_prefixes: whether the engine looks prompts up in a prefix cache.
        judged: says why prompts missed it; None if nobody wants to know.

    Attributes:
        table: requests that have not ended, by the engine's ids.
        published_step: number of the last published step, -1 before the first.
        has_unpublished: whether something happened that is not published yet.
        hold_ups: what held up the engine's thread; each record takes those before its tokens.
    """

    def __init__(
        self, pool: PublishedPool | None, caches_prefixes: bool, judged: Judged | None = None
    ) -> None:
        self.pool = pool
        self.hold_ups = HoldUps()
        self.table: dict[str, TrackedRequest] = {}
        self.next_step = 0
        self.published_step = -1
        self.knobs_version = 0
        self.has_unpublished = False
        self._settlement = Settlement(pool, caches_prefixes, judged)
        self._in_flight: deque[UnfinishedStep] = deque()
        self._arrivals: list[RequestEvent] = []
        self._settled: list[RequestEvent] = []  # in steps that ran no request
        self._ends: list[RequestEvent] = []
        self._held: list[TrackedRequest] = []  # as published
        self._held_between: list[HeldRow] | None = None
        self._front: list[wire.FrontEnd] = []
        self._last_to_sift = -1  # steps after this one have no rows of ended requests
        self._next_id = 0
        self._tokens_ns = 0

    def arrived(
        self,
        engine_request: EngineRequest,
        arrival_ns: int,
        prefix_hashes: list[int] | None = None,
        *,
        has_output: bool = True,
        elsewhere: str | None = None,
    ) -> TrackedRequest:
        """Add a request that is not in the table, and return it.

        For `prefix_hashes` and `elsewhere` see `Arrived`; `has_output`: it samples tokens.
        """
        arrival_ns = min(arrival_ns, monotonic_ns())
        max_tokens = engine_request.max_tokens if has_output else 0
        tracked = TrackedRequest(self._next_id, engine_request, arrival_ns, max_tokens)
        tracked.elsewhere = elsewhere
        self._next_id += 1
        self.table[engine_request.request_id] = tracked
        self._arrivals.append(
            wire.Arrived(
                request_id=tracked.request_id,
                client_id=engine_request.request_id,
                num_prompt_tokens=engine_request.num_prompt_tokens,
                max_tokens=max_tokens,
                priority=engine_request.priority,
                time_ns=arrival_ns,
                prefix_hashes=prefix_hashes,
                elsewhere=elsewhere,
            )
        )
        self.has_unpublished = True
        return tracked

    def begun(self, step: UnfinishedStep, *, runs: bool) -> None:
        """Add a step that the engine has scheduled, and number it if it runs a request."""
        self._in_flight.append(step)
        step.knobs_version = self.knobs_version
        if runs:
            step.number = self.next_step
            self.next_step += 1

    def lost(self, requests: Sequence[TrackedRequest]) -> None:
        """Count the rows of preempted requests as wasted in all steps in flight."""
        for step in self._in_flight:
            step.lost.update(requests)
        self._last_to_sift = self.next_step - 1

    def ended(self, tracked: TrackedRequest, event: RequestEvent) -> None:
        """Remove a request that the engine has ended. `event` says how it ended."""
        del self.table[tracked.engine_request.request_id]
        tracked.ended = True
        self._ends.append(event)
        self._settlement.release(tracked)
        self._last_to_sift = self.next_step - 1
        self.has_unpublished = True

    def take(self, is_it: Callable[[UnfinishedStep], bool]) -> UnfinishedStep | None:
        """Remove and return the step that the engine has finished: of which `is_it` is true.

        Also applies the effects of older steps that ran no request. Their events are published with
        the next record. Returns None if the finished step ran no request either. Raises
        RuntimeError: the engine finished a step that is not the oldest one in flight.
        """
        while self._in_flight:
            step = self._in_flight[0]
            if step.number is not None:
                if not is_it(step):
                    raise RuntimeError("a step has ended that is not the oldest one in flight")
                return self._in_flight.popleft()
            self._settle_oldest()
            if is_it(step):
                return None
        return None

    def settle_empty(self) -> None:
        """Apply the effects of the oldest steps that ran no request: no record will tell them."""
        while self._in_flight and self._in_flight[0].number is None:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        step = self._in_flight.popleft()
        self._settled += self._settlement.settle(step, set())
        if step.held is not None:
            self.hold_between(step.held)
        self.has_unpublished = True

    def record(
        self,
        step: UnfinishedStep,
        tokens_ns: int,
        num_dropped: int,
        ended_now: set[TrackedRequest],
        kv_used: float | None = None,
        transfers: wire.KVTransfers | None = None,
    ) -> StepDraft:
        """Return the record of a step that `take` returned.

        Args:
            tokens_ns: when the engine had the step's tokens.
            num_dropped: messages that subscribers have missed so far.
            ended_now: requests that ended with this step's tokens.
            kv_used: the share of the KV pool in use, if the pool is not published.
        """
        assert step.number is not None
        events = self._settlement.settle(step, ended_now)
        has_lost = step.lost or step.number <= self._last_to_sift
        num_wasted = step.drop_lost(ended_now) if has_lost else 0
        self._note_tokens(step, tokens_ns, events)
        drafts = step.check_drafts()
        self._set_back(step)
        kv, moves = self._settlement.drain()
        is_ahead, not_before_ns = step.start_ns < self._tokens_ns, self._tokens_ns
        self._tokens_ns = tokens_ns
        self.published_step = step.number
        launch_ns = step.launch_ns
        return StepDraft(
            step=step.number,
            schedule_start_ns=max(step.start_ns, not_before_ns),
            schedule_end_ns=max(step.end_ns, not_before_ns),
            launch_ns=None if launch_ns is None else max(launch_ns, not_before_ns),
            tokens_ns=tokens_ns,
            device_ns=step.device_ns,
            knobs_version=step.knobs_version,
            token_budget=step.token_budget,
            max_num_seqs=step.num_seats,
            num_prefill_tokens=step.num_prefill_tokens,
            num_decode_tokens=step.num_tokens - num_wasted - step.num_prefill_tokens,
            num_padded_tokens=None,
            num_graph_padding=step.num_graph_padding,
            batch=step.batch,
            kv=kv,
            moves=moves,
            num_running=max(0, step.num_running - len(ended_now)),
            num_waiting=step.num_waiting,
            waiting_reasons=step.waiting_reasons,
            events=self._drain_events(events),
            num_dropped=num_dropped,
            hidden_ns=step.end_ns - step.start_ns if is_ahead else None,
            num_wasted_tokens=num_wasted or None,
            cuda_graph=step.cuda_graph,
            held=self._hold(step.held, step.overtaken),
            held_prefills=step.held_prefills,
            front=self._drain_front(),
            hold_ups=self.hold_ups.take(tokens_ns),
            ranks=step.ranks,
            drafts=drafts,
            totals=self._settlement.totals(kv_used),
            kv_transfers=transfers,
            **self._grouped(moves),
        )

    @property
    def groups(self) -> BlockGroups | None:
        """The groups of the KV blocks; None if all are of one, or unknown."""
        return None if self.pool is None else self.pool.groups

    def freed(self, freed: Sequence[Freed]) -> None:
        """Publish blocks that requests have given back since the last step was scheduled."""
        self._settlement.free(freed)
        self.has_unpublished |= bool(freed)

    def hold_between(self, held: dict[TrackedRequest, str]) -> None:
        """Note who is held back while no step runs; the next status tells of it."""
        self._held_between = [*(self._held_between or ()), *(self._hold(held) or ())] or None

    def tell(self, front: wire.FrontEnd) -> None:
        self._front.append(front)
        self.has_unpublished = True

    def drain(self) -> dict[str, Any]:
        """Remove and return what no message has told yet: fields of the next `EngineStatus`."""
        kv, moves = self._settlement.drain()
        told = {"kv": kv, "moves": moves, "held": self._held_between, "front": self._drain_front()}
        self._held_between = None
        return told | {"events": self._drain_events(), **self._grouped(moves)}

    def _drain_events(self, of_step: Sequence[RequestEvent] = ()) -> list[RequestEvent]:
        events = [*self._arrivals, *self._settled, *of_step, *self._ends]
        self._arrivals, self._settled, self._ends = [], [], []
        self.has_unpublished = False
        return events

    def _drain_front(self) -> list[wire.FrontEnd] | None:
        front, self._front = self._front, []
        return front or None

    def _grouped(self, moves: Sequence[wire.BlockMove]) -> dict[str, Any]:
        if (groups := self.groups) is None:
            return {}
        of_moves = groups.of_moves(moves) if moves else None
        return {"kv_groups": groups.counts(), "move_groups": of_moves}

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The oldest unfinished step that runs something, or None."""
        for step in self._in_flight:
            if step.number is not None:
                since_ns = max(step.start_ns, self._tokens_ns)
                return StepUnderWay(step.number, since_ns, step.running_rows(), step.token_budget)
        return None

    def views(self) -> list[wire.RequestView]:
        in_flight: Counter[int] = Counter()
        for step in self._in_flight:
            for row in step.rows:
                in_flight[row[0].request_id] += num_tokens_of(row)
        return [tracked.view(in_flight[tracked.request_id]) for tracked in self.table.values()]

    def known(self, names: Collection[str]) -> list[TrackedRequest]:
        """Return the requests with these engine ids that have not ended, in arrival order."""
        found = [self.table[name] for name in names if name in self.table]
        return sorted(found, key=lambda tracked: tracked.request_id)

    def _hold(
        self, held: dict[TrackedRequest, str] | None, overtaken: Sequence[TrackedRequest] = ()
    ) -> list[HeldRow] | None:
        """Publish who is held back from this step on; None: those as before. Returns changes."""
        looked_at = [] if held is None else [*self._held, *held]
        changed = []
        for tracked in [*looked_at, *overtaken]:
            is_running = tracked.status == "running"
            common = "priority" if tracked.was_overtaken and not is_running else ""
            reason = (held or {}).get(tracked, common)
            now = reason, tracked.num_blocks if reason else 0
            if (tracked.held, tracked.held_blocks) != now and not tracked.ended:
                tracked.held, tracked.held_blocks = now
                if reason or not is_running:
                    changed.append(HeldRow(tracked.request_id, *now))
        if held is not None:
            self._held = list(held)
        return changed or None

    def _set_back(self, step: UnfinishedStep) -> None:
        # The engine scheduled the steps in flight as if all drafts were right.
        for tracked, num_got in step.num_got.items() if self._in_flight else ():
            if tracked in step.lost:
                continue
            num_rejected = step.drafted[tracked] + 1 - num_got
            for later in self._in_flight:
                later.set_back[tracked] = later.set_back.get(tracked, 0) + num_rejected

    @staticmethod
    def _note_tokens(step: UnfinishedStep, tokens_ns: int, events: list[RequestEvent]) -> None:
        for row in step.rows:
            if row[3] is None:  # an ordinary decode: almost every row is one, so avoid a call
                row[0].last_ns = tokens_ns
            elif gives_token(row):
                tracked = row[0]
                tracked.last_ns = tokens_ns
                if gives_first_token(row):
                    tracked.first_ns = tokens_ns
                    events.append(wire.FirstToken(tracked.request_id))
