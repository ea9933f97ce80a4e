"""`stepscope doctor`: what it reports about this machine, and when it ends with 1."""

import re
import tomllib
from contextlib import nullcontext
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

from stepscope.tui.cli.engines import doctor as doctor_command
from stepscope.tui.settings.cli_errors import CommandFailed


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_doctor_names_versions_the_attention_backend_and_the_folders(
    capsys: pytest.CaptureFixture[str], folders: Path
) -> None:
    doctor_command.doctor()
    said = capsys.readouterr().out
    lines = {line.split()[1]: line for line in said.splitlines()}
    extras = {"[engine]", "[http]", "[gpu]", "[flash-attn]", "[flash-attn-4]", "[export]"}
    others = {"python", "stepscope", "cpu", "gpu", "kernels", "telemetry", "attention"}
    assert extras | others <= lines.keys()
    assert f"torch {version('torch')}" in lines["[engine]"]
    assert f"textual {version('textual')}" in lines["stepscope"]
    assert " is used: " in said
    assert f"{folders}/stepscope (mode 0700)" in said
    assert "no demo checkpoint yet" in said
    assert "none runs on this machine" in said
    assert "bad" not in {line.split()[0] for line in said.splitlines()}


def test_doctor_ends_with_1_if_an_engine_could_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = [f"{name}; extra == '{extra}'" for extra, name in (
        ("engine", "torch>=2"), ("engine", "no-such-package"), ("export", "neither-this"),
        ("export", "nor-that"))]  # fmt: skip
    monkeypatch.setattr(doctor_command, "requires", lambda name: lacking)
    with pytest.raises(CommandFailed, match=r"see \[engine\] above") as raised:
        doctor_command.doctor()
    assert raised.value.exit_code == 1
    engine, export = [line for line in capsys.readouterr().out.splitlines() if "not inst" in line]
    assert engine == (
        "bad   [engine]         an engine on this machine: no-such-package not installed; "
        "pip install 'stepscope[engine]'"
    )
    assert export.startswith("note  [export]         exports to Perfetto and Parquet, figures")
    assert export.endswith(": not installed; pip install 'stepscope[export]'")


def test_doctor_says_of_each_extra_what_it_is_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert {*doctor_command._EXTRAS, "dev"} - {None} == set(
        project["project"]["optional-dependencies"]
    )


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("x" * 90, 0o700, "bad +sockets .*is too long for a socket"),
        ("shared", 0o755, "XDG_RUNTIME_DIR=.*/shared is not used: it must be yours alone"),
    ],
)
def test_doctor_says_what_is_wrong_with_the_configured_runtime_folder(
    capsys: pytest.CaptureFixture[str],
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    mode: int,
    said: str,
) -> None:
    (folders / name).mkdir()
    (folders / name).chmod(mode)
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{folders}/{name}")
    with pytest.raises(CommandFailed) if mode == 0o700 else nullcontext():
        doctor_command.doctor()
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("0.32.0", "live: max_num_batched_tokens, long_prefill_token_threshold, reserve, max_num"),
        ("0.20.2", "live: max_num_batched_tokens, long_prefill_token_threshold, reserve\n"),
        ("0.14.1", "too old to attach to: it takes 0.20 or later"),
    ],
)
def test_doctor_says_which_knobs_of_the_installed_vllm_can_be_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], release: str, said: str
) -> None:
    def version_of(package: str) -> str:
        return release if package == "vllm" else version(package)

    monkeypatch.setattr(doctor_command, "version", version_of)
    doctor_command.doctor()
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("is_found", [True, False])
def test_doctor_says_how_sglang_was_tried_or_that_it_does_not_find_the_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_found: bool
) -> None:
    monkeypatch.setattr(
        doctor_command, "version", lambda name: "0.5.23" if name == "sglang" else version(name)
    )
    if not is_found:
        none = entry_points(group="none")
        monkeypatch.setattr(doctor_command, "entry_points", lambda group: none)
    doctor_command.doctor()
    said = capsys.readouterr().out
    assert ("sglang 0.5.23: every step and request is seen; live:" in said) == is_found
    assert ("tried with 0.5.23's scheduler on a CPU only" in said) == is_found
    assert ("sglang 0.5.23 does not find stepscope's plugin" in said) != is_found
