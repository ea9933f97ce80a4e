"""The vLLM plugin in a process that did not ask for it, and how hooks come off again."""

import subprocess
import sys
from typing import Any

import pytest

from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.vllm import versions


def test_without_the_variable_the_plugin_imports_nothing_of_ours() -> None:
    code = (
        "import os, sys; os.environ.pop('STEPSCOPE_ENDPOINT', None)\n"
        "from stepscope.engine.adapters.vllm import plugin; plugin.register()\n"
        "print(sorted(name for name in sys.modules if name.startswith(('stepscope', 'zmq'))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == str(
        [
            "stepscope",
            "stepscope.engine",
            "stepscope.engine.adapters",
            "stepscope.engine.adapters.vllm",
            "stepscope.engine.adapters.vllm.plugin",
        ]
    )


def test_no_error_leaves_the_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stepscope.engine.adapters.vllm import plugin

    monkeypatch.setenv(plugin.VARIABLE, "vllm-0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stepscope is not attached" in caplog.text


def test_a_scheduler_without_what_is_needed_is_refused_by_name() -> None:
    with pytest.raises(versions.UnknownVllmError, match=r"update_from_output.*block_pool"):
        versions.check(object())


class Target:
    def schedule(self) -> str:
        return "theirs"


def shout(method: Any) -> Any:
    return lambda: method().upper()


def test_hooks_leave_no_trace_when_they_are_restored() -> None:
    target = Target()
    hooks = Hooks(target)
    hooks.wrap("schedule", shout)
    assert target.schedule() == "THEIRS"
    hooks.restore()
    assert target.schedule() == "theirs"
    assert not vars(target)


def test_a_foreign_wrapper_around_ours_stays() -> None:
    target = Target()
    hooks = Hooks(target)
    hooks.wrap("schedule", shout)
    ours = target.schedule
    target.schedule = lambda: ours() + "!"  # type: ignore[method-assign]
    hooks.restore()
    assert target.schedule() == "THEIRS!"
