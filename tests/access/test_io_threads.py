"""The threads that carry telemetry out never interrupt the one that runs the model."""

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.engine.telemetry import sender

# In a process of its own, where nobody has made a socket before.
PUBLISH = """
import os, sys, time
from pathlib import Path
from stepscope.engine.transport.keys import KeyFolder
from stepscope.engine.telemetry import sender
from stepscope.engine.transport.gate import Gate
from stepscope.engine.telemetry.publisher import Publisher

folder = Path(sys.argv[1])
gate = None
if "keys" in sys.argv:
    keys = KeyFolder(folder / "keys")
    keys.path.mkdir(mode=0o700)
    gate = Gate(keys)
publisher = Publisher(f"ipc://{folder}/telemetry", 10, gate=gate)
tasks = Path("/proc/self/task")
senders = []
while not senders:  # a thread takes its policy first and its name then
    time.sleep(0.01)
    names = {int(task.name): (task / "comm").read_text().strip() for task in tasks.iterdir()}
    senders = [number for number, name in names.items() if "/IO" in name or name == "telemetry"]
    if len(senders) != 1 + sender.is_compiled():
        senders = []
for thread in (os.getpid(), *senders):
    print(thread == os.getpid(), os.sched_getscheduler(thread) == os.SCHED_BATCH)
publisher.close()
if gate is not None:
    gate.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems know no such policy")
@pytest.mark.parametrize("access", ["open", "keys"])
def test_threads_that_send_telemetry_never_interrupt_the_engines_thread(
    access: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PUBLISH, tmp_path, access]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    of_engine, of_sender = "True False", "False True"
    num_senders = 1 + sender.is_compiled()  # libzmq's, and ours
    assert sorted(done.stdout.splitlines()) == sorted([of_engine, *[of_sender] * num_senders])
