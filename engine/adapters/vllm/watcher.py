"""`VllmWatcher`: reads what vLLM schedules and finishes, for the step recorder."""

import os
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, cast

from stepscope.engine.adapters.attached.reports import ProcessReports
from stepscope.engine.adapters.attached.step_recorder import StepRecorder
from stepscope.engine.adapters.attached.tracked import TrackedRequest, UnfinishedStep
from stepscope.engine.adapters.vllm import kv_blocks, scheduled, versions
from stepscope.engine.adapters.vllm.ranks import DeviceTimes, RankTable
from stepscope.engine.adapters.vllm.versions import SchedulerOutput, VllmRequest, VllmScheduler
from stepscope.engine.protocol import wire
from stepscope.engine.telemetry.step_draft import StepDraft

PREFIX_HASHES = "STEPSCOPE_PREFIX_HASHES"
_LOOK_STEPS = 16
_RESET = "the prefix cache was reset"
_STOP_OR_GONE = "by a stop string, or its client left"


class Noted(NamedTuple):
    """The state of vLLM right after it scheduled a step.

    Attributes:
        budget: maximum number of tokens of this step.
        held: see `HeldRequests`; None: as before.
        freed: blocks that were freed meanwhile, see `note_freed`.
        loads: requests that got blocks for keys and values from elsewhere, for how many tokens;
            and if these are on their way while the request waits, the ids of those blocks by table.
        is_without_prefills: see `scheduled.leaves_out_prefills`.
    """

    start_ns: int
    end_ns: int
    budget: int
    num_seats: int
    num_running: int
    num_waiting: int
    waiting_reasons: dict[str, int]
    preempted: Collection[str]
    held: Mapping[str, str] | None
    freed: Sequence[int]
    loads: Sequence[tuple[str, int, Sequence[Sequence[int]]]]
    is_without_prefills: bool


