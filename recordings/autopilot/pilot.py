"""`Autopilot`: changes the token budget, and if needed the seats, to hold an ITL level.

Decodes are in every step, so the gap between two tokens of a request is as long as a step. The
longest steps are those that fill their budget with prefill. A model of step times is refitted again
and again. It predicts the largest budget with which such a full step stays within the level. A
larger budget would break the level; a smaller budget would cost TTFT and throughput.

A margin corrects the model; it is learnt from the share of late gaps. Before a model can be fitted,
the budget is halved when many gaps are late, and raised when few are.

`StepSamples`: the newest steps of every shape seen, to fit a model of step times on. A plain window
of the newest steps would not do: an engine that serves one load for an hour would fill it with
equal steps, and displace the steps of other loads. So a few steps of each shape are kept.
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from stepscope.engine.protocol import wire
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.protocol.pause_trail import PauseTrail
from stepscope.engine.simulation.step_time import StepShape
from stepscope.recordings.session.regression import FittedModel, SeenStep, fit
from stepscope.recordings.simulation.basis import seen_step

WINDOW_S = 8.0
_FORGOTTEN_S = 60.0  # a request without a token for so long is taken as ended
_BINDING = 0.8  # a step that uses this share of the budget counts as limited by it
LATE_SHARE = 0.05  # share of gaps that may be late: the level holds for p95
_CALM_SHARE = 0.02  # a smaller share of late gaps leaves room to raise knobs
_FEWEST_GAPS = 20  # with fewer gaps, nothing is judged
_DECODE = int(wire.Phase.DECODE)


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

    def add(self, step: wire.StepRecord) -> None:
        self.pauses = self.pauses.after(step)
        now_ns = step.tokens_ns
        num_gaps = num_late = num_decodes = num_context = prompt_end = 0
        for row in step.batch or ():
            if row.phase == _DECODE:
                num_decodes += 1
                num_context += row.start + 1
            else:
                prompt_end = max(prompt_end, row.start + row.num_tokens)
            if row.flags & wire.RowFlag.LAST_CHUNK:
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


_OF_A_KIND = 8
_EVERY = 4  # once a kind is full, only one of so many of its steps is kept


class StepSamples:
    """Keeps the newest steps of each kind.

    Steps are of one kind if both their prefill tokens and their decodes round to the same powers of
    two. There are at most some 150 kinds.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[int, int], deque[SeenStep]] = {}
        self._num_seen: Counter[tuple[int, int]] = Counter()

    def add(self, step: SeenStep) -> None:
        shape = step.shape
        kind = shape.num_prefill_tokens.bit_length(), shape.num_decodes.bit_length()
        kept = self._by_kind.setdefault(kind, deque(maxlen=_OF_A_KIND))
        self._num_seen[kind] += 1
        if len(kept) < _OF_A_KIND or self._num_seen[kind] % _EVERY == 0:
            kept.append(step)

    def fit(self) -> FittedModel | None:
        """Fit a model; None if the steps are too few or too much alike."""
        # Interleave the kinds, because a fit predicts each stretch of its steps from the others.
        rounds = zip_longest(*self._by_kind.values())
        try:
            return fit([step for each in rounds for step in each if step is not None])
        except ConfigError:
            return None


BUDGET, SEATS = "max_num_batched_tokens", "max_num_seqs"
PERIOD_S = 1.0  # seconds between two decisions
RAISE_S = 3.0  # seconds after a move before knobs are raised
_LEAST_PREFILL = 32  # prefill tokens per step, so that prompts progress
_MOST_UP, _MOST_DOWN = 1.5, 0.5  # largest factors in one move
_HYSTERESIS = 0.15  # relative; smaller moves are not made
_MARGINS = (0.4, 1.5)
_TIGHTEN, _LOOSEN = 0.9, 1.04
_PATIENCE_S = (4.0, 120.0)  # least and most wait after late gaps before loosening; doubles
_P95 = 1.645  # standard deviations


class Move(NamedTuple):
    changes: dict[str, int]
    reason: str


