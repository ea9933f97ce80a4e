"""Names in the audit: one proved by a key is marked; a claimed one never looks like it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.client.client import ControlClient
from stepscope.engine.protocol.commands import Asker, GetAudit
from stepscope.engine.protocol.wire import Audited
from stepscope.recordings.state.audit_text import who_text
from stepscope.tui.session.who import who
from tests.support.screens.pty_process import PtyProcess


def entry(who: str, key: str | None) -> Audited:
    return Audited(number=1, command="Pause", who=who, key=key, time_ns=0)


@given(
    st.text(max_size=40)
    | st.sampled_from(
        ["key alice", " KEY  alice", "key\talice (a@b)", "ｋｅｙ alice", "kеy alice"]
    ),
    st.sampled_from([None, "local"]),
)
def test_a_claimed_client_name_never_looks_like_one_proved_by_a_key(
    name: str, key: str | None
) -> None:
    for told in (who_text(entry(name, key)), Asker(name, key).name):
        assert told.split()[:1] != ["key"]
        assert told.isascii() or told.startswith('"')
        assert told


def test_a_keys_name_is_marked_as_proved_whatever_its_holder_claims() -> None:
    assert who_text(entry("", "alice")) == "key alice"
    assert who_text(entry("alice", "alice")) == "key alice"
    assert who_text(entry("key bob", "alice")) == "key alice (key bob)"
    assert Asker("bob", "alice").name == "key alice"
    assert who_text(entry("anna/pts3@gpu-7", None)) == "anna/pts3@gpu-7"


def _names(live_engine: Any) -> list[str]:
    with ControlClient(live_engine.endpoint) as client:
        return [each.who for each in client.ask(GetAudit()).entries]


def _set_in_a_terminal(endpoint: str, value: str, folder: Path) -> str:
    """Runs `stepscope set` in a terminal of its own; returns that terminal's name."""
    program = (
        "import os, sys\n"
        "from stepscope.tui.cli.__main__ import main\n"
        "print('at', os.ttyname(0), flush=True)\n"
        f"sys.argv = ['stepscope', 'set', {endpoint!r}, 'watermark={value}']\n"
        "main()\n"
    )
    process = PtyProcess([sys.executable, "-c", program], cwd=folder)
    said = b""
    while True:
        try:
            said += process.read()
        except EOFError:
            break
    assert process.wait() == 0, said.decode()
    process.close()
    return next(line.split()[1] for line in said.decode().splitlines() if line.startswith("at "))


def test_two_terminals_of_one_account_have_two_client_names(
    live_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_CONFIG", "none")
    first = _set_in_a_terminal(live_engine.endpoint.control, "0.1", tmp_path)
    [name] = _names(live_engine)
    account, _, rest = name.partition("/")
    assert rest.startswith(first.removeprefix("/dev/").replace("/", "") + "@")
    assert who().startswith(account)


def test_a_client_name_comes_from_the_option_the_environment_or_the_config_file(
    live_engine: Any, stepscope: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPSCOPE_CLIENT_NAME", raising=False)
    address = live_engine.endpoint.control
    config = tmp_path / "config" / "stepscope" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[client]\nname = "from the file"\n')
    stepscope("set", address, "watermark=0.1")
    monkeypatch.setenv("STEPSCOPE_CLIENT_NAME", "from a\nvariable")
    stepscope("set", address, "watermark=0.2")
    monkeypatch.setenv("STEPSCOPE_CLIENT_NAME", "key anna")
    stepscope("set", address, "watermark=0.3")
    monkeypatch.delenv("STEPSCOPE_CLIENT_NAME")
    config.unlink()
    stepscope("set", address, "watermark=0.4")
    plain = who()
    given = [f"{name} ({plain})" for name in ("from the file", "from a variable", "key anna")]
    assert _names(live_engine) == [*given, plain]
    assert f'"key anna ({plain})"' in stepscope("snapshot", "--audit", address).stdout
