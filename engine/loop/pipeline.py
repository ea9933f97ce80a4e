"""`Pipeline`: the steps under way, at most two.

Without overlap there is one: scheduled, executed, taken in, told of. With overlap the next one is
scheduled and launched before the tokens of the first have reached the host, and while it runs the
first is taken in, delivered and told of: the device does not wait for the host (asynchronous
scheduling, NanoFlow, Zhu et al., 2024). Where the next step cannot be chosen without those tokens,
it is prepared after them (`Scheduler.can_run_ahead`).

A request that turns out to have ended has a row in the next step for nothing: what it samples is
thrown away. Its blocks are free at once, for whoever gets them writes to them in a later step.
"""

import contextlib
import logging
from typing import TYPE_CHECKING

from stepscope.engine.loop.pending_step import FailedLaunch, PendingStep, Unlaunched
from stepscope.engine.scheduling.planned_blocks import PlannedBlocks
from stepscope.engine.scheduling.request import RequestStatus
from stepscope.engine.scheduling.step import InFlight, ScheduledStep, StepResult
from stepscope.engine.scheduling.token_limit import TokenLimit
from stepscope.engine.telemetry.batch_rows import BatchRows
from stepscope.engine.telemetry.step_draft import StepDraft

if TYPE_CHECKING:
    from stepscope.engine.loop.core import EngineCore, TelemetrySink

log = logging.getLogger("stepscope.engine")


