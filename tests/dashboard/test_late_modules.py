"""A running dashboard keeps working while stepscope is updated under it."""

import subprocess
import sys

PROGRAM = """
import ast, importlib.util, pathlib, sys
import stepscope.tui.app.run, stepscope.tui.cli.dashboards.top
import stepscope.tui.screens.handlers.handlers
from stepscope.recordings.live import subscriber
from stepscope.tui.app import late_modules

late_modules.load()
late = set()
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None) or ""
    if not name.startswith("stepscope.") or not file.endswith(".py"):
        continue
    for node in ast.walk(ast.parse(pathlib.Path(file).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stepscope."):
            late.add(node.module)
            late |= {f"{node.module}.{each.name}" for each in node.names}
for name in sorted(late - set(sys.modules)):
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # what is imported is no module
        continue
    if found is not None:
        print(name)
"""


def test_a_running_dashboard_imports_no_further_module_of_stepscope() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
