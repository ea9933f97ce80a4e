"""The index of a file tells the same as playing it, stored or made from its messages."""

import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from mcap.reader import make_reader
from numpy.typing import NDArray

from stepscope.engine.protocol.wire import EngineState, EngineStatus, StepRecord, Telemetry
from stepscope.recordings.file.chunk_cache import ChunkCache
from stepscope.recordings.file.mcap.format import FORMAT_VERSION, PART_SUFFIX
from stepscope.recordings.file.messages import indexes, stored_index
from stepscope.recordings.file.reader import Position, Recording
from stepscope.recordings.file.writing import recording_file
from stepscope.recordings.history.history import History
from stepscope.recordings.packing import StepPacker
from stepscope.recordings.replay import file_index
from stepscope.recordings.replay.file_index import FileIndex
from stepscope.recordings.replay.replay import ReplaySource
from stepscope.recordings.session.index import (
    INDEX_VERSION,
    Index,
    IndexRows,
    PackedColumn,
    decode_index,
    pack,
    unpack,
)
from stepscope.recordings.session.steps import COLUMNS
from stepscope.recordings.session.waits import Breach, LateWaits
from stepscope.recordings.state.latency import SLO
from tests.support.sessions.history_steps import history_of
from tests.support.sessions.seek_sessions import busy, one_by_one, record
from tests.support.waiting import wait_for

Numbered = list[tuple[int, Telemetry]]
Session = Callable[[int], Numbered]
Waits = dict[tuple[str, int], Breach]
ALL = SLO(ttft_ms=0.0, itl_ms=0.0)
LATE = SLO(ttft_ms=300.0, itl_ms=40.0)
TIMES = ("schedule_start_ns", "schedule_end_ns", "launch_ns", "tokens_ns", "time_ns")


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_file, "CHUNK_BYTES", 30_000)


@cache
def simulated(seed: int) -> tuple[tuple[int, Telemetry], ...]:
    return tuple(enumerate(busy(seed, 900)))


def plain(seed: int) -> Numbered:
    return list(simulated(seed))


def with_pauses(seed: int) -> Numbered:
    """A session in which the operator pauses the engine now and then while requests arrive."""
    rng, told, later_ns = random.Random(seed), list[Telemetry](), 0
    for _, message in plain(seed):
        told.append(message := _later(message, later_ns))
        if isinstance(message, StepRecord) and rng.random() < 0.03:
            pause_ns = rng.randrange(1, 3_000_000_000)
            told.append(_status(message, "paused", message.tokens_ns + rng.randrange(1_000_000)))
            told.append(_status(message, "running", message.tokens_ns + pause_ns))
            later_ns += pause_ns
    return list(enumerate(told))


def _status(record_: StepRecord, state: EngineState, time_ns: int) -> EngineStatus:
    counts = {name: getattr(record_, name) for name in ("step", "num_running", "num_waiting", "kv")}
    return EngineStatus(time_ns=time_ns, state=state, **counts)


def _later(message: Telemetry, by_ns: int) -> Telemetry:
    known = {name: getattr(message, name, None) for name in TIMES}
    times = {name: max(0, ns + by_ns) for name, ns in known.items() if ns is not None}
    return msgspec.structs.replace(message, **times) if times else message


def with_losses(seed: int) -> Numbered:
    rng, told = random.Random(seed), plain(seed)
    for _ in range(4):
        at = rng.randrange(50, len(told) - 50)
        del told[at : at + rng.randrange(1, 12)]
    return told


def with_a_clock_set_back(seed: int) -> Numbered:
    return [(n, _later(each, -4_000_000_000) if n > 600 else each) for n, each in plain(seed)]


def with_steps_told_twice(seed: int) -> Numbered:
    messages = [each for _, each in plain(seed)]
    return list(enumerate([*messages[:510], *messages[500:]]))


SESSIONS = [plain, with_pauses, with_losses, with_steps_told_twice]


def expected(recording: Recording) -> tuple[Waits, History]:
    """The longest waits of every step, found by playing the whole file."""
    end = recording.find_step(recording.last_step or 0) or Position(0, 0)
    whole = one_by_one(recording, Position(0, 0), end, History(ALL))
    found = {}
    for history in filter(None, (whole.previous, whole)):
        numbers = {kind: Counter[tuple[int, int]]() for kind in ("ITL", "TTFT")}
        for kind, counted in numbers.items():
            name = "itl" if kind == "ITL" else "ttft"
            for time_ns, ns, weight in history.windows.samples(name, None, None):
                counted[time_ns, ns] += weight
        for each in history.windows.breaches(None, 10**9):
            number = numbers[each.kind][each.time_ns, each.ns]
            wait = each._replace(num_tokens=number)
            found[each.kind, each.step] = wait
    return found, whole


