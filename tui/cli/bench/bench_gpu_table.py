"""Prints a report of `stepscope bench gpu`, or two side by side, in at most 100 columns."""

import textwrap
from collections.abc import Iterator, Sequence

from stepscope.engine.bench.gpu.parts import PARTS
from stepscope.engine.bench.gpu.results import PartOutcome, Report
from stepscope.tui.cli.bench.bench_gpu_rows import Row, rows_of

WIDTH = 100
_INDENT = "    "
_VERSIONS = ("torch", "CUDA", "triton", "flash-attn", "transformers", "stepscope")
_UNDER = {
    "b": "ms of a step, and the floor's share of it; in brackets of the device's own time",
    "c": "ms of a step, and the floor's share of it; in brackets of the device's own time",
    "d": "ms of a step of so many tokens of one prompt",
    "e": "microseconds, and the floor's share of them",
    "f": "output tokens/s, and the time of all",
    "g": "output tokens/s of stepscope / of generate_batch",
    "h": "ms between two tokens of a stream, from the first arrival on",
    "i": "time with / without, median of the pairs, and the lowest and highest",
}


def table(report: Report) -> Iterator[str]:
    """Yield a report as lines of text."""
    yield from _head(report)
    described: set[str] = set()
    for part in PARTS:
        outcomes = list(report.of(part))
        if not outcomes:
            continue
        yield ""
        yield from _title(part)
        rows = [row for outcome in outcomes for row in rows_of(report, outcome)]
        yield from _listed(rows) if part == "e" else _pivoted(rows)
        for outcome in outcomes:
            yield from _settings(outcome, described)
            yield from _missing(outcome)
    if report.aims:
        yield ""
        yield "aims"
        for aim in report.aims:
            verdict = {True: "held", False: "not held", None: "not measured"}[aim.held]
            found = "" if aim.found is None else f": {aim.found:.2f}"
            text = f"{verdict:<13} {aim.what}{found} ({aim.wanted})"
            yield from textwrap.wrap(
                text, WIDTH, initial_indent=_INDENT, subsequent_indent=" " * 18
            )


def side_by_side(first: Report, second: Report) -> Iterator[str]:
    """Yield two reports as lines, measurement by measurement, with the ratio of second to first."""
    for name, report in (("1", first), ("2", second)):
        for place, line in enumerate(_head(report)):
            yield (f"{name}  " if place == 0 else "   ") + line
    for part in PARTS:
        rows = [
            {
                (row.column, row.label): row
                for outcome in report.of(part)
                for row in rows_of(report, outcome)
            }
            for report in (first, second)
        ]
        keys = list(dict.fromkeys((*rows[0], *rows[1])))
        if not any(list(report.of(part)) for report in (first, second)):
            continue
        yield ""
        yield from _title(part)
        cells = []
        for column, label in keys:
            found = [each.get((column, label)) for each in rows]
            values = [None if row is None else row.value for row in found]
            ratio = f"{values[1] / values[0]:.2f}" if values[0] and values[1] else ""
            name = f"{column}: {label}" if column else label
            texts = ["-" if row is None else row.text for row in found]
            cells.append((name, texts[0], texts[1], ratio))
        yield from _beside(cells)
        for number, report in (("1", first), ("2", second)):
            for outcome in report.of(part):
                for line in _missing(outcome):
                    yield _INDENT + f"{number}: " + line.strip()


