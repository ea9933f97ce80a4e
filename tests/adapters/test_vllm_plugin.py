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

    scheduler: Any = SimpleNamespace(block_size=16)
    names, others = VllmPrefixHashes(scheduler), VllmPrefixHashes(scheduler)
    one = request(b"system", b"one", b"more")
    two = request(b"system", b"two", b"more")
    assert names.of_prompt(one)[0] == names.of_prompt(two)[0]
    assert names.of_prompt(one)[1] != names.of_prompt(two)[1]
    assert len(names.of_prompt(one)) == 2
    assert names.of_output(one) == names.of_output(two)
    assert len(names.of_output(one)) == 1
    assert others.of_prompt(one)[0] != names.of_prompt(one)[0]


@pytest.mark.parametrize(("num_prompt", "num_of_prompt"), [(40, 2), (48, 2), (49, 3), (0, 0)])
def test_a_hash_that_vllm_makes_one_token_late_is_told_with_the_output(
    num_prompt: int, num_of_prompt: int
) -> None:
    def hashes(num_tokens: int) -> list[bytes]:  # a block's, once there is a token after it
        return [bytes([number]) for number in range((num_tokens - 1) // 16)]

    scheduler: Any = SimpleNamespace(block_size=16, num_hash_lookahead_tokens=1)
    names = VllmPrefixHashes(scheduler)
    request: Any = SimpleNamespace(num_prompt_tokens=num_prompt, num_tokens=num_prompt)
    request.block_hashes = hashes(num_prompt)
    prompt = names.of_prompt(request)
    request.num_tokens, request.block_hashes = 97, hashes(97)
    assert len(prompt) == num_of_prompt
    whole = SimpleNamespace(num_prompt_tokens=97, num_tokens=97, block_hashes=hashes(97))
    assert prompt + names.of_output(request) == names.of_prompt(whole)  # type: ignore[arg-type]


def test_of_the_hashes_within_a_block_the_one_at_its_end_is_told() -> None:
    scheduler: Any = SimpleNamespace(block_size=32, hash_block_size=16)
    plain: Any = SimpleNamespace(block_size=16)
    every, ends = VllmPrefixHashes(plain), VllmPrefixHashes(scheduler)
    ends._salt = every._salt
    request: Any = SimpleNamespace(num_prompt_tokens=90, num_tokens=130)
    request.block_hashes = [bytes([number]) for number in range(8)]
    told = every.of_prompt(request) + every.of_output(request)
    assert ends.of_prompt(request) == told[1:4:2]
    assert ends.of_output(request) == told[5::2]


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