def indexed(recording: Recording) -> Waits:
    found: Waits = {}
    for _, index in indexes(recording):
        rows = IndexRows(index)
        steps, times_ns = (rows.column("steps", name) for name in ("step", "tokens_ns"))
        for kind in ("ITL", "TTFT"):
            for place, ns, request_id, number in zip(*rows.longest(kind.lower()), strict=True):
                step, time_ns = int(steps[place]), int(times_ns[place])
                wait = Breach(step, time_ns, kind, int(ns), int(request_id), int(number))
                found[kind, wait.step] = wait
    return {key: each for key, each in found.items() if each.ns > 0}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("session", SESSIONS)
def test_an_index_has_the_longest_waits_of_playing_a_file(
    tmp_path: Path, session: Session, seed: int
) -> None:
    with Recording(record(tmp_path / "a.mcap", session(seed))) as recording:
        assert recording.num_chunks > 5
        assert all(stored_index(recording, each) for each in range(recording.num_chunks))
        told, _ = expected(recording)
        assert len(told) > 700
        assert indexed(recording) == told


def summed_up(found: list[Index]) -> list[object]:
    """All that indexes tell, however a file was divided into them."""
    columns = {name: [] for name in COLUMNS}
    rows: dict[str, list[tuple[object, ...]]] = {"waits": [], "finished": []}
    for index in found:
        table = IndexRows(index)
        steps = table.steps()
        for name in COLUMNS:
            columns[name] += steps.column(name)
        at = steps.steps
        for kind, told in rows.items():
            _, stored = index.tables[kind]
            values = [table.column(kind, name).tolist() for name in stored if name != "place"]
            places = table.column(kind, "place").tolist()
            told += [(at[n], *each) for n, *each in zip(places, *values, strict=True)]
    events = [
        [event for each in found for event in getattr(each, name)]
        for name in ("noted", "said", "lost")
    ]
    return [columns, rows, events, found[-1].open, found[-1].between]


@pytest.mark.parametrize("session", [*SESSIONS, with_a_clock_set_back])
def test_a_stored_index_is_the_same_as_one_made_from_the_messages(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recording(record(tmp_path / "a.mcap", session(3))) as recording:
        stored = [index for _, index in indexes(recording)]
        read = ChunkCache.stored_index
        for kept in (lambda number: False, lambda number: number % 3 == 0):
            monkeypatch.setattr(
                ChunkCache,
                "stored_index",
                lambda self, number, kept=kept: read(self, number) if kept(number) else None,
            )
            made = [index for _, index in indexes(recording)]
            assert summed_up(made) == summed_up(stored)


def test_after_a_clock_set_back_only_waits_that_span_the_change_may_differ(tmp_path: Path) -> None:
    with Recording(record(tmp_path / "a.mcap", with_a_clock_set_back(1))) as recording:
        told, _ = expected(recording)
        found = indexed(recording)
        assert len(found.items() ^ told.items()) < 10


def test_unpacked_steps_are_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkCache, "stored_index", lambda chunks, number: None)
    monkeypatch.setattr(StepPacker, "pack", lambda packer, payload: None)
    with Recording(record(tmp_path / "a.mcap", with_pauses(4))) as recording:
        told, _ = expected(recording)
        assert indexed(recording) == told


@pytest.mark.parametrize("share", [0.4, 0.75, 0.95])
def test_the_index_covers_all_that_is_readable_of_a_cut_file(tmp_path: Path, share: float) -> None:
    whole = record(tmp_path / "whole.mcap", plain(5)).read_bytes()
    path = tmp_path / "cut.mcap"
    path.with_name(path.name + PART_SUFFIX).write_bytes(whole[: int(len(whole) * share)])
    with Recording(path) as recording:
        assert recording.truncated
        told, _ = expected(recording)
        assert indexed(recording) == told
        with searched(path) as found:
            assert found.share == 1


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    path = record(tmp_path / "a.mcap", plain(5))
    with Recording(path) as recording:
        told = indexed(recording)
        place = recording.index.chunks[3]
    damaged = bytearray(path.read_bytes())
    damaged[place.end + 200] ^= 8
    path.write_bytes(damaged)
    with Recording(path) as recording:
        assert stored_index(recording, 3) is None
        assert indexed(recording) == told