class VllmWatcher:
    """Reports what vLLM does to the step recorder.

    Use it only inside `with attachment.notes.done()`, except for `note` and what it passes on.

    `pool`, the state of the KV blocks, is None if vLLM has kinds of layers that are not known;
    `groups` if all blocks are of one, which holds the whole context.
    """

    def __init__(self, scheduler: VllmScheduler, reports_path: Path) -> None:
        self._scheduler = scheduler
        self._queues = [name for name in versions.QUEUES if hasattr(scheduler, name)]
        self._has_cadence = hasattr(scheduler, versions.CADENCE)
        self._has_connector = getattr(scheduler, "connector", None) is not None
        self.groups: tuple[wire.KVGroup, ...] | None = None
        self.pool: kv_blocks.PublishedBlocks | None = None
        self.holders: kv_blocks.BlockHolders | None = None
        if (found := versions.groups_of(scheduler)) is not None:
            groups, of_table = found
            if len(groups) > 1 or groups[0].kind != "full attention":
                self.groups = tuple(groups)
            pool, sizes = scheduler.kv_cache_manager.block_pool, [g.block_size for g in groups]
            self.pool = kv_blocks.PublishedBlocks(pool, len(self.groups or ()))
            self.holders = kv_blocks.BlockHolders(of_table, sizes)
        self._freed: list[int] = []
        self._loads: list[tuple[str, int, bool]] = []
        caches_prefixes = bool(scheduler.cache_config.enable_prefix_caching)
        self._hashes: kv_blocks.VllmPrefixHashes | None = None
        self._judged: kv_blocks.JudgedBlocks | None = None
        if caches_prefixes and os.environ.get(PREFIX_HASHES, "") == "1":
            self._hashes = kv_blocks.VllmPrefixHashes(scheduler)
            if self.pool is not None and self.groups is None and not self._has_connector:
                self._judged = kv_blocks.JudgedBlocks(self.pool.num_blocks, scheduler.block_size)
        self.recorder = StepRecorder(self.pool, caches_prefixes, self._judged)
        rank_sizes = versions.rank_sizes(scheduler.vllm_config.parallel_config)
        self._ranks, self._has_ranks = RankTable(*rank_sizes), rank_sizes != (1, 1)
        self.reports = ProcessReports(reports_path, self.recorder, self._ranks.add)
        self.device_times = DeviceTimes.if_here()
        self._held = scheduled.HeldRequests(scheduler)
        policy = scheduler.scheduler_config.policy
        self._has_priorities = getattr(policy, "value", policy) == "priority"
        loras = getattr(scheduler, "lora_config", None)
        self._max_loras = 0 if loras is None else int(loras.max_loras or 0)
        self._taken_back: set[str] = set()  # preempted by a reset, and told by no output yet

    def added(self, request: VllmRequest) -> None:
        """Note the arrival of a request. New input for one that is known already is none."""
        if request.request_id in self.recorder.table:
            return
        # vLLM's `arrival_time` is wall-clock time of another process: convert to monotonic time.
        arrival_ns = int(request.arrival_time * 1e9) - (time.time_ns() - monotonic_ns())
        hashes = None if self._hashes is None else self._hashes.of_prompt(request)
        has_output, elsewhere = request.pooling_params is None, versions.elsewhere(request)
        tracked = self.recorder.arrived(
            request, arrival_ns, hashes, has_output=has_output, elsewhere=elsewhere
        )
        self.reports.arrived(request.request_id, tracked.request_id)

    def note(
        self,
        out: SchedulerOutput,
        start_ns: int,
        end_ns: int,
        budget: int,
        *,
        is_throttled: bool = False,
    ) -> Noted | None:
        """Return vLLM's state right after `schedule()`, to be passed to `scheduled`.

        None if there is nothing to tell: no token, no preemption, no block freed or loaded into.
        `budget`: tokens of this step at most; `is_throttled`: vLLM is to leave prefills out of it.
        """
        scheduler = self._scheduler
        preempted = out.preempted_req_ids or ()
        if self._taken_back:
            preempted = set(preempted) - self._taken_back
            self._taken_back = set()
        if not (preempted or out.total_num_scheduled_tokens or self._freed or self._loads):
            return None
        if self._has_ranks and out.total_num_scheduled_tokens:
            self._ranks.stamp(out)
        num_seats, num_waiting, held = versions.num_seats(scheduler), self.num_waiting, self._held
        is_free = (is_throttled or self._has_cadence) and scheduled.leaves_out_prefills(
            scheduler, is_throttled=is_throttled
        )
        reasons: dict[str, int] = {}
        held_anew = halted = None
        if num_waiting or held.reasons:
            halted = self.halted
            is_due = bool(self._loads) or not self.recorder.next_step % _LOOK_STEPS
            is_full = len(scheduler.running) >= num_seats
            is_bound = is_full or is_free or out.total_num_scheduled_tokens >= budget
            number = 0 if halted else num_waiting
            held_anew = held.look_after(out, number, is_due=is_due, is_bound=is_bound)
            if held_anew is None and self._loads:  # their blocks are told with it
                held_anew = held.reasons
        loads, self._loads = self._loads, []
        if num_waiting:
            common = "preemption" if preempted else "paused" if halted else None
            if common is None:
                common = scheduled.common_reason(
                    scheduler, out, num_seats, budget, held.reasons, is_without_prefills=is_free
                )
            reasons = scheduled.counted(num_waiting, common, held.reasons)
        told = [
            (name, count, scheduler.kv_cache_manager.get_block_ids(name) if is_late else ())
            for name, count, is_late in loads
        ]
        state = start_ns, end_ns, budget, num_seats, len(scheduler.running), num_waiting, reasons
        return Noted(*state, preempted, held_anew, self.take_freed(), told, is_free)

    def note_freed(self, blocks: Iterable[Any]) -> None:
        """Note blocks that the pool has just freed: twice their ids, and 1 if they are cached."""
        self._freed += [each.block_id << 1 | (each.block_hash is not None) for each in blocks]

    def take_freed(self) -> list[int]:
        """Remove and return the blocks that were freed since the last call, to be passed on."""
        freed, self._freed = self._freed, []
        return freed

    def note_load(self, request: VllmRequest, num_tokens: int, *, waits: bool) -> None:
        """Note that a request got blocks for KV from elsewhere, and whether it waits for that."""
        self._loads.append((request.request_id, num_tokens, waits))

    def held_anew(self) -> dict[TrackedRequest, str] | None:
        """Return who is held back while no step runs, and why; None if that is known already."""
        anew = self._held.look(0 if self.halted else self.num_waiting)
        return None if anew is None else self._tracked(anew)

    def _tracked(self, held: Mapping[str, str]) -> dict[TrackedRequest, str]:
        table = self.recorder.table
        return {table[name]: reason for name, reason in held.items() if name in table}

    def drafted(self, out: SchedulerOutput) -> list[tuple[str, VllmRequest, int]]:
        """Return the requests with drafts, and their output tokens before `update_from_output`."""
        requests = self._scheduler.requests
        return [
            (name, requests[name], requests[name].num_output_tokens)
            for name in out.scheduled_spec_decode_tokens
            if name in requests
        ]

    def scheduled(self, out: SchedulerOutput, noted: Noted) -> None:
        """Record what `schedule()` decided, now or later, but in the order of the steps."""
        total, recorder, holders = out.total_num_scheduled_tokens, self.recorder, self.holders
        step = UnfinishedStep(out, noted.start_ns, noted.end_ns, noted.budget, noted.num_seats)
        step.num_tokens = total
        if noted.preempted:
            step.preempt(recorder.known(noted.preempted))
        if holders is not None:
            step.freed = holders.free(noted.freed)
            for name, num_tokens, tables in noted.loads:
                if (tracked := recorder.table.get(name)) is not None:
                    tracked.num_loaded, tracked.is_loaded_early = num_tokens, bool(tables)
                    if tables:
                        step.taken += holders.take(tracked, tables, 0, noted.end_ns)
        scheduled.note_blocks(step, out, recorder.table, holders)
        scheduled.make_rows(step, out, recorder.table)
        if self._has_priorities and step.admitted:
            step.overtaken = scheduled.overtaken(step, recorder.table, self._max_loras)
        step.num_running, step.num_waiting = noted.num_running, noted.num_waiting
        step.waiting_reasons = noted.waiting_reasons
        if noted.is_without_prefills:
            # A prompt that is not computed to its end has no row in this step.
            step.held_prefills = "cadence" in noted.waiting_reasons or any(
                each.is_prefilling and each.block_table for each in recorder.table.values()
            )
        if noted.held is not None:
            step.held = self._tracked(noted.held)
        recorder.begun(step, runs=bool(total))

    def updated(
        self,
        out: SchedulerOutput,
        result: object,
        tokens_ns: int,
        num_dropped: int,
        num_got: Mapping[str, int],
        kv_used: float | None,
        finished: Collection[str],
        freed: list[int],
    ) -> StepDraft | None:
        """Return the record of the step whose `update_from_output` has returned.

        None if the step ran no request.

        Args:
            result: vLLM's `ModelRunnerOutput`, with graphs if `--cudagraph-metrics` is on.
            tokens_ns: when `update_from_output` was called.
            num_got: for each request with drafts, how many tokens it got.
            finished, freed: see `note_ended`.
        """
        ended_now, recorder = self.note_ended(finished, freed), self.recorder
        if not out.total_num_scheduled_tokens:  # other steps may be in flight, as in a pipeline
            recorder.settle_empty()
            return None
        step = recorder.take(lambda step: step.key is out)
        if step is None:
            raise RuntimeError("vLLM finished a step that it did not schedule")
        if self.device_times is not None:
            step.device_ns = self.device_times.take_ns(out)
        if self._has_ranks:
            self.reports.read()
            step.ranks = self._ranks.of(out, step.start_ns, tokens_ns)
        if (graph := getattr(result, "cudagraph_stats", None)) is not None:
            step.cuda_graph = str(graph.runtime_mode).lower()
            step.num_graph_padding = graph.num_paddings
        for tracked in step.drafted:
            step.num_got[tracked] = num_got.get(tracked.engine_request.request_id, 0)
            if not step.num_got[tracked]:  # vLLM has dropped what the step computed
                step.lost.add(tracked)
        transfers = self.kv_transfers
        return recorder.record(step, tokens_ns, num_dropped, ended_now, kv_used, transfers)

    def note_ended(self, finished: Collection[str], freed: list[int]) -> set[TrackedRequest]:
        """Record what vLLM has ended and freed since the last call. Returns the ended requests.

        `finished`: vLLM's `finished_req_ids`, also those that are known; `freed`: `take_freed`'s.
        """
        found = self.recorder.known(finished)
        for tracked in found:
            self.recorder.ended(tracked, self._end_of(tracked))
        if self.holders is not None:
            self.recorder.freed(self.holders.free(freed))
            for tracked in found if self._has_connector else ():
                self.holders.end(tracked, monotonic_ns())
        return set(found)

    def forgot_cache(self, running: Collection[str]) -> None:
        """Note that vLLM has reset its prefix cache, and taken back blocks of `running` ones."""
        if lost := self.recorder.known(running):
            self._taken_back.update(running)
            self.recorder.lost(lost)
            now_ns = monotonic_ns()
            step = UnfinishedStep(None, now_ns, now_ns, None, 0)
            step.preempt_reason = _RESET
            step.preempt(lost)
            if self.holders is not None:
                # They are not cached any more.
                step.freed = self.holders.free(each & ~1 for each in self.take_freed())
            self.recorder.begun(step, runs=False)
            if self.recorder.step_under_way is None:
                self.recorder.settle_empty()
        if self._judged is not None:
            self._judged.forget_all()
        if self.pool is not None:
            self.pool.check_cached()
            self.recorder.has_unpublished = True

    @property
    def kv_transfers(self) -> wire.KVTransfers | None:
        return None if self.holders is None else self.holders.transfers()

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def kv_used(self) -> float | None:
        if self.pool is not None or not self._scheduler.kv_cache_config.kv_cache_groups:
            return None
        return float(self._scheduler.kv_cache_manager.usage)

    @property
    def halted(self) -> wire.EngineState | None:
        return versions.halt(self._scheduler)

    @property
    def num_waiting(self) -> int:
        number = 0
        for name in self._queues:
            queue = getattr(self._scheduler, name)
            # vLLM's own `__len__` of a deque is slower by a microsecond.
            number += deque.__len__(queue) if isinstance(queue, deque) else len(queue)
        return number

    def _end_of(self, tracked: TrackedRequest) -> wire.RequestEvent:
        request = cast(VllmRequest, tracked.engine_request)
        status = request.status.name.removeprefix("FINISHED_").lower()
        if status == "aborted":
            # vLLM's front end looks for stop strings, and then aborts the request here.
            reason = self.reports.reason(tracked.request_id)
            if reason != "stop":
                has_stop = getattr(getattr(request, "sampling_params", None), "stop", None)
                unknown = _STOP_OR_GONE if has_stop else "aborted in vLLM"
                said = "its client left" if reason == "abort" else unknown
                return wire.Aborted(tracked.request_id, said)
            status = "stopped"
        reasons = {"stopped": "stop", "length_capped": "length", "ignored": "length"}
        return wire.Finished(
            tracked.request_id,
            reasons.get(status, status),
            request.num_output_tokens,
            None if self._hashes is None else self._hashes.of_output(request),
        )
