"""Fixtures for tests of the simulating commands."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def run(stepscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs `stepscope ARGUMENTS` without a config file; returns its output, else its error line."""
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")

    def said(*arguments: str) -> str:
        done = stepscope(*arguments)
        return done.stdout or done.stderr.splitlines()[-1]

    return said
