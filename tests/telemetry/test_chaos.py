"""Whatever happens to connections and processes, every loss is shown (`tests/chaos/`)."""

import json
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[1] / "chaos" / "run_chaos.py"


def test_under_chaos_every_step_is_received_or_shown_as_lost() -> None:
    done = subprocess.run(  # noqa: PLW1510 - what it said is wanted first
        [sys.executable, str(RUN), "--seconds", "1.5", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # There was chaos; else the run would prove nothing.
    assert report["steps"] > 1000
    assert report["cuts"] > 5
    assert report["stopped"]["lost"] > 0
    for name in ("slow", "stopped", "reconnecting"):
        assert report[name]["received"] > 500
    assert report["stopped"]["healed"] + report["reconnecting"]["healed"] > 0
    assert report["recorder"]["steps"] > 500
