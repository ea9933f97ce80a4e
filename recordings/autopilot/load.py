"""`Load`: the present load of an engine (decodes, prompts, late tokens), from its last steps."""

from collections import deque
from typing import NamedTuple

from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.protocol.wire import Phase, RowFlag, StepRecord
from stepscope.engine.simulation.step_time import StepShape

WINDOW_S = 8.0
_FORGOTTEN_S = 60.0  # a request without a token for so long is taken as ended
_BINDING = 0.8  # a step that uses this share of the budget counts as limited by it
LATE_SHARE = 0.05  # share of gaps that may be late: the level holds for p95
_CALM_SHARE = 0.02  # a smaller share of late gaps leaves room to raise knobs
_FEWEST_GAPS = 20  # with fewer gaps, nothing is judged
_DECODE = int(Phase.DECODE)


class _SeenStep(NamedTuple):
    step: int
    time_ns: int
    num_gaps: int
    num_late: int
    num_decodes: int
    num_context_tokens: int  # context tokens of all decodes
    prompt_end: int  # largest end position of a prefill; 0 without prefill
    is_full: bool  # whether the budget limited it


class Judgement(NamedTuple):
    """How well the ITL level was kept over some steps."""

    late_share: float  # of the gaps between tokens: longer than the level
    is_late: bool  # too many, and a smaller budget would shorten steps
    is_calm: bool  # few, though the budget limited steps


class Load:
    """The load of an engine, from its steps of the last `WINDOW_S` seconds.

    `level_ns`: the ITL level. A longer gap between two tokens of a request is late, without the
    operator's pauses.
    """

    def __init__(self, level_ns: int) -> None:
        # Gaps between tokens, and late ones, since the start (not only in the window).
        self.num_gaps = self.num_late = 0
        self.pauses = PauseTrail()  # the operator's; must be fed every status. Steps end them, too.
        self._level_ns = level_ns
        self._steps: deque[_SeenStep] = deque()
        self._last_token_ns: dict[int, int] = {}

    def add(self, step: StepRecord) -> None:
        self.pauses = self.pauses.after(step)
        now_ns = step.tokens_ns
        num_gaps = num_late = num_decodes = num_context = prompt_end = 0
        for row in step.batch or ():
            if row.phase == _DECODE:
                num_decodes += 1
                num_context += row.start + 1
            else:
                prompt_end = max(prompt_end, row.start + row.num_tokens)
            if row.flags & RowFlag.LAST_CHUNK:
                before_ns = self._last_token_ns.get(row.request_id)
                self._last_token_ns[row.request_id] = now_ns
                if before_ns is not None:
                    num_gaps += 1
                    late_ns = now_ns - before_ns - self._level_ns
                    num_late += late_ns > self.pauses.within(before_ns, now_ns)
        self.num_gaps += num_gaps
        self.num_late += num_late
        num_tokens, budget = step.num_prefill_tokens + step.num_decode_tokens, step.token_budget
        is_full = budget is not None and num_tokens >= _BINDING * budget
        counts = num_gaps, num_late, num_decodes, num_context, prompt_end
        self._steps.append(_SeenStep(step.step, now_ns, *counts, is_full))
        while self._steps[0].time_ns < now_ns - WINDOW_S * 1e9:
            self._steps.popleft()

    def forget_ended(self) -> None:
        """Forget requests that got no token for `_FORGOTTEN_S`, as they have probably ended."""
        newest_ns = self._steps[-1].time_ns if self._steps else 0
        oldest_ns = newest_ns - _FORGOTTEN_S * 1e9
        known = self._last_token_ns.items()
        self._last_token_ns = {request: ns for request, ns in known if ns > oldest_ns}

    def judgement(self, first_step: int) -> Judgement | None:
        """Judge the steps of the window from `first_step` on; None: they have too few gaps."""
        steps = [step for step in self._steps if step.step >= first_step]
        if (num_gaps := sum(step.num_gaps for step in steps)) < _FEWEST_GAPS:
            return None
        late_share = sum(step.num_late for step in steps) / num_gaps
        is_late = late_share > LATE_SHARE and any(step.prompt_end for step in steps)
        is_calm = late_share < _CALM_SHARE and any(step.is_full for step in steps)
        return Judgement(late_share, is_late, is_calm)

    @property
    def num_decodes(self) -> int:
        return max((step.num_decodes for step in self._steps), default=0)

    def full_step(self, budget: int, num_decodes: int) -> StepShape:
        """Return the shape of a step that fills this budget and takes longest.

        It has `num_decodes` decodes with the mean context seen. The rest of the budget goes to
        prefills as long as the longest seen.
        """
        decodes = sum(step.num_decodes for step in self._steps)
        context = sum(step.num_context_tokens for step in self._steps) / max(1, decodes)
        length = max(1, *(step.prompt_end for step in self._steps))
        num_prefill = max(0, budget - num_decodes)
        num_whole, rest = divmod(num_prefill, length)
        # The remainder counts as the end of a prompt, where a token attends to the most.
        num_pairs = num_whole * length * (length + 1) // 2
        num_pairs += rest * (length - rest) + rest * (rest + 1) // 2
        num_prefills = num_whole + (rest > 0)
        return StepShape(
            num_rows=num_decodes + num_prefills, num_decodes=num_decodes,
            num_prefill_tokens=num_prefill, num_prefill_pairs=num_pairs,
            num_context_tokens=round(num_decodes * context),
            num_prefill_context=num_prefills * length,
        )  # fmt: skip