@pytest.mark.parametrize("change", ["version", "columns"])
def test_an_index_of_another_version_is_none(tmp_path: Path, change: str) -> None:
    with Recording(record(tmp_path / "a.mcap", plain(5))) as recording:
        index = stored_index(recording, 0)
    assert decode_index(index.encode()) == index
    if change == "version":
        other = msgspec.structs.replace(index, version=index.version + 1)
    else:
        number, columns = index.tables["steps"]
        rest = {name: each for name, each in columns.items() if name != "num_drafted_tokens"}
        tables = {**index.tables, "steps": (number, rest)}
        other = msgspec.structs.replace(index, tables=tables)
    with pytest.raises(ValueError, match="an index of version"):
        decode_index(other.encode())


numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 300)


@given(st.lists(st.tuples(numbers, numbers), max_size=40))
def test_a_packed_column_holds_any_numbers(rows: list[tuple[int, int]]) -> None:
    values, others = (np.array([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
    near = {"others": others}
    packed = pack(values, near)
    beside = near[packed.beside] if packed.beside else None
    assert unpack(packed, len(rows), beside).tolist() == values.tolist()


class Rows(IndexRows):
    """Steps with one wait each."""

    def __init__(self, waits: list[Breach]) -> None:
        self._columns = {
            name: np.array([getattr(each, name) for each in waits], dtype=np.int64)
            for name in Breach._fields
            if name != "kind"
        }

    def column(self, table: str, name: str) -> "NDArray[np.int64]":
        return self._columns["time_ns" if name == "tokens_ns" else name]

    def longest(self, kind: str) -> tuple[object, ...]:  # type: ignore[override]
        ns = self._columns["ns"]
        columns = [self._columns[name] for name in ("request_id", "num_tokens")]
        return np.arange(len(ns)), ns, *columns


ints = st.integers
waits = st.builds(
    Breach, st.just(0), ints(0, 20 * 10**9), st.just("ITL"), ints(1, 100), ints(0, 9), ints(1, 9)
)


@given(st.lists(st.lists(waits, max_size=12), max_size=5), st.integers(0, 100))
def test_the_longest_wait_of_each_second_is_kept(parts: list[list[Breach]], bound: int) -> None:
    times = iter(sorted(each.time_ns for part in parts for each in part))
    step, ordered, found = 0, list[Breach](), LateWaits("itl")
    for part in parts:
        steps = [each._replace(step=(step := step + 1), time_ns=next(times)) for each in part]
        ordered += steps
        found = found.with_seconds_of(Rows(steps))
    seconds = groupby(ordered, lambda wait: wait.time_ns // 10**9)
    kept = [max(second, key=lambda each: each.ns) for _, second in seconds]
    late = [each for each in kept if each.ns > bound]
    for at in range(-1, step + 2):
        after = next((each for each in late if each.step > at), None)
        before = next((each for each in reversed(late) if each.step < at), None)
        assert [found.above(bound).next(at, each) for each in (1, -1)] == [after, before]
    ranked = sorted(late, key=lambda each: (-each.ns, each.step))
    assert found.above(bound).longest(4) == ranked[:4]
    assert len(found.above(bound)) == len(late)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_file, "CHUNK_BYTES", 30_000)
        return record(tmp_path_factory.mktemp("waits") / "session.mcap", with_losses(6))


@pytest.fixture(scope="module")
def played(file: Path) -> tuple[Waits, History]:
    with Recording(file) as recording:
        return expected(recording)


@contextmanager
def searched(path: Path) -> Iterator[FileIndex]:
    index = FileIndex(path)
    index.start()
    assert index.wait(30)
    yield index
    index.stop()


@pytest.fixture(scope="module")
def found(file: Path) -> Iterator[FileIndex]:
    with searched(file) as index:
        yield index


@pytest.mark.parametrize("slo", [LATE, SLO(ttft_ms=900.0, itl_ms=60.0)])
@pytest.mark.parametrize("direction", [1, -1])
def test_event_keys_stop_at_one_late_token_in_each_second_that_has_any(
    file: Path, played: tuple[Waits, History], found: FileIndex, slo: SLO, direction: int
) -> None:
    told, _ = played
    bounds_ns = {"ITL": slo.itl_ms * 1e6, "TTFT": slo.ttft_ms * 1e6}
    late = {key: each for key, each in told.items() if each.ns > bounds_ns[key[0]]}
    assert len(late) > 20
    seen, at = [], -1 if direction > 0 else 10**6
    while (event := found.next(at, direction, {"slo"}, slo)) is not None:
        assert event.kind == "slo"
        wait = late[event.text.split()[0], event.step]
        assert (event.time_ns, event.request_id) == (wait.time_ns, wait.request_id)
        value = event.text.split()[1]
        assert value in (f"{wait.ns / 1e6:.0f}", f"{wait.ns / 1e6:.1f}")
        seen.append(event)
        at = event.step
    seconds = {each.time_ns // 10**9 for each in seen}
    assert seconds == {each.time_ns // 10**9 for each in late.values()}
    worst, number = found.stalls(slo, 3)
    itl = [each for (kind, _), each in late.items() if kind == "ITL"]
    assert number == len([each for each in seen if each.text.startswith("ITL")])
    assert worst[0].ns == max(each.ns for each in itl)
    assert [each.ns for each in worst] == sorted((each.ns for each in worst), reverse=True)
    # The same as memory has, in the same words; both kinds in one step are one target.
    with Recording(file) as recording:
        end = recording.find_step(recording.last_step or 0) or Position(0, 0)
        whole = one_by_one(recording, Position(0, 0), end, History(slo))
    events = whole.events(limit=10**6, kinds=frozenset({"slo"}))
    in_order = sorted(events, key=lambda each: each.step, reverse=direction < 0)
    assert seen == [next(same) for _, same in groupby(in_order, key=lambda each: each.step)]


@pytest.mark.parametrize("direction", [1, -1])
def test_a_file_search_finds_the_same_gaps_as_playing_the_file(
    played: tuple[Waits, History], found: FileIndex, direction: int
) -> None:
    _, whole = played
    seen, at = [], -1 if direction > 0 else 10**6
    while (event := found.next(at, direction, {"gap"}, LATE)) is not None:
        seen.append(event)
        at = event.step
    told = whole.events(limit=10**6, kinds=frozenset({"gap"}))
    assert len(told) == 4
    assert seen[::direction] == told


def test_the_reading_waits_for_more_urgent_work(file: Path) -> None:
    waits = None

    def is_busy() -> bool:  # once it has found something
        return waits is not None and waits.share > 0

    waits = FileIndex(file, is_busy)
    waits.start()
    wait_for(is_busy, "nothing was read")
    assert waits.share < 1
    assert not waits.is_done
    assert waits.wait(30)  # does not ask who is busy
    waits.stop()
    assert waits.share == 1


def test_a_reading_stops_at_its_limit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "MAX_KEPT", 5)
    with searched(file) as waits:
        assert 0 < waits.share < 1
        assert waits.next(0, 1, {"slo"}, ALL) is not None
        assert waits.next(800, 1, {"slo", "gap"}, ALL) is None


def test_an_unreadable_file_does_not_count_as_read(tmp_path: Path) -> None:
    with searched(tmp_path / "nothing.mcap") as waits:
        assert waits.share == 0
        assert waits.next(0, 1, {"slo", "gap"}, ALL) is None


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


def test_an_index_can_be_read_with_an_mcap_library_and_the_docs_alone(tmp_path: Path) -> None:
    messages = busy(2, 600)
    path = record(tmp_path / "a.mcap", enumerate(messages))
    history = history_of(enumerate(messages))
    steps: list[int] = []
    waits: list[tuple[int, int, int]] = []
    with open(path, "rb") as stream:
        reader = make_reader(stream)
        summary = reader.get_summary()
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
    said = f"`format_version` (now {FORMAT_VERSION}) or index `version` (now {INDEX_VERSION})"
    assert said in " ".join(DOCS.split())


@pytest.fixture(scope="module")
def searched_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("search") / "session.mcap", enumerate(busy(3, 400)))


def opened(file: Path) -> int:
    """How many handles this process has on the file."""
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sum(os.path.realpath(each) == str(file.resolve()) for each in links)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts handles in /proc")
@pytest.mark.parametrize("is_at_work", [False, True])
def test_a_closed_replay_leaves_no_thread_and_file(searched_file: Path, is_at_work: bool) -> None:
    before = set(threading.enumerate())
    replay = ReplaySource(Recording(searched_file), playing=False)
    replay.start()
    if is_at_work:
        wait_for(lambda: opened(searched_file) > 1, "a search at work")
    replay.stop()
    assert set(threading.enumerate()) <= before
    assert opened(searched_file) == 0
    assert replay.file_index.is_done


def test_a_reading_ends_at_once_when_stopped(searched_file: Path) -> None:
    found = FileIndex(searched_file, is_busy=lambda: True)
    found.start()
    assert not found.is_done
    found.stop()
    assert found.is_done
    found.stop()  # stopping again does nothing
    FileIndex(searched_file).stop()  # nor does stopping one that was never started
