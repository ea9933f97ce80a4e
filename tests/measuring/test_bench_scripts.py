"""The bench scripts still fit the code they measure, although no one runs them at every change."""

import subprocess
import sys
from pathlib import Path

from stepscope.recordings.history.history import History
from stepscope.recordings.live.subscriber import Subscriber
from tests.support.waiting import wait_for

BENCH = Path(__file__).parents[1] / "bench"
_IMPORT_ALL = """
import importlib, pathlib, sys
sys.path[:0] = [sys.argv[1], str(pathlib.Path(sys.argv[1]).parents[1])]
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    importlib.import_module(path.stem)
    print(path.stem)
"""


def test_every_bench_script_can_be_imported() -> None:
    command = [sys.executable, "-c", _IMPORT_ALL, str(BENCH)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(list(BENCH.glob("*.py")))


def test_the_engine_of_the_dashboard_bench_publishes_steps_without_loss(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/fed"
    arguments = [address, "--requests", "4", "--rate", "200", "--burst", "50"]
    engine = subprocess.Popen([sys.executable, str(BENCH / "fed_engine.py"), *arguments])
    source = Subscriber(address, History(), retry_s=0.1)
    source.start()
    try:
        wait_for(lambda: (source.history.last_step or 0) > 100, "its steps do not come")
        assert source.history.num_lost == 0
        assert engine.poll() is None
    finally:
        source.stop()
        engine.kill()
        engine.wait()