class Autopilot:
    """Decides how to change the knobs. Belongs to one thread. Times are engine time.

    Args:
        itl_ms: the level, which 95 % of the gaps between tokens should keep.
        specs: the engine's knobs. The autopilot leaves out a knob that is missing here.
        knobs: the present values. Seats are never raised above the present value; the budget may
            be.
    """

    def __init__(
        self, itl_ms: float, specs: Sequence[wire.KnobSpec], knobs: Mapping[str, wire.KnobValue]
    ) -> None:
        self._level_s = itl_ms / 1e3
        self._specs = {spec.name: spec for spec in specs if spec.name in (BUDGET, SEATS)}
        self._now = {name: _whole(knobs.get(name)) for name in (BUDGET, SEATS)}
        self._most_seats = self._now[SEATS]
        self._load = Load(round(itl_ms * 1e6))
        self._samples = StepSamples()
        self._margin = 1.0
        self._before: wire.StepRecord | None = None
        self._judged_from = 0  # the first step with the present knobs
        self._patience_s = _PATIENCE_S[0]
        self._decided_ns = self._moved_ns = self._tightened_ns = 0

    @property
    def late_share(self) -> float | None:
        """Share of late gaps (longer than the level) between tokens so far; None without gaps."""
        return self._load.num_late / self._load.num_gaps if self._load.num_gaps else None

    def apply_step(self, step: wire.StepRecord) -> None:
        if step.batch:
            self._load.add(step)
            self._samples.add(seen_step(step, self._before))
        self._before = step

    def apply_status(self, status: wire.EngineStatus) -> None:
        self._load.pauses = self._load.pauses.after(status)

    def apply_knobs(self, knobs: Mapping[str, wire.KnobValue], effective_step: int) -> None:
        """Note new values of the knobs, whether set by the autopilot or by another client."""
        self._now = {name: _whole(knobs.get(name, value)) for name, value in self._now.items()}
        self._judged_from = effective_step

    def decide(self, now_ns: int) -> Move | None:
        """Return the next change of knobs, or None.

        Call it often; it decides once per `PERIOD_S`.
        """
        if now_ns - self._decided_ns < PERIOD_S * 1e9 or self._before is None:
            return None
        self._decided_ns = now_ns
        self._load.forget_ended()
        model = self._samples.fit()
        may_raise = now_ns - self._moved_ns >= RAISE_S * 1e9
        judged = self._load.judgement(self._judged_from)
        if model is not None:
            self._correct(judged)
        move = self._by_late_gaps(judged) if model is None else self._by_model(model)
        if move is None or (
            not may_raise and all(value > self._now[name] for name, value in move.changes.items())
        ):
            return None
        self._moved_ns = now_ns
        return move

    def _by_late_gaps(self, judged: Judgement | None) -> Move | None:
        if judged is None or not (judged.is_late or judged.is_calm):
            return None
        times = _MOST_DOWN if judged.is_late else _MOST_UP
        reason = f"{judged.late_share:.0%} of the gaps were late; no model yet"
        return self._move(BUDGET, self._now[BUDGET] * times, reason)

    def _by_model(self, model: FittedModel) -> Move | None:
        aim_s = self._level_s * self._margin / math.exp(_P95 * model.spread)
        num_decodes = self._load.num_decodes

        def step_s(budget: int, decodes: int) -> float:
            return model.step_time(self._load.full_step(budget, decodes)).cycle_s

        most = self._high(BUDGET)
        least = min(most, max(self._low(BUDGET), num_decodes + _LEAST_PREFILL))
        fits = _largest(least, most, lambda budget: step_s(budget, num_decodes) <= aim_s)
        budget = least if fits is None else fits
        now = self._now[BUDGET]
        now_ms, then_ms = (step_s(each, num_decodes) * 1e3 for each in (now, budget))
        reason = (
            f"full steps with {num_decodes} decodes: {now_ms:.3g} ms at {now:,} tokens, "
            f"{then_ms:.3g} ms at {budget:,}"
        )
        if (move := self._move(BUDGET, budget, reason)) is not None:
            return move
        return self._by_seats(step_s, aim_s)

    def _by_seats(self, step_s: Callable[[int, int], float], aim_s: float) -> Move | None:
        if SEATS not in self._specs:
            return None
        fits = _largest(
            max(1, self._low(SEATS)),
            self._most_seats,
            lambda seats: step_s(seats + _LEAST_PREFILL, seats) <= aim_s,
        )
        seats = 1 if fits is None else fits
        if self._load.num_decodes < min(seats, self._now[SEATS]):
            seats = self._most_seats  # seats do not limit the load
        now_ms = step_s(self._load.num_decodes, self._load.num_decodes) * 1e3
        reason = f"steps with {self._load.num_decodes} decodes take {now_ms:.3g} ms"
        return self._move(SEATS, seats, reason)

    def _correct(self, judged: Judgement | None) -> None:
        """Make the margin smaller with many late gaps, and larger, after a while, with few."""
        if judged is None:
            return
        waited_ns = self._decided_ns - self._tightened_ns
        if judged.is_late:
            self._margin = max(_MARGINS[0], self._margin * _TIGHTEN)
            # A margin that was too loose would be so again, so each retry waits longer.
            self._patience_s = min(_PATIENCE_S[1], 2 * self._patience_s)
            self._tightened_ns = self._decided_ns
        elif judged.is_calm and waited_ns >= self._patience_s * 1e9:
            self._margin = min(_MARGINS[1], self._margin * _LOOSEN)

    def _move(self, name: str, wanted: float, reason: str) -> Move | None:
        if name not in self._specs:
            return None
        now = self._now[name]
        bounded = min(now * _MOST_UP, max(now * _MOST_DOWN, wanted))
        value = round(min(self._high(name), max(self._low(name), bounded)))
        if abs(value - now) < max(1, _HYSTERESIS * now):
            return None
        return Move({name: value}, reason)

    def _low(self, name: str) -> int:
        low = self._specs[name].low
        return 1 if low is None else math.ceil(low)

    def _high(self, name: str) -> int:
        if name == SEATS:
            return self._most_seats
        high = self._specs[name].high
        return self._now[BUDGET] if high is None else math.floor(high)


def _whole(value: wire.KnobValue | None) -> int:
    return value if isinstance(value, int) else 0


def _largest(least: int, most: int, holds: Callable[[int], bool]) -> int | None:
    found = bisect_left(range(least, most + 1), True, key=lambda number: not holds(number))
    return least + found - 1 if found else None
