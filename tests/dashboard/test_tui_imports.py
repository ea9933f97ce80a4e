"""The dashboard runs on a laptop: nothing of the engine's weight comes with it."""

import subprocess
import sys

PROGRAM = """
import sys
for name in (
    "torch", "transformers", "safetensors", "tokenizers", "mcap", "pyarrow", "perfetto", "PIL",
    "matplotlib",
):
    sys.modules[name] = None  # importing it fails
import stepscope.tui.app
import stepscope.tui.screens.handlers
heavy = {
    "stepscope.engine.loop.core",
    "stepscope.engine.execution.runner",
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


def test_what_has_no_screen_imports_none_and_pictures_load_what_they_need_when_they_draw() -> None:
    program = """
import sys
for name in ("textual", "torch", "matplotlib", "PIL", "numpy", "pyarrow", "perfetto"):
    sys.modules[name] = None
import stepscope.tui.command_line
import stepscope.tui.commands.explain, stepscope.tui.commands.export, stepscope.tui.commands.plot
import stepscope.tui.commands.record, stepscope.tui.commands.repair
import stepscope.tui.commands.screenshot
import stepscope.tui.commands.verify
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
