"""`doctor`: what an operator is told about this machine, and when it ends with 1."""

import os
from pathlib import Path

import pytest

from stepscope.tui.commands import doctor as doctor_command
from stepscope.tui.commands.errors import CommandFailed


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o700)
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def test_it_names_versions_the_backend_and_the_folders(
    capsys: pytest.CaptureFixture[str], folders: Path
) -> None:
    doctor_command.doctor()
    said = capsys.readouterr().out
    lines = {line.split()[1]: line for line in said.splitlines()}
    for name in (
        "python",
        "torch",
        "transformers",
        "textual",
        "cpu",
        "gpu",
        "kernels",
        "attention",
    ):
        assert name in lines
    assert " is used: " in said
    assert f"{folders}/stepscope (mode 0700)" in said
    assert "no demo checkpoint yet" in said
    assert "none runs on this machine" in said
    assert "bad" not in {line.split()[0] for line in said.splitlines()}


def test_it_ends_with_1_when_an_engine_could_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "_ENGINE", ("no-such-package",))
    with pytest.raises(CommandFailed, match="no-such-package") as raised:
        doctor_command.doctor()
    assert raised.value.exit_code == 1
    assert "bad   no-such-package  not installed: pip install 'stepscope[engine]'" in (
        capsys.readouterr().out
    )


def test_it_says_when_the_runtime_folder_that_was_asked_for_is_not_used(
    capsys: pytest.CaptureFixture[str], folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = folders / "shared"
    shared.mkdir()
    os.chmod(shared, 0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared))
    doctor_command.doctor()
    assert f"XDG_RUNTIME_DIR={shared} is not yours alone" in capsys.readouterr().out
