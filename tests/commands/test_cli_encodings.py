"""What commands print in an encoding that lacks their glyphs, and on terminals without a locale."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.tui.cli.shared.errors import write_what_encodings_lack
from stepscope.tui.cli.shared.output import say
from stepscope.tui.views.theme import TO_ASCII

GLYPHS = "".join(map(chr, TO_ASCII))
LEGACY = ["ascii", "latin-1", "cp1252", "iso8859-15", "koi8-r", "cp437", "euc_jp", "shift_jis"]


class _Pipe(io.TextIOWrapper):
    """An output stream that keeps what is written, and may claim to be a terminal."""

    def __init__(self, encoding: str, is_terminal: bool = False) -> None:
        self.file = io.BytesIO()
        self._is_terminal = is_terminal
        super().__init__(self.file, encoding=encoding)

    def isatty(self) -> bool:
        return self._is_terminal

    def written(self) -> bytes:
        self.flush()
        return self.file.getvalue()


@pytest.mark.parametrize("encoding", [*LEGACY, "gb2312", "big5", "utf-8", "utf-16"])
def test_every_glyph_is_written_as_itself_or_as_its_ascii_character(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    out, err = _Pipe(encoding), _Pipe(encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    write_what_encodings_lack()
    text = f"{GLYPHS}\udcff☃ 東京 Zürich"
    for stream in (out, err):
        print(text, file=stream, end="")
        shown = stream.written().decode(encoding)
        assert len(shown) == len(text)
        for glyph, drawn in zip(text, shown, strict=True):
            assert drawn in (glyph, glyph.translate(TO_ASCII) if glyph in GLYPHS else "?")


def test_a_command_in_another_encoding_prints_its_table_and_its_errors(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "STEPSCOPE_CONFIG": "none"}
    command = [sys.executable, "-m", "stepscope.tui.cli", "stats", f"{tmp_path}/nö→.mcap"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert "/nö>.mcap" in done.stderr.decode("latin-1")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_the_rest_of_a_wide_line_below_its_last_column(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    out = _Pipe("utf-8", is_terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    row = "r1  10 ms  shared a step with 600 prefill tokens"
    say("a sentence that is wider than forty columns", row)
    lines = out.written().decode().splitlines()
    if not is_terminal:
        assert lines[1] == row
        return
    assert lines[:2] == ["a sentence that is wider than forty", "  columns"]
    assert lines[2:] == ["r1  10 ms  shared a step with 600", "           prefill tokens"]
