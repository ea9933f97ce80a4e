"""The batch rows in telemetry: the compiled encoder equals the one in Python."""

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.protocol.wire import BatchRow, Phase
from stepscope.engine.scheduling.request import Request
from stepscope.engine.scheduling.step import ScheduledRow
from stepscope.engine.telemetry import batch_rows
from stepscope.engine.telemetry.batch_rows import RowFields, encode_in_python, keep_rows

# Around each border between two forms of an integer in msgpack.
NUMBERS = st.one_of(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 127, 128, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**64 - 1]),
)
ROWS = st.lists(
    st.tuples(NUMBERS, st.sampled_from(Phase), NUMBERS, st.integers(0, 300)), max_size=40
)
needs_compiled = pytest.mark.skipif(batch_rows.compiled is None, reason="it could not be compiled")


def row(request_id: int, phase: Phase, start: int, num_blocks: int) -> ScheduledRow:
    request = Request(request_id, [1, 2], SamplingParams(max_tokens=4), 0)
    request.block_table = list(range(num_blocks))
    return ScheduledRow(request, phase, start, 1, True)


def described(each: ScheduledRow) -> RowFields:
    return each.request.request_id, int(each.phase), each.start, 9, 8, 7, 3


def both(rows: list[ScheduledRow], ordinary: Phase | None) -> tuple[bytes, bytes]:
    return (
        batch_rows.compiled(rows, ordinary, Request, described),
        encode_in_python(rows, ordinary, Request, described),
    )


def test_the_row_encoder_is_compiled_if_there_is_a_compiler() -> None:
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    can_be = shutil.which("cc") is not None and headers.exists()
    assert (batch_rows.compiled is not None) == can_be


@needs_compiled
@given(ROWS, st.sampled_from([Phase.DECODE, None]))
def test_the_compiled_row_encoder_equals_the_python_one_byte_for_byte(
    numbers: list[tuple[int, Phase, int, int]], ordinary: Phase | None
) -> None:
    compiled, plain = both([row(*each) for each in numbers], ordinary)
    assert compiled == plain


@needs_compiled
@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_batches_of_every_length_are_encoded_with_the_right_header(count: int) -> None:
    compiled, plain = both([row(1, Phase.DECODE, 2, 3)] * count, Phase.DECODE)
    assert compiled == plain
    assert len(msgspec.msgpack.decode(compiled, type=list[BatchRow])) == count


def unpublished(_: ScheduledRow) -> RowFields:
    raise KeyError("what is asked for is not there")


def broken() -> dict[str, tuple[type[Exception], tuple[Any, ...]]]:
    """Arguments that contradict each other, and the error that they raise."""
    good, other = row(1, Phase.DECODE, 2, 3), row(1, Phase.PREFILL, 2, 3)
    without_table = row(1, Phase.DECODE, 2, 3)
    del without_table.request.block_table
    of_no_request = good._replace(request="somebody")  # type: ignore[arg-type]
    decode, kind = Phase.DECODE, Request
    no_ints = (1, 2, 3, 4, 5, 6, "7")
    return {
        "no list": (TypeError, ((good,), decode, kind, described)),
        "no row": (TypeError, ([3], decode, kind, described)),
        "no request": (TypeError, ([of_no_request], decode, kind, described)),
        "no slots": (AttributeError, ([good], decode, Exception, described)),
        "no type": (TypeError, ([good], decode, 3, described)),
        "negative": (OverflowError, ([row(-1, decode, 2, 3)], decode, kind, described)),
        "no table": (AttributeError, ([without_table], decode, kind, described)),
        "too few fields": (TypeError, ([other], decode, kind, lambda _: (1, 2))),
        "no ints": (TypeError, ([other], decode, kind, lambda _: no_ints)),
        "raises": (KeyError, ([other], decode, kind, unpublished)),
        "too few": (TypeError, ([good], decode, kind)),
    }


@needs_compiled
@pytest.mark.parametrize("case", broken())
def test_contradictory_arguments_of_the_row_encoder_raise_an_error(case: str) -> None:
    error, arguments = broken()[case]
    with pytest.raises(error):
        batch_rows.compiled(*arguments)


@needs_compiled
def test_rows_that_change_while_being_encoded_raise_an_error() -> None:
    rows = [row(number, Phase.PREFILL, 2, 3) for number in range(5)]

    def clear(each: ScheduledRow) -> RowFields:
        rows.clear()
        return described(each)

    with pytest.raises(RuntimeError, match="changed"):
        batch_rows.compiled(rows, None, Request, clear)


@given(ROWS, st.data())
def test_batch_rows_selected_from_an_encoded_batch_are_unchanged(
    numbers: list[tuple[int, Phase, int, int]], data: st.DataObject
) -> None:
    payload = encode_in_python([row(*each) for each in numbers], Phase.DECODE, Request, described)
    places = data.draw(
        st.lists(st.sampled_from(range(len(numbers))), unique=True) if numbers else st.just([])
    )
    kept = sorted(places)
    told = msgspec.msgpack.decode(payload, type=list[BatchRow])
    left = msgspec.msgpack.decode(keep_rows(msgspec.Raw(payload), kept), type=list[BatchRow])
    assert left == [told[i] for i in kept]
