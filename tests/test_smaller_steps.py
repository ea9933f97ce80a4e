"""A step that runs out of device memory is run in halves, and nobody notices but by the time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.commands import PositionLogprobs, SamplingParams, TokenLogprob
from stepscope.engine.execution.smaller_steps import halves, run_in_halves
from stepscope.engine.request import Request
from stepscope.engine.step import ScheduledRow, ScheduledStep, StepResult
from stepscope.engine.wire import Phase


class NoMemoryError(RuntimeError):
    pass


class Device:
    """Runs steps of up to `room` tokens; a row's token names its request and its last position."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.now = 0
        self.sizes: list[int] = []
        self.ran: dict[int, list[int]] = {}  # positions of each request, in order
        self.freed = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        size = sum(row.num_tokens for row in step.rows)
        if size > self.room:
            raise NoMemoryError(f"{size} tokens")
        self.sizes.append(size)
        launch_ns, self.now = self.now, self.now + size
        tokens: list[int | None] = []
        logprobs = {}
        for i, row in enumerate(step.rows):
            positions = range(row.start, row.start + row.num_tokens)
            self.ran.setdefault(row.request.request_id, []).extend(positions)
            token = 1000 * row.request.request_id + positions[-1]
            tokens.append(token if row.samples else None)
            if row.samples:
                logprobs[i] = PositionLogprobs(TokenLogprob(token, -1.0), 1, [])
        return StepResult(tokens, launch_ns, self.now, size, logprobs=logprobs)

    def free(self) -> None:
        self.freed += 1

    def run(self, step: ScheduledStep) -> StepResult:
        return run_in_halves(
            self.execute, step, lambda error: isinstance(error, NoMemoryError), self.free
        )


def step_of(rows: list[tuple[int, int, bool]]) -> ScheduledStep:
    """(start, tokens, whether it samples) of each request."""
    return ScheduledStep(
        7,
        [
            ScheduledRow(
                Request(i, [0] * (start + count), SamplingParams(), 0),
                Phase.PREFILL,
                start,
                count,
                samples,
            )
            for i, (start, count, samples) in enumerate(rows)
        ],
    )


rows = st.lists(
    st.tuples(st.integers(0, 50), st.one_of(st.just(1), st.integers(1, 40)), st.booleans()),
    min_size=1,
    max_size=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(rows, st.integers(1, 60))
def test_the_result_is_that_of_the_whole_step(
    lengths: list[tuple[int, int, bool]], room: int
) -> None:
    step = step_of(lengths)
    whole, small = Device(10**6), Device(room)
    expected, found = whole.run(step), small.run(step)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    assert found.device_ns == expected.device_ns
    assert small.ran == whole.ran
    assert (found.launch_ns, found.tokens_ns) == (0, sum(small.sizes))
    assert max(small.sizes) <= room
    assert small.freed == len(small.sizes) - 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows)
def test_halves_are_even_and_only_the_row_between_them_is_cut(
    lengths: list[tuple[int, int, bool]],
) -> None:
    step = step_of(lengths)
    total = sum(row.num_tokens for row in step.rows)
    parts = halves(step)
    if total == 1:
        assert parts is None
        return
    assert parts is not None
    first, second = parts
    assert sum(row.num_tokens for row in first.rows) == total // 2
    assert sum(row.num_tokens for row in second.rows) == total - total // 2
    assert len(first.rows) + len(second.rows) - len(step.rows) in (0, 1)


def test_a_step_of_one_token_that_does_not_fit_fails_as_it_did() -> None:
    device = Device(0)
    with pytest.raises(NoMemoryError, match="1 tokens"):
        device.run(step_of([(4, 3, True)]))


def test_other_errors_are_not_tried_again() -> None:
    calls = []

    def execute(step: ScheduledStep) -> StepResult:
        calls.append(step)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        run_in_halves(execute, step_of([(0, 8, True)]), lambda error: False, lambda: None)
    assert len(calls) == 1
