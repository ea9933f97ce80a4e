"""Wrong input or a missing resource gives a one-line error and the right exit code."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.transport import keys as key_files
from stepscope.engine.transport.keys import KeyFolder
from stepscope.recordings import samples
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.export.output import writing
from stepscope.tui.views.theme import TO_ASCII

MANY = "9" * 400


@pytest.fixture
def folder(tmp_path: Path, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a recording, a folder that looks like one, and a workload."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_folder))
    shutil.copy(samples.shipped()["freeze"], tmp_path / "ok.mcap")
    (tmp_path / "dir.mcap").mkdir()
    workload = {
        "num_blocks": 64,
        "requests": [{"arrival_step": 0, "prompt_len": 20, "output_len": 3}],
    }
    (tmp_path / "w.json").write_text(json.dumps(workload))
    (tmp_path / "w.mcap").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("serve --modle demo", 2, "--modle"),
        ("serve --dtype int3", 2, "--dtype: expected one of auto, float32"),
        ("serve --watermark 0.9", 2, "of at most 0.5, got '0.9'"),
        ("set budget", 2, "expected KNOB=VALUE, got 'budget'; an engine comes first; for example"),
        ("set max_num_seqs=4 engine-0", 2, "got 'engine-0'; an engine comes first"),
        ("set max-num-seqs=1 max_num_seqs=1", 2, "max_num_seqs is given twice"),
        ("set max_num_seqs=8,order=arrival", 2, "a space stands between knobs that change"),
        ("set max_num_seqs=8,16", 2, "one value at a time; 'stepscope what-if' tries several"),
        ("load --limit 5", 2, "--limit belongs to --trace"),
        ("load --trace x.csv --rate 2", 2, "--rate describes a synthetic mix"),
        ("load --seconds 0", 2, "invalid value for '--seconds': Input should be"),
        ("export freeze -o x.txt", 2, "let it end in .pftrace, .parquet, .csv, .jsonl, or"),
        ("replay nothing.mcap", 1, "there is no recording"),
        ("replay w.mcap", 1, "not a stepscope recording"),
        ("replay freeze --at foo", 2, "invalid value for '--at': Input should be a valid integer"),
        ("serve --http-for e --http foo", 2, "'foo' is not HOST:PORT"),
        ("serve --http-for e --model demo", 2, "--model: with --http-for no engine"),
        ("verify freeze -o x", 2, "--output: only with --repair"),
        ("snapshot session.mcap", 2, "session.mcap is a recording: give --audit"),
        ("serve --endpoint http://x", 2, "'http://x' is not ipc://PATH"),
        ("verify ''", 2, "expected the name of a recording, got ''"),
        ("verify dir.mcap", 1, "Is a directory"),
        ("snapshot ''", 2, "'' is not ipc://PATH"),
        ("record tcp://127.0.0.1:1 -o no/a.mcap", 1, "no is not a folder"),
        ("snapshot tcp://host:²", 2, "a port of 1..65534"),
        ("compare ok.mcap freeze --table --json", 2, "--table, --json and --output: give one"),
        ("compare ok.mcap --mark ²", 2, "no mark or knob change '²'"),
        ("explain ok.mcap --request r²", 2, "expected a request such as r12"),
        (f"explain ok.mcap --slo-itl {MANY}s", 2, "expected a duration"),
        ("screenshot ok.mcap -o no/a.svg", 1, "no/a.svg cannot be written: no is not a folder"),
        ("plot ok.mcap -o a.svg --theme sepia", 2, "'sepia' is not one of 'light', 'dark'"),
        ("plot ok.mcap -o a.svg --from 99999", 2, "none of them from 99,999 on"),
        ("export ok.mcap --format csv -o ''", 2, "--output: expected the name of a file, got ''"),
        ("export ok.mcap --format csv -o no/a.csv", 1, "no is not a folder"),
        ("verify ok.mcap --strip-tokens -o dir.mcap", 1, "is a folder; name the file to write"),
        ("verify ok.mcap --strip-tokens -o ok.mcap", 1, "is there already"),
        (f"record nobody --no-wait -o a.mcap --rotate {MANY}GB", 1, "there is no such socket"),
        ("serve --threads 99999", 2, "of at most 1024, got '99999'"),
        ("serve --name a\x07b", 2, "cannot name an engine"),
        ("demo", 2, "add --headless, or --web PORT"),
        ("demo --headless --record ok.mcap", 1, "ok.mcap is there already"),
        ("simulate w.json --steps --num-blocks 1", 2, "--num-blocks: expected a whole number"),
        ("keys new x --role viewer --keys ok.mcap", 1, "ok.mcap is no folder"),
        ("config kyes", 2, "there is no section 'kyes'; there are: serve, "),
        ("explain /", 1, "/ is a folder; name a recording in it"),
        ("explain freeze --slo-itl soon", 2, "--slo-itl: expected a duration such as 50ms"),
        ("explain freeze --request r999", 2, "there is no request r999 (r0 to r18)"),
        ("explain freeze --queue --slo-itl 9ms", 2, "--queue: leave out --slo-itl"),
        ("explain freeze --seconds 3", 2, "--seconds: of a recording only with --queue"),
        ("bench --input-len 10:5", 2, "--input-len: expected LOW:HIGH"),
        ("bench --output-len 0", 2, "--output-len: expected LOW:HIGH"),
        ("bench --num-requests 0", 2, "invalid value for '--num-requests': Input should be"),
        ("bench --json none/out.json", 1, "none/out.json cannot be written"),
        ("lab alchemy", 2, "there are: tokens, freeze"),
        ("check ok.mcap", 2, "nothing to check"),
        ("check ok.mcap --max itl_p98=1ms", 2, "no figure is called itl_p98"),
        ("check ok.mcap --max 'itl_p99 > 1ms'", 2, "write itl_p99=VALUE"),
        ("check ok.mcap --max itl_p99=1ms --max-regression 5%", 2, "only with --baseline"),
        ("check ok.mcap --baseline x --max-regression much", 2, "expected a share like 10%"),
        ("compare freeze", 2, "nothing to compare freeze with: give B, --client, or --mark"),
        ("compare freeze chunked --mark x", 2, "give either B or --mark"),
        ("compare freeze nothing", 1, "there is no recording nothing; shipped samples"),
        ("compare freeze http://127.0.0.1:8000", 1, "its /metrics have no steps"),
        ("compare freeze --mark tea", 2, "no mark or knob change 'tea'; there are: none (marks"),
        ("compare freeze --mark 9999", 2, "expected a step from 1 to 453"),
        ("record nobody --incidents x -o y.mcap", 2, "--incidents: not with"),
        ("record nobody --incidents x --when 'itl > 5ms'", 2, "no figure is called itl"),
        ("record nobody --incidents x --before 30", 2, "--before: expected 1s or more"),
        ("record nobody --incidents x --keep 48h", 2, "a size such as 2GB"),
        ("record nobody", 2, "--output"),
        ("record nobody -o a.mcap --past 3601", 2, "invalid value for '--past': Input should be"),
        ("simulate --steps mix", 2, "mix counts in seconds, not in steps: -o FILE.mcap"),
        ("simulate --steps w.json --sweep max_num_seqs=4,8", 2, "leave out --json, --sweep"),
        ("simulate --steps w.json --gpu h100", 2, "which needs no step times; leave out"),
        ("simulate w.json", 2, "counts in steps: --steps prints who would be in each"),
        ("simulate chunked --sweep seats=1..2", 2, "'seats' is no knob; the knobs are"),
        ("simulate chunked --sweep max_num_seqs=4,8 -o x.mcap", 2, "--output: a recording is of"),
        ("simulate --steps", 2, "--steps: name a workload"),
        ("simulate --steps never-there.json", 1, "never-there.json: No such file"),
        ("simulate --steps .", 1, ".: Is a directory"),
        ("top --web 0.0.0.0:80", 2, "0.0.0.0:80 can be reached from other"),
        ("top --web '80;ls'", 2, "'80;ls' is not HOST:PORT"),
        ("demo --web 0 --headless", 2, "--headless already"),
        ("tour 11", 2, "invalid value for 'CHAPTER': Input should be less than or equal to 10"),
        ("top", 1, "stepscope serve"),
        ("set order=arrival", 1, "stepscope serve"),
        ("snapshot tcp://127.0.0.1:1", 1, "no engine"),
        ("record tcp://127.0.0.1:1 -o out.mcap --no-wait", 1, "no engine"),
        ("watch never-there --when 'itl_p99 > 50ms' --no-wait", 1, "no engine"),
        ("snapshot never-there", 1, "no engine"),
    ],
)
def test_wrong_input_gives_a_one_line_error_and_writes_nothing(
    stepscope: Callable[..., Any], folder: Path, line: str, code: int, said: str
) -> None:
    before = sorted(each.name for each in folder.iterdir())
    done = stepscope(*shlex.split(line))
    assert (done.exit_code, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "bug" not in done.stderr
    assert sorted(each.name for each in folder.iterdir() if each.name != "config") == before


def test_a_number_of_more_than_64_bits_is_not_sent(
    live_engine: Any, stepscope: Callable[..., Any]
) -> None:
    many = f"max_num_seqs={MANY[:30]}"
    done = stepscope("set", live_engine.endpoint.control, "watermark=0.1", many)
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "a number in it has more than 64 bits; it was not sent" in done.stderr
    assert live_engine.core.knobs_version == 0


def _run(line: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which $S is stepscope."""
    own = {"S": f"{sys.executable} -m stepscope.tui.cli", "STEPSCOPE_CONFIG": "none"}
    command, env = ["bash", "-c", f"exec </dev/null; {line}"], {**os.environ, **own}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_file_name_that_is_not_utf8_is_not_reported_as_a_bug(folder: Path) -> None:
    odd = b"\xff.mcap"
    shutil.copy(folder / "ok.mcap", os.fsencode(folder) + b"/" + odd)
    done = _run("$S verify $'\\xff.mcap' && $S verify $'\\xff.mcap' --json", folder)
    assert done.returncode == 1
    assert b"all is well" in done.stdout
    assert done.stderr.splitlines()[-1].endswith(b"is not valid UTF-8: rename the file")