def _beside(cells: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield one line for each measurement of two reports: name, both texts, ratio.

    If a line would be wider than `WIDTH`, each measurement gets three lines.

    Args:
        cells: (name, text of the first report, text of the second, ratio).
    """
    lines = list(_aligned([("", "1", "2", "2 / 1"), *cells] if cells else []))
    if max(map(len, lines), default=0) <= WIDTH:
        yield from lines
        return
    for name, first, second, ratio in cells:
        yield _INDENT + name
        yield from _wrapped(f"  1  {first}")
        yield from _wrapped(f"  2  {second}" + (f"  (2 / 1: {ratio})" if ratio else ""))


def _head(report: Report) -> Iterator[str]:
    state = " (interrupted)" if report.is_interrupted else ""
    yield f"stepscope bench gpu: {report.device}, {report.date}, {report.seconds:.0f} s{state}"
    if not report.is_gpu:
        yield "NOT A GPU: tiny models on a CPU, to see that the bench runs. No figure of a GPU."
    elif report.is_quick:
        yield "QUICK: tiny models, to see that the bench runs. They say nothing about the GPU."
    versions = [f"{name} {report.versions[name]}" for name in _VERSIONS if name in report.versions]
    if report.commit:
        versions[-1:] = [f"{each} ({report.commit})" for each in versions[-1:]]
    yield from textwrap.wrap(", ".join(versions), WIDTH - 3)  # two reports are indented
    gpu = report.gpu.get("before", {})
    if gpu:
        words = [
            f"{name.replace('_', ' ')} {gpu[name]}"
            for name in ("driver", "memory", "power_limit", "max_sm_clock", "max_memory_clock")
            if name in gpu
        ]
        yield from textwrap.wrap(", ".join(words), WIDTH - 3)


def _title(part: str) -> Iterator[str]:
    yield f"({part}) {PARTS[part].name}"
    if part in _UNDER:
        yield _INDENT + _UNDER[part]


def _settings(outcome: PartOutcome, described: set[str]) -> Iterator[str]:
    """Yield lines on the settings with which a part of the report was run.

    Args:
        described: models whose engine was described in an earlier part. This function adds to it.
    """
    settings, on = outcome.settings, outcome.model or ""
    words: list[str] = []
    if "implementation" in settings and on not in described:
        described.add(on)
        words = [str(settings[name]) for name in ("dtype", "implementation") if settings[name]]
        words.append(f"attention {settings['attention']}")
        words.append(f"{settings['kv_tokens']:,} tokens of KV cache")
        words.append("steps overlap" if settings.get("overlap") else "steps do not overlap")
    if outcome.part == "j":
        words = [
            f"{name.replace('_', ' ')} {settings[name]}"
            for name in ("fp32_attention", "bf16_attention")
            if name in settings
        ]
    yield from _wrapped(f"{on}: {', '.join(words)}") if words else ()
    for point in outcome.points if outcome.part == "g" else ():
        names = ("attention", "use_cuda_graph", "use_async_batching", "max_batch_tokens")
        words = [f"{name} {point.facts[name]}" for name in names if name in point.facts]
        if words:
            cut = "; outputs cut to fit the time" if point.facts.get("is_cut") else ""
            software = f"{settings.get('software')} {settings.get('peer_dtype')}"
            yield from _wrapped(f"{on}: {point.what}: {software}, {', '.join(words)}{cut}")


def _missing(outcome: PartOutcome) -> Iterator[str]:
    on = f"{outcome.model}: " if outcome.model else ""
    notes = [
        f"{on}{point.what}: not measured: {point.why}" for point in outcome.points if point.why
    ]
    shared = [point.what for point in outcome.points if point.facts.get("has_shared_blocks")]
    if shared:
        notes.append(f"{on}more than the KV cache holds, so requests share blocks: {shared[0]}")
    if outcome.why is not None:
        what = "not all of it" if any(each.samples for each in outcome.points) else "not measured"
        notes.append(f"{on}{what}: {outcome.why}")
    for note in notes:
        yield from _wrapped(note)


def _wrapped(text: str) -> Iterator[str]:
    yield from textwrap.wrap(text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "  ")


def _pivoted(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a line for each label and a column for each model.

    If the table is too wide, the columns are printed one below the other.
    """
    columns = list(dict.fromkeys(row.column for row in rows))
    labels = list(dict.fromkeys(row.label for row in rows))
    found = {(row.label, row.column): row.text for row in rows}
    cells = [("", *columns)] if any(columns) else []
    cells += [(label, *(found.get((label, each), "-") for each in columns)) for label in labels]
    lines = list(_aligned(cells))
    if max(map(len, lines), default=0) <= WIDTH or len(columns) == 1:
        yield from lines
        return
    for column in columns:
        yield f"{_INDENT}{column}"
        yield from _aligned([(row.label, row.text) for row in rows if row.column == column])


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for each case of a kernel: its implementations, the fastest first."""
    for label in dict.fromkeys(row.label for row in rows):
        ranked = sorted((r for r in rows if r.label == label), key=lambda row: row.value or 0.0)
        texts = ", ".join(f"{row.column} {row.text}" for row in ranked)
        yield from textwrap.wrap(
            f"{label}: {texts}", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT * 2
        )


def _aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if not cells:
        return
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield (_INDENT + line).rstrip()
