"""A step that runs out of device memory is run in halves, with the same result.

A row that finds no room at all ends its request; steps stay small for a while, then grow again.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.execution.smaller_steps import Halving, halves
from stepscope.engine.protocol.replies import PositionLogprobs, TokenLogprob
from stepscope.engine.protocol.settings.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow, ScheduledStep, StepResult


class NoMemoryError(RuntimeError):
    pass


class Done:
    is_whole = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def collect(self) -> StepResult:
        return self._result


class Device:
    """Runs steps of up to `room` tokens; a row's token encodes its request and last position.

    It has no room at all for the requests `hopeless`.
    """

    def __init__(self, room: int, hopeless: frozenset[int] = frozenset()) -> None:
        self.room = room
        self.hopeless = hopeless
        self.now = 0
        self.sizes: list[int] = []
        self.ran: dict[int, list[int]] = {}  # positions of each request, in order
        self.freed = 0
        self._halving = Halving(
            self.launch,
            lambda error: isinstance(error, NoMemoryError),
            self.free,
            lambda: self.now,
        )

    def launch(self, step: ScheduledStep) -> Done:
        size = sum(row.num_tokens for row in step.rows)
        if size > self.room or any(r.request.request_id in self.hopeless for r in step.rows):
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
        return Done(StepResult(tokens, launch_ns, self.now, size, logprobs=logprobs))

    def free(self) -> None:
        self.freed += 1

    def run(self, step: ScheduledStep) -> StepResult:
        return self._halving.launch(step).collect()


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


@settings(max_examples=60)
@given(rows, st.integers(1, 60))
def test_a_step_run_in_halves_gives_the_result_of_the_whole_step(
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
    assert found.num_tokens_fit == (None if len(small.sizes) == 1 else max(small.sizes))
    assert found.unfit_rows == ()


@settings(max_examples=60)
@given(rows, st.integers(1, 60), st.frozensets(st.integers(0, 11)))
def test_rows_that_do_not_fit_in_device_memory_are_named_and_the_others_unchanged(
    lengths: list[tuple[int, int, bool]], room: int, hopeless: frozenset[int]
) -> None:
    step = step_of(lengths)
    expected, found = Device(10**6).run(step), Device(room, hopeless).run(step)
    assert found.unfit_rows == tuple(i for i in range(len(lengths)) if i in hopeless)
    for i, token in enumerate(found.token_ids):
        assert token == (None if i in hopeless else expected.token_ids[i])
    assert set(found.logprobs or {}) == {i for i in expected.logprobs or {} if i not in hopeless}


@settings(max_examples=40)
@given(rows)
def test_a_step_is_halved_by_tokens_and_at_most_one_row_is_cut(
    lengths: list[tuple[int, int, bool]],
) -> None:
    step = step_of(lengths)
    total = sum(row.num_tokens for row in step.rows)
    first, second = halves(step)
    assert sum(row.num_tokens for row in first.rows) == total // 2
    assert sum(row.num_tokens for row in second.rows) == total - total // 2
    assert len(first.rows) + len(second.rows) - len(step.rows) in (0, 1)


def test_errors_other_than_out_of_memory_are_not_retried() -> None:
    calls = []

    def launch(step: ScheduledStep) -> Done:
        calls.append(step)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        Halving(launch, lambda error: False, lambda: None, lambda: 0).launch(
            step_of([(0, 8, True)])
        )
    assert len(calls) == 1