@pytest.mark.slow
def test_closed_and_full_output_streams_are_not_reported_as_bugs(folder: Path) -> None:
    assert _run("$S verify ok.mcap >&- 2>&-", folder).returncode == 0
    closed = _run("$S verify missing.mcap 2>&-", folder)
    assert (closed.returncode, closed.stdout) == (1, b"")
    full = _run("$S --help >/dev/full", folder)
    assert full.returncode == 1
    assert full.stderr == b"stepscope: error: cannot write: No space left on device\n"
    assert _run("$S explain ok.mcap | head -1; exit ${PIPESTATUS[0]}", folder).returncode == 0


def test_the_config_command_names_misspelled_environment_variables(
    stepscope: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_DASHBOARD_SLO_ITL", "20")
    monkeypatch.setenv("STEPSCOPE_DASHBOARD_SLO_TTFT_MS", "900")
    notes = [line for line in stepscope("config").stdout.splitlines() if "no setting" in line]
    assert notes == ["# STEPSCOPE_DASHBOARD_SLO_ITL is set, but no setting has this name"]


def test_a_key_that_cannot_be_written_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = KeyFolder(tmp_path / "keys")
    with monkeypatch.context() as patch:
        patch.setattr(key_files.os, "fchmod", _disk_is_full)
        with pytest.raises(ConfigError, match="No space left"):
            folder.add("alice", "viewer", tmp_path / "alice.key", None)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
    folder.add("alice", "viewer", tmp_path / "alice.key", None)


def _disk_is_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_read_only_file_system_is_reported_with_the_requested_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_read(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", "another name")

    monkeypatch.setattr("builtins.open", only_read)
    monkeypatch.setattr(Path, "unlink", only_read)
    said = r"cannot write .*/a\.svg: Read-only file system"
    with pytest.raises(RecordingError, match=said), writing(tmp_path / "a.svg"):
        pass


def test_a_command_in_another_encoding_prints_its_table_and_its_errors(tmp_path: Path) -> None:
    done = _run("PYTHONIOENCODING=latin-1 $S stats nö→.mcap", tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert "nö>.mcap" in done.stderr.decode("latin-1")


def test_output_in_an_encoding_without_our_glyphs_has_their_ascii_characters(folder: Path) -> None:
    def written(encoding: str) -> bytes:
        line = f"PYTHONIOENCODING={encoding} PYTHONUTF8=0 $S compare ok.mcap freeze"
        return _run(line, folder).stdout

    drawn = written("utf-8").decode().translate(TO_ASCII)
    assert written("ascii") == drawn.encode("ascii", "replace") != b""
