"""Only clients with an authorised key get in, and revoking a key cuts its clients off."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from stepscope.engine.client.client import CommandRefused, ControlClient, EngineUnreachable
from stepscope.engine.protocol import commands, replies
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport.endpoints import Endpoint
from stepscope.engine.transport.gate import Gate, gate_of
from stepscope.engine.transport.keys import Credentials, KeyFolder, KeyPair, Role, read_credentials
from stepscope.engine.transport.sockets import bind, client_socket, credentials_for, server_socket
from stepscope.recordings.live.subscriber import Subscriber
from tests.support.engines.engine_process import PROGRAM
from tests.support.ports import free_port
from tests.support.waiting import wait_for

OPERATORS = (
    *(commands.SetKnobs(changes={"max_num_seqs": 3}), commands.Pause(), commands.Resume()),
    *(commands.StepOnce(n=2), commands.Abort(request_id=1), commands.ResetPrefixCache()),
    *(commands.SetWorkload(), commands.Drain(), commands.Shutdown()),
    commands.Submit(prompt_token_ids=[1, 2, 3]),
)


class Keyed:
    """A simulated engine in its own process that asks for keys, and client keys for it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.keys = KeyFolder(folder / "authorised")
        self.control = f"tcp://127.0.0.1:{port}"
        self.made("first", "operator")
        self.log = folder / "log"
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), self.control, str(self.keys.path)],
            stderr=self.log.open("wb"),
        )
        with ControlClient(self.at("first"), timeout_s=30) as client:
            client.info(again_s=0.2)

    def made(self, name: str, role: Role) -> Credentials:
        return self.keys.add(name, role, self.folder / f"{name}.key", None)

    def at(self, name: str) -> Endpoint:
        return Endpoint(self.control, read_credentials(self.folder / f"{name}.key"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        engine = Keyed(folder, free_port())
        yield engine
        engine.close()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run as if on another machine: no lock file gives them a key."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def hears(endpoint: Endpoint, wait_ms: int) -> bool:
    """Whether telemetry arrives in the time; a heartbeat is due every second."""
    with closing(client_socket(zmq.SUB, endpoint)) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint.telemetry)
        return bool(subscriber.poll(wait_ms))


def test_an_operator_does_everything_and_the_audit_names_the_key(keyed: Keyed) -> None:
    with ControlClient(keyed.at("first")) as client:
        ack = client.set_knobs({"max_num_seqs": 9}, who="somebody else")
        entry = client.ask(commands.GetAudit()).entries[-1]
    assert (entry.key, entry.who, entry.code) == ("first", "somebody else", "")
    assert (entry.old, entry.new) == ({"max_num_seqs": 64}, {"max_num_seqs": 9})
    assert entry.effective_step == ack.effective_step
    assert commands.Asker(entry.who, entry.key).name == "key first"
    assert hears(keyed.at("first"), 10_000)


@pytest.mark.parametrize("case", ["none", "unauthorised", "public half only", "another server"])
def test_without_the_right_key_no_command_is_answered_and_no_telemetry_arrives(
    keyed: Keyed, case: str
) -> None:
    known = keyed.at("first").credentials
    public_only = KeyPair(known.pair.public, KeyPair.new().secret)
    credentials, said = {
        "none": (None, "asks for a key"),
        "unauthorised": (replace(known, pair=KeyPair.new()), "not know this"),
        "public half only": (replace(known, pair=public_only), "the engine at"),
        "another server": (replace(known, server=KeyPair.new().public), "is not the one"),
    }[case]
    stranger = Endpoint(keyed.control, credentials)
    with ControlClient(stranger) as client, pytest.raises(EngineUnreachable, match=said):
        client.info()
    assert not hears(stranger, 1_500)


def test_a_viewer_may_read_but_every_change_is_refused_and_audited(keyed: Keyed) -> None:
    keyed.made("looker", "viewer")
    with ControlClient(keyed.at("looker")) as client:
        before = client.snapshot()
        assert hears(keyed.at("looker"), 10_000)
        for command in OPERATORS:
            with pytest.raises(CommandRefused) as refused:
                client.ask(command)
            assert refused.value.code == "viewer", command
            said = f"the key of looker is a viewer's; {command.doing} takes an operator's key"
            assert str(refused.value).endswith(said)
        after = client.snapshot()
        entries = client.ask(commands.GetAudit(limit=1_000)).entries
    assert (after.knobs, after.state, after.step) == (before.knobs, before.state, before.step)
    assert after.requests == []
    told = [(e.command, e.key, e.code) for e in entries][-len(OPERATORS) :]
    assert told == [(type(c).__name__, "looker", "viewer") for c in OPERATORS]
    assert after.control.denied >= len(OPERATORS)


def test_every_command_that_changes_something_needs_the_operator_role_and_has_words() -> None:
    kinds = {type(command) for command in OPERATORS}
    assert kinds == {*commands.Change.__subclasses__(), commands.Submit}
    assert len({command.doing for command in OPERATORS}) == len(OPERATORS)


def test_a_new_key_is_admitted_and_a_revoked_key_cut_off_without_a_restart(keyed: Keyed) -> None:
    keyed.made("leaver", "operator")
    endpoint = keyed.at("leaver")
    stays, goes = Subscriber(keyed.at("first")), Subscriber(endpoint, retry_s=0.1)
    stays.start()
    goes.start()
    client = ControlClient(endpoint)
    try:
        wait_for(lambda: stays.status == goes.status == "live", "both are live")
        client.info()
        keyed.keys.revoke("leaver")
        wait_for(lambda: goes.status == "down", "the revoked one is cut off")
        last, others = goes.history.last_sequence or 0, stays.history.last_sequence or 0
        with pytest.raises(EngineUnreachable, match="not know this key"):
            client.info()
        wait_for(lambda: (stays.history.last_sequence or 0) > others + 1, "signs of life")
        assert (goes.history.last_sequence or 0) == last
        assert stays.status == "live"
        assert stays.history.num_lost == 0
    finally:
        client.close()
        goes.stop()
        stays.stop()


def test_no_client_is_admitted_while_the_key_check_does_not_answer(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "authorised")
    endpoint = Endpoint(f"tcp://127.0.0.1:{free_port()}")
    credentials = keys.add("me", "operator", tmp_path / "me.key", None)
    gate = Gate(keys)
    router = server_socket(zmq.ROUTER, gate)
    bind(router, endpoint.control)
    gate._closing.set()
    gate._thread.join()  # as if it had died
    with ControlClient(replace(endpoint, credentials=credentials), timeout_s=0.5) as client:
        client.send(commands.GetInfo())
        assert not router.poll(500)
    router.close(0)
    gate.close()


def test_a_key_folder_that_others_may_write_to_lets_no_client_in(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "authorised")
    credentials = keys.add("me", "viewer", tmp_path / "me.key", None)
    gate = Gate(keys)
    try:
        assert gate.holder(credentials.pair.public) is not None
        keys.path.chmod(0o777)
        wait_for(lambda: gate.holder(credentials.pair.public) is None, "the folder is not trusted")
        keys.path.chmod(0o700)
        wait_for(lambda: gate.holder(credentials.pair.public) is not None, "it is trusted again")
        # A foreign file in the folder is ignored.
        (keys.path / "broken.pub").write_text("role = 'king'")
        other = keys.add("other", "viewer", tmp_path / "other.key", None)
        wait_for(lambda: gate.holder(other.pair.public) is not None, "the other key")
        assert gate.holder(credentials.pair.public) is not None
    finally:
        gate.close()
    keys.path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Gate(keys)


# In a process of its own: libzmq ends a process that has no file left for a socket.
OUT_OF_FILES = """
import os, resource, sys
from contextlib import suppress
from pathlib import Path
from stepscope.engine.transport.keys import KeyFolder
from stepscope.engine.transport.gate import Gate
from tests.support.waiting import wait_for

folder = Path(sys.argv[1])
keys = KeyFolder(folder / "authorised")
public = keys.add("me", "viewer", folder / "me.key", None).pair.public
gate = Gate(keys)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
# Not 0: then the gate's thread could not poll either.
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
with suppress(OSError):
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
gate._read_again()
assert gate.holder(public) is not None
for each in taken:
    os.close(each)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
keys.revoke("me")
wait_for(lambda: gate.holder(public) is None, "it is seen again")
gate.close()
"""


def test_keys_stay_valid_when_clients_exhaust_file_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OUT_OF_FILES, str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


# Addresses and files


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.7", "[::]", "example.org"])
def test_a_public_address_without_keys_is_refused_naming_the_command_that_helps(
    host: str, tmp_path: Path
) -> None:
    endpoint = Endpoint.parse(f"tcp://{host}:5555")
    with pytest.raises(ConfigError, match="stepscope keys new NAME --role operator"):
        gate_of("", endpoint).__enter__()
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"--keys {tmp_path}/empty"):
        gate_of(f"{tmp_path}/empty", endpoint).__enter__()


