"""The dashboard runs on a laptop: nothing imports a heavy package before it needs it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, json, sys
forbidden, heavy, modules = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(forbidden))  # importing them fails
for name in modules:
    importlib.import_module("stepscope." + name)
print(sorted(set(heavy) & set(sys.modules)))
"""
ENGINE = "torch transformers safetensors tokenizers pyarrow perfetto PIL matplotlib"
CLI = "tui.cli.__main__"


@pytest.mark.parametrize(
    ("modules", "forbidden", "heavy"),
    [
        (
            "tui.app.app tui.screens.handlers",
            f"{ENGINE} mcap",
            "stepscope.engine.loop.core stepscope.engine.execution.runner "
            "stepscope.engine.execution.loading stepscope.recordings.file.writing.writer",
        ),
        (  # before they draw a picture
            "tui.cli.command_line tui.cli.dashboards.replay tui.cli.recordings.explain "
            "tui.cli.recordings.export tui.cli.recordings.record tui.cli.recordings.verify",
            "textual torch matplotlib PIL numpy pyarrow perfetto",
            "",
        ),
        (
            f"{CLI} tui.cli.engines.set tui.cli.engines.snapshot",
            "",
            "torch transformers textual rich mcap",
        ),
        (
            f"{CLI} tui.cli.dashboards.start tui.screens.start",
            "",
            "torch zmq mcap numpy stepscope.recordings.file.reader stepscope.tui.app.app "
            "stepscope.recordings.history.history",
        ),
    ],
    ids=["dashboard", "headless", "set and snapshot", "start screen"],
)
def test_what_starts_at_once_imports_nothing_heavy(
    modules: str, forbidden: str, heavy: str
) -> None:
    given = json.dumps([each.split() for each in (forbidden, heavy, modules)])
    command = [sys.executable, "-c", PROGRAM, given]
    assert subprocess.check_output(command, timeout=60).strip() == b"[]"
