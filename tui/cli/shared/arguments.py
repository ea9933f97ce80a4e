"""What the user types: recordings to read, files to write, steps, sizes, knobs.

Words `KNOB=VALUE` are one change together. Commas or a range in a value make variants of that knob,
where a command takes variants.
"""

import itertools
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import KnobValue
from stepscope.recordings import samples
from stepscope.recordings.file.mcap.format import PART_SUFFIX
from stepscope.recordings.file.step_range import StepRange
from stepscope.tui.cli.shared.output import note
from stepscope.tui.settings.cli_errors import CommandFailed, WrongUsage
from stepscope.tui.settings.setting_values import convert_flags

RECORDING_SUFFIXES = (".mcap", PART_SUFFIX)


def find_recording(file: str, *, foreign: bool = True) -> Path:
    """Return the path of a recording, a sample, or with `foreign` of another tool's file."""
    if not file:
        raise WrongUsage("FILE: expected the name of a recording, got ''")
    path = Path(file)
    if path.is_file() and path.suffix not in RECORDING_SUFFIXES:
        if foreign:
            return _as_recording(path, path.stat().st_mtime_ns)
        from stepscope.recordings.importing.imported import foreign_session

        if (session := foreign_session(path)) is not None:
            kind = session.info.imported
            raise CommandFailed(f"{file} is {kind}: only recordings can be verified")
    if path.exists() or path.with_name(path.name + PART_SUFFIX).exists():
        return path  # `Recording` opens the unfinished file if there is no finished one
    if (sample := sample_named(file)) is not None:
        return sample
    if file.startswith(("http://", "https://")):
        raise CommandFailed(
            f"{file} is a server's address: its /metrics have no steps; 'stepscope top' shows them"
        )
    shipped = samples.shipped()
    known = f"; shipped samples: {', '.join(shipped)}" if shipped else ""
    raise CommandFailed(f"there is no recording {file}{known}")


@cache
def _as_recording(path: Path, mtime_ns: int) -> Path:
    from stepscope.recordings.importing.imported import imported  # loads a lot

    found, told = imported(path) or (path, None)
    note(told)
    return found


def sample_named(name: str) -> Path | None:
    return samples.shipped().get(name.removesuffix(".mcap"))


def step_range(first: int | None, last: int | None) -> StepRange:
    if first is not None and last is not None and first > last:
        raise WrongUsage(f"--from {first} is after --until {last}")
    return StepRange(first, last)


def request_number(text: str) -> int:
    number = text.strip().removeprefix("r")
    if not number.isdecimal():
        raise WrongUsage(f"--request: expected a request such as r12, got {text!r}")
    return int(number)


_MAX_COLUMNS, _MAX_ROWS = 1000, 500


def output_path(text: str, option: str = "--output", *, is_new: bool = False) -> Path:
    """Return the path to write to, after a check that it can be written, and `is_new`."""
    if text.strip() in ("", "-"):  # '-' is refused: it would be a file, not standard output
        raise WrongUsage(f"{option}: expected the name of a file, got {text!r}")
    path = Path(text)
    if text.endswith(os.sep) or path.is_dir():
        raise CommandFailed(f"{text} is a folder; name the file to write in it")
    if not path.parent.is_dir():
        raise CommandFailed(f"{text} cannot be written: {path.parent} is not a folder")
    if is_new and path.exists():
        raise CommandFailed(f"{text} is there already; remove it or choose another name")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandFailed(f"{text} cannot be written: no permission")
    return path


def picture_path(output: str, *suffixes: str) -> Path:
    """Return the path to write to, after a check of its suffix and that it can be written."""
    path = output_path(output)
    if path.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise WrongUsage(f"--output: expected a name that ends in {known}, got {path}")
    return path


def picture_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})\s*[xX×]\s*(\d{1,5})", text.strip())
    if match is None:
        raise WrongUsage(f"--size: expected columns and rows such as 120x40, got {text!r}")
    from stepscope.tui.views.layout import MIN_HEIGHT, MIN_WIDTH  # loads Textual

    num_columns, num_rows = int(match[1]), int(match[2])
    if not (MIN_WIDTH <= num_columns <= _MAX_COLUMNS and MIN_HEIGHT <= num_rows <= _MAX_ROWS):
        bounds = f"{MIN_WIDTH}x{MIN_HEIGHT} to {_MAX_COLUMNS}x{_MAX_ROWS}"
        raise WrongUsage(f"--size: expected {bounds}, got {text!r}")
    return num_columns, num_rows


_MAX_RANGE = 8
_MAX_VARIANTS = 32


def knob_texts(words: Sequence[str], example: str) -> dict[str, str]:
    """Return knob -> what follows its `=`, with its commas. The names are not checked."""
    texts: dict[str, str] = {}
    for word in words:
        name, equals, text = (part.strip() for part in word.partition("="))
        name = name.replace("-", "_")
        if not equals or not name or not text:
            raise WrongUsage(f"expected KNOB=VALUE, got {word!r}; {example}")
        if "=" in text:
            raise WrongUsage(f"{word!r}: a space stands between knobs that change together")
        if name in texts:
            raise WrongUsage(f"{name} is given twice: {texts[name]!r} and {text!r}")
        texts[name] = text
    return texts


def variants_of(words: Sequence[str]) -> list[tuple[str, dict[str, KnobValue]]]:
    """Return the changes to try, in words and by knob: each value of each knob with each other."""
    texts = knob_texts(words, "for example max_num_batched_tokens=256,512")
    if unknown := [name for name in texts if name not in Knobs.__struct_fields__]:
        raise WrongUsage(
            f"{unknown[0]!r} is no knob; the knobs are {', '.join(Knobs.__struct_fields__)}"
        )
    found = []
    for chosen in itertools.product(*map(_values, texts.values())):
        flags = dict(zip(texts, chosen, strict=True))
        said = " ".join(f"{name}={value}" for name, value in flags.items())
        found.append((said, convert_flags(Knobs, flags)))
    if len(found) > _MAX_VARIANTS:
        raise WrongUsage(f"{len(found)} variants; at most {_MAX_VARIANTS} are tried")
    return found if texts else []


def _values(text: str) -> list[str]:
    """Return values with commas between them, or of FIRST..LAST each doubling, at most eight."""
    first, dots, last = text.partition("..")
    if not dots:
        return text.split(",")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) < int(last)):
        raise WrongUsage(f"expected FIRST..LAST, two whole numbers, got {text!r}")
    low, high = int(first), int(last)
    num_points = max(2, min(_MAX_RANGE, (high // low).bit_length()))
    values = {round(low * (high / low) ** (at / (num_points - 1))) for at in range(num_points)}
    return [str(value) for value in sorted(values)]
