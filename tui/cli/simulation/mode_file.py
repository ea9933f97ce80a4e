"""`load_mode`: loads a batching mode that a user wrote, given as `my_mode.py:shortest_first`."""

import importlib.util
from pathlib import Path

from stepscope.engine.scheduling.batching import SpendBudget
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage


def load_mode(text: str) -> tuple[str, SpendBudget]:
    """Return the name of the user's function, and the function.

    The function decides which tokens a step computes: it fills a `StepPlan`.

    Raises:
        WrongUsage: the text is not FILE.py:FUNCTION.
        CommandFailed: the file cannot be read or run, or has no such function.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or path.suffix != ".py" or not name.isidentifier():
        raise WrongUsage(f"--mode-file: expected FILE.py:FUNCTION, got {text!r}")
    if not path.is_file():
        raise CommandFailed(f"--mode-file: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        raise CommandFailed(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        names = [each for each, value in vars(module).items() if callable(value)]
        known = f"; it has {', '.join(names)}" if names else ""
        raise CommandFailed(f"{path} has no function {name}{known}")
    mode: SpendBudget = found
    return name, mode
