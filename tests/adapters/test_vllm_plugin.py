"""The vLLM plugin in a process that did not ask for it, and how hooks come off again."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.vllm import plugin
from stepscope.engine.adapters.vllm.kv_blocks import VllmPrefixHashes


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_environment_variable_a_plugin_imports_nothing(engine: str) -> None:
    package = f"stepscope.engine.adapters.{engine}"
    code = (
        "import os, sys; os.environ.pop('STEPSCOPE_ENDPOINT', None)\n"
        f"from {package} import plugin; plugin.register()\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('stepscope', 'zmq'))))"
    )
    found = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    names = f"{package}.plugin".split(".")
    assert found.split() == [".".join(names[:end]) for end in range(1, len(names) + 1)]


def test_an_error_in_the_plugin_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugin.VARIABLE, "vllm-0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stepscope is not attached" in caplog.text


class Target:
    def schedule(self) -> str:
        return "theirs"


@pytest.mark.parametrize("is_wrapped_again", [False, True])
def test_removed_hooks_leave_no_trace_unless_wrapped_by_others(is_wrapped_again: bool) -> None:
    target = Target()
    hooks = Hooks()
    hooks.wrap(target, "schedule", lambda method: lambda: method().upper())
    ours = target.schedule
    assert ours() == "THEIRS"
    if is_wrapped_again:
        target.schedule = lambda: ours() + "!"  # type: ignore[method-assign]
    hooks.restore()
    assert target.schedule() == ("THEIRS!" if is_wrapped_again else "theirs")
    assert bool(vars(target)) is is_wrapped_again


def test_contexts_with_equal_prefixes_have_equal_salted_hashes() -> None:
    def request(*blocks: bytes) -> Any:
        return SimpleNamespace(block_hashes=list(blocks), num_prompt_tokens=40, num_tokens=50)

    names, others = VllmPrefixHashes(16), VllmPrefixHashes(16)
    one = request(b"system", b"one", b"more")
    two = request(b"system", b"two", b"more")
    assert names.of_prompt(one)[0] == names.of_prompt(two)[0]
    assert names.of_prompt(one)[1] != names.of_prompt(two)[1]
    assert len(names.of_prompt(one)) == 2
    assert names.of_output(one) == names.of_output(two)
    assert len(names.of_output(one)) == 1
    assert others.of_prompt(one)[0] != names.of_prompt(one)[0]


def test_an_engine_gets_a_second_to_say_that_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    shutdown = lambda procs, timeout=None: ended.append((procs, timeout))  # noqa: E731
    utils, engine_utils = SimpleNamespace(shutdown=shutdown), SimpleNamespace(shutdown=shutdown)
    monkeypatch.setitem(sys.modules, "vllm.v1", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(utils=engine_utils))
    plugin._wrap_shutdown()
    wrapped = utils.shutdown
    assert engine_utils.shutdown is wrapped is not shutdown
    plugin._wrap_shutdown()
    assert utils.shutdown is wrapped
    wrapped([], timeout=0)  # vLLM's default is to kill it at once
    wrapped([], 30)
    wrapped([])
    assert ended == [([], 1.0), ([], 30), ([], None)]