class Pipeline:
    """Belongs to the engine's thread."""

    def __init__(self, core: "EngineCore") -> None:
        self._core = core
        self._runner = core.runner
        self._scheduler = core.scheduler
        self._batch_rows = BatchRows(core.scheduler)
        self._token_limit = TokenLimit()
        self._ahead: PendingStep | None = None  # launched, and everything before it is told of
        self._tokens_ns = 0  # when those of the last step were known

    @property
    def has_step_in_flight(self) -> bool:
        return self._ahead is not None

    def step(self) -> bool:
        """Begin a step if none is in flight, launch the one after it, finish the first.

        False when there is nothing to run.
        """
        step, self._ahead = self._ahead, None
        if step is None:
            if self._core.steps_allowed == 0 or not self._scheduler.has_work():
                return False
            step = self._begin(None)
            if step is None:
                return True  # the only request preempted itself: the next step admits it again
        if self._may_run_ahead(step):
            self._run_ahead(step)
        self._finish(step)
        return True

    def settle(self) -> None:
        """Wait for the step in flight, if there is one, and tell of it."""
        step, self._ahead = self._ahead, None
        if step is not None:
            self._finish(step)

    def _begin(self, before: PendingStep | None) -> PendingStep | None:
        """Schedule the next step and launch it; None when there is nothing to run.

        Args:
            before: a step in flight, that this one is launched upon.
        """
        core, scheduler, clock = self._core, self._scheduler, self._runner.clock
        start_ns = clock()
        rows = scheduler.schedule()
        end_ns = clock()
        if not rows:
            return None
        number = core.next_step
        after = None if before is None else before.handle
        step = ScheduledStep(number, rows, scheduler.num_padded_tokens, after)
        handle: InFlight
        try:
            handle = self._runner.launch(step) if core.overlap else Unlaunched(self._runner, step)
        except Exception as error:  # noqa: BLE001 - it is told when its turn comes
            handle = FailedLaunch(error)
        launched_ns = None if before is None else clock()
        draft = None
        if core.sink is not None:
            batch = self._batch_rows.encode(rows)
            draft = StepDraft.open(number, (start_ns, end_ns), batch, scheduler, core.knobs_version)
        core.next_step += 1
        if core.steps_allowed is not None:
            core.steps_allowed -= 1
        return PendingStep(number, rows, handle, launched_ns, draft)

    def _may_run_ahead(self, step: PendingStep) -> bool:
        return (
            self._core.overlap
            and self._core.steps_allowed != 0
            and step.handle.is_whole
            and self._scheduler.can_run_ahead(step.rows)
        )

    def _run_ahead(self, step: PendingStep) -> None:
        """Launch the next step while this one is in flight, if there will be anything to run."""
        self._set_apart(step)
        self._scheduler.assume(step.rows)
        self._ahead = self._begin(step)
        if self._ahead is not None:
            self._set_apart(self._ahead)

    def _set_apart(self, step: PendingStep) -> None:
        """What has happened until it was scheduled is told with it, and not with the next one."""
        if step.draft is not None and step.planned is None:
            step.events += self._core.drain_events()
            step.planned = PlannedBlocks.drain(self._scheduler.kv)

    def _finish(self, step: PendingStep) -> None:
        """Wait for a step, take in its tokens, deliver them and tell of it."""
        try:
            result = step.handle.collect()
        except Exception:
            log.exception("step %d failed; its %d requests are ended", step.number, len(step.rows))
            self._give_up(step)
            return
        core, scheduler, ahead = self._core, self._scheduler, self._ahead
        self._note_memory(step, result)
        result = step.result_of(result)
        finished = scheduler.update(step.rows, result.token_ids)
        if finished and ahead is not None:
            ahead.drop_ended()
        draft, teller = step.draft, core.token_teller
        if teller is not None:  # it keeps what it was given, whether or not anybody is told
            texts = teller.texts(step.rows, result.token_ids)
            if draft is not None:
                draft.token_ids, draft.texts = result.token_ids, texts
        core.delivery.deliver(step.rows, result)
        if core.sink is not None and draft is not None:
            self._tell(core.sink, draft, step, result, len(finished))
        self._tokens_ns = result.tokens_ns

    def _tell(
        self,
        sink: "TelemetrySink",
        draft: StepDraft,
        step: PendingStep,
        result: StepResult,
        num_finished: int,
    ) -> None:
        """Publish the record of a step that has ended."""
        core, scheduler = self._core, self._scheduler
        if core.overlap:
            draft.end(result, None)
            self._settle_overlapped(draft, step, num_finished)
        else:
            draft.num_running = len(scheduler.running)
            draft.end(result, scheduler.kv)
        if step.num_wasted_tokens:
            draft.num_wasted_tokens = step.num_wasted_tokens
        if core.has_untold or scheduler.untold_events or step.events:
            draft.events = step.events + core.drain_events()
        draft.num_dropped = sink.num_dropped
        if core.tells_of_pause:
            core.set_pauses(core.pauses.after_step(draft.schedule_start_ns, draft.tokens_ns))
        sink.publish(draft)

    def _settle_overlapped(self, draft: StepDraft, step: PendingStep, num_finished: int) -> None:
        scheduler, ahead = self._scheduler, self._ahead
        if ahead is None or ahead.draft is None:
            draft.num_running, draft.num_waiting = len(scheduler.running), len(scheduler.waiting)
        else:
            draft.num_running -= num_finished
            ahead.draft.num_running -= num_finished
        planned_upon = None if ahead is None else ahead.planned
        draft.settle_between(scheduler.kv, step.planned, planned_upon)
        if step.launched_ns is not None:
            draft.hide(step.launched_ns, self._tokens_ns)
            draft.num_wasted_tokens = step.num_wasted_tokens

    # Steps that fail

    def _note_memory(self, step: PendingStep, result: StepResult) -> None:
        """Where a device had no memory for a step, keep the next ones smaller.

        Requests of which not even one token found room are ended; the others go on.
        """
        limit = self._token_limit
        if result.num_tokens_fit is None and limit.tokens is None and not limit.is_on_trial:
            return
        limit.note(sum(row.num_tokens for row in step.rows), result.num_tokens_fit)
        scheduler = self._scheduler
        if scheduler.token_limit != limit.tokens:
            scheduler.token_limit = limit.tokens
        if not result.unfit_rows:
            return
        unwritten: set[int] = set()
        for row in step.launched(result.unfit_rows):
            unwritten |= scheduler.kv.unregister(row.request, row.start, row.num_tokens)
            self._core.abort(row.request.request_id, "the device has no memory for one token of it")
        # Whoever was admitted in this step upon blocks that were to be filled in it.
        for request in [r for r in scheduler.running if not unwritten.isdisjoint(r.block_table)]:
            scheduler.requeue(request, "device_memory")
        if step.draft is not None:
            step.draft.num_waiting = len(scheduler.waiting)
        step.drop_ended()

    def _give_up(self, step: PendingStep) -> None:
        """A step that fails ends the requests in it, not the engine.

        What was launched upon it is not worth anything; its other requests are computed anew.
        """
        ahead, self._ahead = self._ahead, None
        undone = [step] if ahead is None else [ahead, step]
        core, scheduler = self._core, self._scheduler
        if ahead is not None:
            with contextlib.suppress(Exception):
                ahead.handle.collect()  # the device is done with its blocks
        for each in undone:
            core.return_events(each.events)
            if each.planned is not None:
                each.planned.give_back(scheduler.kv)
            if core.steps_allowed is not None:
                core.steps_allowed += 1
        core.next_step = step.number
        core.has_untold = True
        # Blocks are known by what this step should have written to them.
        scheduler.kv.reset_prefix_cache()
        for request in step.requests():
            core.abort(request.request_id, "the engine failed in this step")
        scheduler.settle()
        for request in [] if ahead is None else ahead.requests():
            if request.status is RequestStatus.RUNNING:
                scheduler.requeue(request, "step_failed")
