"""What scripts rely on: exit codes, one-line errors that say what to do, help with examples."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from stepscope.engine.transport.endpoints import Endpoint, EndpointLock
from stepscope.recordings import samples
from stepscope.tui.cli.command_line import GROUPS, command_tree
from tests.support.done import Done

COMMANDS = [name for group in GROUPS.values() for name in group]


Run = Callable[..., Done]


@pytest.fixture
def run(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch, stepscope: Run) -> Run:
    """Runs `stepscope ARGUMENTS` with its own config and runtime folders."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    monkeypatch.setenv("COLUMNS", "80")
    return stepscope


def one_line(done: Done) -> str:
    """The error, which must be a single line."""
    assert done.stderr.startswith("stepscope: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def write_config(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "config" / "stepscope"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


@pytest.mark.parametrize("command", [each for each in COMMANDS if each != "keys"])
def test_every_command_has_help_with_an_example_that_fits_80_columns(
    run: Run, command: str
) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0, done.stderr
    assert f"Example:\n    stepscope {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stderr == ""


def test_stepscope_alone_lists_all_commands_and_is_wrong_usage(run: Run) -> None:
    done = run()
    assert done.exit_code == 2
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_list_of_commands_has_the_first_line_of_each_commands_help() -> None:
    said = {name: line for group in GROUPS.values() for name, (_, line) in group.items()}
    assert said == {
        name: command.help.partition("\n")[0] for name, command in command_tree().commands.items()
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["statz", "freeze"], "no such command 'statz'. Did you mean 'stats'"),
        (["what_if", "freeze"], "Did you mean 'what-if'? (see 'stepscope --help')"),
        (["keys", "revok"], "Did you mean 'revoke'? (see 'stepscope keys --help')"),
        (["serve", "--http-for"], "'--http-for' requires an argument (see 'stepscope serve "),
        (["stats", "--foo"], "error: no such option: --foo (see 'stepscope stats --help')"),
        (["http", "--foo"], "no such option: --foo (see 'stepscope http --help')"),
    ],
)
def test_a_wrong_word_is_an_error_that_says_what_is_near_and_where_to_look(
    run: Run, words: list[str], said: str
) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert said in done.stderr.splitlines()[-1]


def test_audit_accepts_recordings_and_shipped_samples_by_name(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_bytes(samples.shipped()["freeze"].read_bytes())
    for name in ("freeze", "chunked.mcap", "mine"):
        done = run("snapshot", "--audit", name)
        assert (done.exit_code, done.stdout) == (0, "no change is recorded in it\n"), done.stderr
    done = run("snapshot", "--audit", str(tmp_path))
    assert done.exit_code == 1  # a folder is neither


def test_a_command_does_not_wait_on_the_socket_of_a_dead_engine(
    run: Run, runtime_folder: Path
) -> None:
    runtime = runtime_folder / "stepscope"
    runtime.mkdir(mode=0o700)
    for suffix in ("", ".telemetry", ".lock"):
        (runtime / f"engine-0{suffix}").write_bytes(b"")
    assert "no engine runs" in one_line(run("snapshot"))


def test_with_several_engines_a_command_names_them_and_asks_for_one(
    run: Run, runtime_folder: Path
) -> None:
    runtime = runtime_folder / "stepscope"
    runtime.mkdir(mode=0o700)
    with EndpointLock(Endpoint(f"ipc://{runtime}/a")), EndpointLock(Endpoint(f"ipc://{runtime}/b")):
        done = run("snapshot")
    assert done.exit_code == 2
    assert "2 engines run here (a, b)" in one_line(done)
    assert "'stepscope snapshot a'" in done.stderr


def test_a_server_that_is_no_engine_is_reported_as_such(run: Run, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/junk")

        def answer_junk() -> None:
            identity, number, _ = router.recv_multipart()
            router.send_multipart([identity, number, b"\x80"])  # an empty map

        thread = threading.Thread(target=answer_junk)
        thread.start()
        done = run("snapshot", f"{tmp_path}/junk")
        thread.join()
    assert done.exit_code == 1
    assert f"the program at ipc://{tmp_path}/junk is not a stepscope engine" in one_line(done)
    assert "refused" not in done.stderr
    assert "sequence" not in done.stderr


def test_a_broken_trace_is_refused_by_line_and_column_before_the_load_starts(
    run: Run, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,12,x\n")
    done = run("load", "--trace", str(trace))
    assert done.exit_code == 1
    assert f"{trace}:2: column GeneratedTokens: expected an integer" in one_line(done)


def run_without(tmp_path: Path, module: str, code: str, *command: str, debug: str = "") -> Done:
    """Runs a command in a process where importing `module` runs `code`."""
    (tmp_path / f"{module}.py").write_text(code)
    folder = str(tmp_path)
    tmp_path.chmod(0o700)
    own = {"PYTHONPATH": folder, "XDG_RUNTIME_DIR": folder, "STEPSCOPE_DEBUG": debug}
    program, env = [sys.executable, "-m", "stepscope.tui.cli", *command], {**os.environ, **own}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    code = "raise ModuleNotFoundError('no torch', name='torch')"
    done = run_without(tmp_path, "torch", code, "serve")
    assert done.exit_code == 1
    assert "pip install 'stepscope[engine]'" in one_line(done)


def test_a_bug_is_reported_in_one_line_with_a_traceback_only_on_request(tmp_path: Path) -> None:
    code = "raise RuntimeError('not today')"
    done = run_without(tmp_path, "zmq", code, "snapshot", "x")
    assert done.exit_code == 1
    assert "RuntimeError: not today" in one_line(done)
    loud = run_without(tmp_path, "zmq", code, "snapshot", "x", debug="1")
    assert loud.exit_code == 1
    assert "Traceback" in loud.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\n", "unknown key 'server'"),
        ("[serve]\nkv_mem = '1GB'\n", "unknown key 'kv_mem' in [serve]"),
        ("[dashboard]\nslo_itl_ms = inf\n", "[dashboard] slo_itl_ms = inf"),
        ("[knobs]\norder = 'random'\n", "[knobs] order = 'random'"),
        ("[dashboard]\nfps = 1000\n", "[dashboard] fps = 1000"),
        ("[load]\nrate = 'fast'\n", "[load] rate = 'fast'"),
        ("load = 3\n", "write [load]"),
        ("[load\n", "config.toml: "),
    ],
)
def test_a_wrong_config_file_is_refused_by_every_command_that_reads_it(
    run: Run, tmp_path: Path, text: str, said: str
) -> None:
    write_config(tmp_path, text)
    done = run("serve")
    assert done.exit_code == 2
    assert said in one_line(done)
    doctor = run("doctor")
    assert doctor.exit_code == 1
    assert said in doctor.stdout
    assert run("serve", "--help").exit_code == 0  # help works even then


CTRL_C = """
import signal, sys

class CtrlC:
    def find_spec(self, name, *rest):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.argv = ["stepscope", "explain", "freeze"]
from stepscope.tui.cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "name", ["typer", "stepscope.tui.cli.shared.process", "stepscope.tui.cli.recordings.explain"]
)
def test_ctrl_c_is_quiet_even_while_modules_are_imported(name: str) -> None:
    """Even while the command's modules are imported, which takes the first tenth of a second."""
    program = [sys.executable, "-c", CTRL_C.format(name=name)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
