"""An export needs as much memory for a long recording as for a short one."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow.parquet
import pytest

from stepscope.recordings.export.export import FORMATS, Format, export
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.file.step_range import StepRange
from tests.support.engines.simulated_run import simulate
from tests.support.sessions.seek_sessions import record


@pytest.fixture(scope="module")
def long_session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2400 steps in many small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepscope.recordings.file.writing.recording_file.CHUNK_BYTES", 20_000)
        path = tmp_path_factory.mktemp("long") / "long.mcap"
        return record(path, simulate(seed=4, num_steps=2400))


@pytest.mark.parametrize("target", [each for each in FORMATS if each != "parquet"])
def test_the_memory_of_an_export_does_not_grow_with_the_recording(
    long_session: Path, tmp_path: Path, target: Format
) -> None:
    """Compared with a session three times as long; both exceed the size of all caches."""

    def write(last: int) -> None:
        with Recording(long_session) as recording:
            output = tmp_path / str(last)
            export(recording, output, target, StepRange(0, last), "steps", lambda share: None)
        output.unlink()

    write(700)  # fills the caches
    peaks = []
    for last in (700, 2100):
        tracemalloc.start()
        write(last)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.25 * peaks[0] + 100_000


PARQUET_MEMORY = """
import sys
from pathlib import Path
from stepscope.recordings.export import tables
import pyarrow
tables.ROW_GROUP = 2000
count = int(sys.argv[2])
kinds = [column.kind for column in tables.STEP_COLUMNS]
rows = (tuple({"bool": True, "text": "full"}.get(kind, n) for kind in kinds) for n in range(count))
tables.table_rows = lambda table, moments: rows
with open(sys.argv[1], "wb") as stream:
    tables.write_parquet([], stream, "steps")
print(pyarrow.default_memory_pool().max_memory())
"""


def test_a_parquet_export_keeps_one_row_group_in_memory(tmp_path: Path) -> None:
    peaks = []
    for count in (8_000, 32_000):
        command = [sys.executable, "-c", PARQUET_MEMORY, str(tmp_path / "x.parquet"), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        peaks.append(int(done.stdout))
        table = pyarrow.parquet.ParquetFile(tmp_path / "x.parquet")
        assert table.metadata.num_rows == count
        assert table.num_row_groups == count // 2000
    assert peaks[1] < 1.5 * peaks[0]
