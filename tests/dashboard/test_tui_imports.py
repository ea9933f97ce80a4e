"""The dashboard runs on a laptop: it imports none of the engine's heavy packages."""

import subprocess
import sys

PROGRAM = """
import sys
for name in (
    "torch", "transformers", "safetensors", "tokenizers", "mcap", "pyarrow", "perfetto", "PIL",
    "matplotlib",
):
    sys.modules[name] = None  # importing it fails
import stepscope.tui.app.app
import stepscope.tui.screens.handlers.handlers
heavy = {
    "stepscope.engine.loop.core",
    "stepscope.engine.execution.runner",
    "stepscope.engine.execution.loading",
    "stepscope.recordings.file.writing.writer",
}
print(sorted(heavy & set(sys.modules)))
"""


def test_the_application_imports_without_the_engine_and_without_mcap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_headless_commands_import_no_screen_module_before_they_draw_a_picture() -> None:
    program = """
import sys
for name in ("textual", "torch", "matplotlib", "PIL", "numpy", "pyarrow", "perfetto"):
    sys.modules[name] = None
import stepscope.tui.cli.command_line
import stepscope.tui.cli.recordings.explain, stepscope.tui.cli.recordings.export
import stepscope.tui.cli.recordings.record, stepscope.tui.cli.recordings.verify
import stepscope.tui.cli.dashboards.replay
import stepscope.tui.cli.recordings.verify
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
