"""Trace files: what is read from valid ones, and the errors for broken ones."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.workload.traces import TraceRow, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"


def write(tmp_path: Path, *lines: str | bytes) -> Path:
    path = tmp_path / "trace"
    encoded = (x.encode(errors="replace") if isinstance(x, str) else x for x in lines)
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def record(**fields: object) -> str:
    row = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    return json.dumps(row | fields)


def test_azure_trace_times_count_from_the_first_request(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, GOOD, "2023-11-16 18:15:50.9951690,396,109")
    first, second = read_trace(path)
    assert first == TraceRow(0.0, 374, 44, None)
    assert second.offset_s == pytest.approx(4.314579)


def test_azure_traces_may_have_other_columns_quotes_zones_and_crlf_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b"\xef\xbb\xbfGeneratedTokens,Model,TIMESTAMP,ContextTokens\r",
        '7,"a, b",2024-05-10 00:00:00.009930+00:00,12\r',
        "\r",
        "8,c,2024-05-10 00:00:01.009930+00:00,13\r",
    )
    assert read_trace(path) == [TraceRow(0.0, 12, 7), TraceRow(1.0, 13, 8)]
    header = ",".join(f'"{name}"' for name in HEADER.split(","))
    quoted = write(tmp_path, header, '"2023-11-16 18:15:47","374","44"')
    assert read_trace(quoted) == [TraceRow(0.0, 374, 44)]


def test_mooncake_trace_rows_keep_their_prefix_blocks(tmp_path: Path) -> None:
    path = write(tmp_path, record(timestamp=2000), record(timestamp=3500, hash_ids=[1, 3]))
    assert read_trace(path) == [TraceRow(0.0, 600, 5, (1, 2)), TraceRow(1.5, 600, 5, (1, 3))]


def test_bailian_traces_have_seconds_and_blocks_of_16_tokens(tmp_path: Path) -> None:
    own = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "input_length": 40}
    path = write(
        tmp_path,
        record(timestamp=0.5, hash_ids=[1, 2, 3], **own),
        record(timestamp=3.5, hash_ids=[1, 2, 4], **own),
    )
    assert read_trace(path) == [
        TraceRow(0.0, 40, 5, (1, 2, 3), 16),
        TraceRow(3.0, 40, 5, (1, 2, 4), 16),
    ]


@settings(max_examples=50)
@given(st.data())
def test_whatever_a_trace_holds_it_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    value = st.one_of(
        st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=9),
        st.lists(st.integers(), max_size=3), st.sampled_from([10**400, -(10**400), 1e308, ""]),
    )  # fmt: skip
    names = st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "turn"])
    rows = st.lists(st.dictionaries(names, value), min_size=1, max_size=3)
    lines = data.draw(
        st.one_of(
            rows.map(lambda found: [json.dumps(each) for each in found]),
            st.lists(st.text(max_size=40), max_size=3),
            st.lists(st.text(max_size=40), max_size=3).map(lambda found: [HEADER, *found]),
            st.lists(st.binary(max_size=40), max_size=3),
        )
    )
    with TemporaryDirectory() as folder:
        try:
            read_trace(write(Path(folder), *lines))
        except ConfigError as error:
            message = str(error)
        else:
            message = ""
    assert len(message.splitlines()) <= 1


def test_unordered_trace_rows_are_sorted_and_a_limit_keeps_the_first_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        *(record(timestamp=t, input_length=t + 1, hash_ids=[]) for t in (5000, 1000, 9000)),
    )
    assert [row.num_prompt_tokens for row in read_trace(path)] == [1001, 5001, 9001]
    assert [row.num_prompt_tokens for row in read_trace(path, limit=2)] == [1001, 5001]


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([HEADER, GOOD, "2023-11-16 18:15:47,abc,44"], ":3: column ContextTokens: "),
        ([HEADER, GOOD, "", "yesterday,374,44"], ":4: column TIMESTAMP: "),
        ([HEADER, "2023-11-16 18:15:47,374,0"], ":2: column GeneratedTokens: "),
        ([HEADER, "2023-11-16 18:15:47,99999999999,4"], ":2: column ContextTokens: "),
        ([HEADER, "2023-11-16 18:15:47,374"], ":2: column GeneratedTokens: "),
        ([HEADER, GOOD, '"2023-11-16,374,44'], ":3: unexpected end of data"),
        (["TIMESTAMP,Prompt,GeneratedTokens", GOOD], ":2: column ContextTokens: "),
        ([record(), '{"timestamp": 0, "input_length": 6,,}'], ":2: JSON is malformed"),
        ([record(), "[1, 2]"], ":2: expected an object"),
        ([record(), record(input_length="6")], ":2: column input_length: "),
        ([record(), record(output_length=0)], ":2: column output_length: "),
        ([record(), record(timestamp=None)], ":2: column timestamp: "),
        ([record(), record(timestamp=float("nan"))], ":2: JSON is malformed"),
        ([record(), record(hash_ids=["a"])], ":2: column hash_ids"),
        ([record(), '{"timestamp": 0, "output_length": 6}'], ":2: column input_length: "),
        ([record(), record(timestamp=10**400)], ":2: column timestamp: "),
        ([record(), record(input_length=1600)], ":2: column hash_ids: "),
        ([record(), record(hash_ids=[1, 2, 3])], ":2: column hash_ids: "),
    ],
)
def test_a_broken_trace_line_is_reported_by_line_and_column(
    tmp_path: Path, lines: list[str], where: str
) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert message.startswith(f"{path}{where}")
    assert "\n" not in message


def test_a_broken_trace_line_beyond_the_limit_is_found_too(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, GOOD, GOOD, "broken")
    with pytest.raises(ConfigError, match=":4: "):
        read_trace(path, limit=1)


def test_a_file_that_is_no_request_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(ConfigError, match="directory"):
        read_trace(tmp_path)
    (tmp_path / "binary").write_bytes(b"{\xff")
    with pytest.raises(ConfigError, match="no text in UTF-8"):
        read_trace(tmp_path / "binary")
    for content in (b"", b"\n\n", HEADER.encode()):
        path = tmp_path / "empty"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="holds no requests"):
            read_trace(path)
