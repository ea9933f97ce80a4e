"""Other programs can read a recording as docs/recordings.md says, without our code."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from mcap.reader import make_reader
from numpy.typing import NDArray

from stepscope.recordings.file.mcap.format import FORMAT_VERSION
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.history.history import History
from stepscope.recordings.session.index import INDEX_VERSION, Index, PackedColumn
from tests.support.sessions.seek_sessions import busy, record

DOCS = (Path(__file__).parents[2] / "docs" / "recordings.md").read_text("utf-8")


def column(tables: dict[str, Any], table: str, name: str) -> "NDArray[np.int64]":
    number, columns = tables[table]
    base, width, planes, start, beside = columns[name]
    raw = np.frombuffer(planes, np.uint8).reshape(width, number)
    values = np.zeros(number, np.uint64)
    for place in range(width):
        values += raw[place].astype(np.uint64) << np.uint64(8 * place)
    values += np.uint64(base % 2**64)
    if start is not None:
        values = np.cumsum(values, dtype=np.uint64) + np.uint64(start)
    found = values.view(np.int64)
    if not beside:
        return found
    if beside == "interval_ns":
        ends = column(tables, "steps", "tokens_ns")
        others = np.diff(ends, prepend=ends[:1])
    else:
        others = column(tables, "steps", beside)
    return found + (others if table == "steps" else others[column(tables, table, "place")])


def test_an_index_can_be_read_with_an_mcap_library_and_the_docs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 30_000)
    messages = busy(2, 600)
    path = record(tmp_path / "a.mcap", enumerate(messages))
    history = History()
    for sequence, message in enumerate(messages):
        history.append(sequence, message)
    steps: list[int] = []
    waits: list[tuple[int, int, int]] = []
    with open(path, "rb") as stream:
        reader = make_reader(stream)
        summary = reader.get_summary()
        assert summary is not None
        attachments = list(reader.iter_attachments())
        assert len(attachments) == len(summary.chunk_indexes) > 5
    for attachment in attachments:
        assert attachment.name == "index"
        told = msgspec.msgpack.decode(zstandard.decompress(attachment.data))
        assert told["version"] == INDEX_VERSION
        tables = told["tables"]
        steps += column(tables, "steps", "step").tolist()
        ends = column(tables, "steps", "tokens_ns")[column(tables, "waits", "place")]
        columns = [ends, *(column(tables, "waits", name) for name in ("ns", "number"))]
        is_itl = column(tables, "waits", "kind") == 1
        waits += zip(*(each[is_itl].tolist() for each in columns), strict=True)
    assert steps == list(range(600))
    assert sorted(waits) == sorted(history.windows.samples("itl", None, None))


def test_the_docs_name_all_that_an_index_holds_and_both_versions() -> None:
    for name in Index.__struct_fields__:
        assert f"\n| `{name}` |" in DOCS, name
    assert f"[{', '.join(PackedColumn.__struct_fields__)}]" in DOCS
    said = " ".join(DOCS.split())
    assert (
        f"`format_version` (now {FORMAT_VERSION}) or index `version` (now {INDEX_VERSION})" in said
    )
