"""The vLLM plugin in a process that did not ask for it, and how hooks come off again."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.engine.adapters.attached.hooks import Hooks
from stepscope.engine.adapters.vllm.kv_blocks import VllmPrefixHashes


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_environment_variable_a_plugin_imports_nothing_of_stepscope(
    engine: str,
) -> None:
    package = f"stepscope.engine.adapters.{engine}"
    code = (
        "import os, sys; os.environ.pop('STEPSCOPE_ENDPOINT', None)\n"
        f"from {package} import plugin; plugin.register()\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('stepscope', 'zmq'))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    names = f"{package}.plugin".split(".")
    assert found.stdout.split() == [".".join(names[:end]) for end in range(1, len(names) + 1)]


def test_an_error_in_the_plugin_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stepscope.engine.adapters.vllm import plugin

    monkeypatch.setenv(plugin.VARIABLE, "vllm-0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it fails
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stepscope is not attached" in caplog.text


def test_before_0_11_1_both_schedulers_of_vllm_are_wrapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from stepscope.engine.adapters.vllm import plugin

    class Scheduler:
        pass

    class AsyncScheduler(Scheduler):
        pass

    modules = {
        "vllm.config.scheduler": SimpleNamespace(SchedulerConfig=object),
        "vllm.v1.core.sched.scheduler": SimpleNamespace(Scheduler=Scheduler),
        "vllm.v1.core.sched.async_scheduler": SimpleNamespace(AsyncScheduler=AsyncScheduler),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(plugin.VARIABLE, "vllm-0")
    plugin.register()
    Scheduler()
    AsyncScheduler()
    # Each was tried once: neither has what a scheduler of vLLM has.
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.text.count("this vLLM's scheduler has no schedule") == 2


class Target:
    def schedule(self) -> str:
        return "theirs"


def shout(method: Any) -> Any:
    return lambda: method().upper()


def test_removed_hooks_leave_no_trace() -> None:
    target = Target()
    hooks = Hooks(target)
    hooks.wrap("schedule", shout)
    assert target.schedule() == "THEIRS"
    hooks.restore()
    assert target.schedule() == "theirs"
    assert not vars(target)


def test_a_foreign_wrapper_around_a_stepscope_hook_stays_when_the_hook_is_removed() -> None:
    target = Target()
    hooks = Hooks(target)
    hooks.wrap("schedule", shout)
    ours = target.schedule
    target.schedule = lambda: ours() + "!"  # type: ignore[method-assign]
    hooks.restore()
    assert target.schedule() == "THEIRS!"


def test_contexts_with_equal_prefixes_have_equal_salted_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def request(*blocks: bytes, num_prompt_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(
            block_hashes=list(blocks), num_prompt_tokens=num_prompt_tokens, num_tokens=50
        )

    monkeypatch.delenv("STEPSCOPE_PREFIX_HASHES", raising=False)
    assert VllmPrefixHashes.if_wanted(16) is None
    monkeypatch.setenv("STEPSCOPE_PREFIX_HASHES", "1")
    names, others = VllmPrefixHashes.if_wanted(16), VllmPrefixHashes.if_wanted(16)
    assert names is not None
    assert others is not None
    one = request(b"system", b"one", b"more", num_prompt_tokens=40)
    two = request(b"system", b"two", b"more", num_prompt_tokens=40)
    assert names.of_prompt(one)[0] == names.of_prompt(two)[0]
    assert names.of_prompt(one)[1] != names.of_prompt(two)[1]
    assert len(names.of_prompt(one)) == 2
    assert names.of_output(one) == names.of_output(two)
    assert len(names.of_output(one)) == 1
    assert others.of_prompt(one)[0] != names.of_prompt(one)[0]


def test_the_parents_shutdown_is_wrapped_once_and_calls_vllms_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import multiprocessing

    from stepscope.engine.adapters.vllm import plugin

    ended: list[object] = []

    def shutdown(procs: list[object], timeout: float | None = None) -> None:
        ended.append((procs, timeout))

    utils, engine_utils = SimpleNamespace(shutdown=shutdown), SimpleNamespace(shutdown=shutdown)
    choice = SimpleNamespace(get_scheduler_cls=lambda self: None)
    modules = {
        "vllm": SimpleNamespace(),
        "vllm.config.scheduler": SimpleNamespace(SchedulerConfig=choice),
        "vllm.v1": SimpleNamespace(utils=utils),
        "vllm.v1.utils": utils,
        "vllm.v1.engine": SimpleNamespace(utils=engine_utils),
        "vllm.v1.engine.utils": engine_utils,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    monkeypatch.setenv(plugin.VARIABLE, f"ipc://{tmp_path}/vllm")
    plugin.register()
    assert engine_utils.shutdown is utils.shutdown is not shutdown
    wrapped = utils.shutdown
    plugin.register()
    assert utils.shutdown is wrapped
    wrapped([], timeout=0)
    wrapped([object()], 0)  # no process: an error of ours
    assert ended[0] == ([], 0)
    assert len(ended) == 2