def test_addresses_of_this_machine_need_no_key() -> None:
    for address in ("tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555", "/tmp/x"):
        with gate_of("", Endpoint.parse(address)) as gate:
            assert gate is None


def test_sockets_are_accessible_to_their_user_only(runtime_folder: Path) -> None:
    before = os.umask(0)
    try:
        router = server_socket(zmq.ROUTER, None)
        bind(router, f"ipc://{runtime_folder}/engine")
    finally:
        os.umask(before)
    assert stat.S_IMODE((runtime_folder / "engine").stat().st_mode) == 0o600
    router.close(0)


def test_another_users_process_is_refused_whatever_the_mode_of_the_socket_file(
    runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)  # the engine's user
    router = server_socket(zmq.ROUTER, None)
    bind(router, f"ipc://{runtime_folder}/engine")
    monkeypatch.undo()
    (runtime_folder / "engine").chmod(0o666)
    with ControlClient(f"{runtime_folder}/engine", timeout_s=2) as client:
        with pytest.raises(EngineUnreachable, match="belongs to another user"):
            client.info()
        assert not router.poll(0)
    router.close(0)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "authorised")
    keys.add("me", "viewer", tmp_path / "me.key", None)
    for path in (tmp_path / "me.key", keys.path / "server.key", keys.path / "me.pub"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o700
    for mode in (0o640, 0o604, 0o660):
        (tmp_path / "me.key").chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_credentials(tmp_path / "me.key")
    (keys.path / "server.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Gate(keys)


def test_a_broken_key_file_is_an_error_that_does_not_quote_it(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    KeyFolder(tmp_path / "authorised").add("me", "viewer", path, None)
    secret = read_credentials(path).pair.secret
    text = path.read_text()
    for broken in (text.replace("secret =", "secret"), text.replace(secret, secret[:-1]), "=", ""):
        path.write_text(broken)
        with pytest.raises(ConfigError) as refused:
            read_credentials(path)
        assert secret[:20] not in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_client_finds_its_key_by_itself(tmp_path: Path) -> None:
    mine = tmp_path / "config" / "stepscope" / "keys"
    mine.mkdir(parents=True)
    keys = KeyFolder(tmp_path / "authorised")
    keys.add("a", "viewer", mine / "a.key", None)
    far = Endpoint.parse("tcp://192.0.2.7:5555")
    assert credentials_for(far).name == "a"
    keys.add("b", "viewer", mine / "b.key", far.control)
    assert credentials_for(far).name == "b"
    assert credentials_for(Endpoint.parse("tcp://127.0.0.1:5555")) is None
    keys.add("c", "viewer", mine / "c.key", None)
    with pytest.raises(ConfigError, match="--key FILE"):
        credentials_for(Endpoint.parse("tcp://192.0.2.8:5555"))


def test_the_engines_own_user_on_its_machine_needs_no_key_file(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(keyed.folder))
    (lock,) = (keyed.folder / "stepscope").glob("*.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    with ControlClient(keyed.control) as client:
        assert client.set_knobs({"max_num_seqs": 12}, who="me").version
    # ... unless a key is named.
    keyed.made("visitor", "viewer")
    monkeypatch.setenv("STEPSCOPE_CLIENT_KEY", str(keyed.folder / "visitor.key"))
    with ControlClient(keyed.control) as client, pytest.raises(CommandRefused, match="viewer"):
        client.set_knobs({"max_num_seqs": 13}, who="me")


def test_secrets_appear_in_no_reply_log_lock_file_or_process_list(
    keyed: Keyed, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = keyed.at("first")
    credentials = endpoint.credentials
    with ControlClient(endpoint) as client:
        asked = (client.info(), client.snapshot(), client.ask(commands.GetAudit()))
        told = [replies.encode(reply) for reply in asked]
    server = keyed.keys.server_pair()
    (lock,) = (keyed.folder / "stepscope").glob("*.lock")
    said = [repr(endpoint), repr(credentials), repr(server), caplog.text, keyed.log.read_text()]
    processes = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))
    for secret in (credentials.pair.secret, server.secret):
        assert all(secret not in text for text in said)
        assert all(secret.encode() not in payload for payload in told)
        assert secret.encode() not in processes
        assert secret not in lock.read_text()


def test_keys_are_made_listed_and_revoked_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = stepscope("keys", "new", "alice", "--role", "viewer")
    assert code == 0
    assert "alice.key" in out
    assert read_credentials(tmp_path / "alice.key").pair.secret not in out
    assert stepscope("keys", "list")[1].split()[:2] == ["alice", "viewer"]
    assert '"role": "viewer"' in stepscope("keys", "list", "--json")[1]
    for arguments, error in (
        (("new", "alice", "--role", "viewer"), "there is a key 'alice' already"),
        (("new", "bob", "--role", "king"), "'king' is not one of 'viewer', 'operator'"),
        (("new", "../bob", "--role", "viewer"), "cannot name a key"),
        (("new", "local", "--role", "viewer"), "local"),
        (("new", "bob", "--role", "viewer", "-o", "no/b.key"), "no/b.key cannot be written"),
        (("revoke", "carol"), "there are: alice"),
    ):
        code, _, said = stepscope("keys", *arguments)
        assert code > 0
        assert error in said
    for name, host, serves in (("dora", "127.0.0.1", True), ("erik", "gpu-7", False)):
        at = f"tcp://{host}:5555"
        said = stepscope("keys", "new", name, "--role", "viewer", "--endpoint", at)[1]
        assert (f"stepscope serve --endpoint {at} --keys" in said) == serves
    for name in ("alice", "dora", "erik"):
        code, said, _ = stepscope("keys", "revoke", name)
        assert code == 0
        assert "only with 'stepscope serve --keys DIR'" in said
    assert "no key is authorised" in stepscope("keys", "list")[1]


def test_only_two_modules_create_sockets() -> None:
    root = Path(__file__).parents[2]
    makers = [
        path.relative_to(root).as_posix()
        for package in ("engine", "recordings", "tui")
        for path in sorted((root / package).rglob("*.py"))
        if ".socket(zmq." in path.read_text() or ".instance().socket(" in path.read_text()
    ]
    # The gate's own is inproc.
    assert makers == ["engine/transport/gate.py", "engine/transport/sockets.py"]
