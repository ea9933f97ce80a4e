"""The parts of docs/ that are generated from tables of the program: keys, knobs, words and so on.

    python tests/house/generated_docs.py        (or: make docs)

rewrites them, between `<!-- generated -->` and `<!-- /generated -->` of each page. The rest of a
page is written by hand. `test_docs.py` checks that they match the tables.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from stepscope.engine.protocol import wire, wire_rows
from stepscope.engine.protocol.knobs import Knobs
from stepscope.engine.protocol.wire import PauseSpan, StepRecord
from stepscope.engine.protocol.wire_events import PrefixMisses
from stepscope.recordings.alerts.rule import OF_NOW
from stepscope.recordings.export.tables import COLUMNS
from stepscope.recordings.figures import FIGURES, KINDS, RANKS, latency_name
from stepscope.recordings.file.mcap.format import TOPICS
from stepscope.recordings.session.index import FINISHED_COLUMNS, STORED_COLUMNS, WAIT_COLUMNS
from stepscope.recordings.session.steps import StepSummary
from stepscope.recordings.state.limits import LIMITS
from stepscope.tui.cli.command_line import command_tree
from stepscope.tui.screens.help import GLYPHS, TERMS
from stepscope.tui.settings.action_table import GROUPS, WHERE
from stepscope.tui.settings.actions import ACTIONS
from stepscope.tui.settings.settings import SECTIONS, Section

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- generated: make docs -->\n", "\n<!-- /generated -->"

# Options that several commands have: their heading, and the command that shows their defaults.
SHARED: Mapping[Section, tuple[str, str]] = {
    "serve": ("Options of the engine", "serve"),
    "knobs": ("Options for the knobs", "serve"),
    "http": ("Options of the HTTP server", "serve"),
    "dashboard": ("Options of the dashboard", "top"),
    "load": ("Options of the workload", "load"),
    "client": ("Options for keys", "top"),
}


class Option(NamedTuple):
    """An option or argument of a command, as its help shows it."""

    field: str
    names: str
    default: str
    help: str


def pages() -> dict[str, str]:
    """The generated part of each page, by the name of the page."""
    return {
        "keys": key_table(),
        "commands": commands_reference(),
        "knobs": knob_table(),
        "figures": figure_table(),
        "oncall": alert_figure_table(),
        "glossary": glossary_tables(),
        "recordings": recording_tables(),
    }


def key_table() -> str:
    """The keys of all actions."""
    rows = _head("keys", "what it does", "in `[keys]`")[1:]
    for group, name in GROUPS.items():
        rows.append(f"| **{name}** | | |")
        for each in ACTIONS:
            if each.group == group:
                others = (f"*{WHERE[where]}*: {text}" for where, text in each.elsewhere)
                said = "; ".join((each.help, *others))
                rows.append(f"| `{each.shown}` | {said} | `{each.id}` |")
    return "\n".join(rows)


def _head(*names: str) -> list[str]:
    """An empty line, and the head of a table."""
    return ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def written_anew(page: str, generated: str) -> str:
    """The text of a page with its generated part replaced."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + generated + END + rest.split(END)[1]


# Recordings


def recording_tables() -> str:
    """The topics of a recording, and the columns of its index."""
    types = {topic.decode(): kind for kind, topic in wire.TOPICS.items()}
    lines = _head("topic", "message")[1:]
    for topic in TOPICS:
        kind = types.get(topic, StepRecord)
        lines.append(f"| `{topic}` | `{kind.__name__}`{', packed' * (topic not in types)} |")
    lines += ["", "Rows in messages stand as lists:", *_head("row", "fields")]
    names = ("BatchRow", "BlockMove", "BlockRun", "DraftRow", "HeldRow", "FrontEnd", "TakenRow")
    rows = [getattr(wire_rows, name) for name in (*names, "HoldUp", "RankTimes")]
    for row in (*rows[:-1], PauseSpan, PrefixMisses, rows[-1]):
        lines.append(f"| `{row.__name__}` | {', '.join(row.__struct_fields__)} |")
    lines += _head("table", "column", "meaning")
    source = inspect.getsource(StepSummary)
    for name in STORED_COLUMNS:
        found = re.search(rf"^    {name}: [^#\n]+(?:  # (.+))?$", source, re.MULTILINE)
        meaning = found[1] or ""
        if name == "limit":
            meaning = ", ".join(f"{place} {limit}" for place, limit in enumerate(LIMITS))
        lines.append(f"| `steps` | `{name}` | {meaning} |")
    for table, columns in (("waits", WAIT_COLUMNS), ("finished", FINISHED_COLUMNS)):
        lines += [f"| `{table}` | `{name}` | {meaning} |" for name, meaning in columns.items()]
    lines += ["", "Tables of `export`, as CSV and Parquet; an empty value is unknown:"]
    lines += _head("table", "columns")
    for table, exported in COLUMNS.items():
        lines.append(f"| `{table}` | {', '.join(f'`{each.name}`' for each in exported)} |")
    return "\n".join(lines)


# Figures


def figure_table() -> str:
    """A line for each kind of latency, with its percentiles, and for each other figure."""
    names = ", ".join(f"`_{name}`" for name in RANKS.values())
    lines = [f"Latencies have {names}; all are in ms and nearest-rank: one that really occurred."]
    lines += _head("name", "unit", "better", "meaning")
    for kind in KINDS:
        spec = FIGURES[latency_name(kind, 50)]
        lines.append(f"| `{kind}_p50` ... `{kind}_max` | ms | {spec.better} | {spec.meaning} |")
    of_latency = {latency_name(kind, rank) for kind in KINDS for rank in RANKS}
    for name, spec in FIGURES.items():
        if name not in of_latency:
            unit = "share, 0 to 1" if spec.unit == "share" else spec.unit or "count"
            lines.append(f"| `{name}` | {unit} | {spec.better or ''} | {spec.meaning} |")
    return "\n".join(lines)


def alert_figure_table() -> str:
    """A line for each figure of the present moment, which only alert rules have."""
    rows = [f"| `{spec.name}` | {spec.unit} | {spec.meaning} |" for spec in OF_NOW.values()]
    return "\n".join([*_head("figure", "unit", "meaning")[1:], *rows])


# Glossary


def glossary_tables() -> str:
    """The words on the screen, then the glyphs of each part of it."""
    lines = ["## Words", *_head("word", "meaning")]
    lines += [f"| {word} | {meaning} |" for word, meaning in TERMS.items()]
    lines += ["", "## Glyphs"]
    for title, glyphs in GLYPHS.items():
        lines += ["", f"### {title}", *_head("glyph", "meaning")]
        lines += [f"| `{glyph}` | {meaning} |" for glyph, _, meaning in glyphs]
    return "\n".join(lines)


# Knobs


def knob_table() -> str:
    rows = _head("knob", "default", "values", "meaning")[1:]
    for field in msgspec.structs.fields(Knobs):
        base, meta = get_args(field.type)
        default = str(field.default).lower() if base is bool else str(field.default)
        rows.append(f"| `{field.name}` | {default} | {_values(base, meta)} | {meta.description} |")
    return "\n".join(rows)


def _values(base: type, meta: msgspec.Meta) -> str:
    if base is bool:
        return "`true`, `false`"
    if choices := get_args(base):
        return ", ".join(f"`{choice}`" for choice in choices)
    return f"{meta.ge:g} or more" if meta.le is None else f"{meta.ge:g} to {meta.le:g}"


# Commands


def commands_reference() -> str:
    """Every command with its help, example and options; shared options come at the end."""
    found = _commands(command_tree(), "stepscope")
    all_commands = {name: command for name, command in found if not command.hidden}
    lines: list[str] = []
    for name, command in sorted(all_commands.items()):
        example = (command.epilog or "").split("Example:\n")[1].splitlines()
        lines += [f"### `{name}`", "", *(command.help or "").strip().splitlines(), ""]
        lines += ["```", *(line.strip() for line in example), "```"]
        own, sections = _own_options(command, all_commands)
        if own:
            lines += _head("argument or option", "default", "what it does")
            lines += [f"| {each.names} | {each.default} | {each.help} |" for each in own]
        lines += [""]
        if sections:
            titles = [_title(each) for each in sections]
            links = [f"[{each}](#{each.lower().replace(' ', '-')})" for each in titles]
            lines += [f"It takes these, too: {', '.join(links)}.", ""]
    for section in SHARED:
        lines += [f"### {_title(section)}", "", f"Section `[{section}]` of the config file."]
        lines += _head("option", "key in the file", "default", "what it does")
        for each in _shared(section, all_commands).values():
            lines.append(f"| {each.names} | `{each.field}` | {each.default} | {each.help} |")
        lines += [""]
    return "\n".join(lines).rstrip()


def _commands(command: object, name: str) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for each, inner in command.commands.items():
            yield from _commands(inner, f"{name} {each}")
    elif isinstance(command, TyperCommand):
        yield name, command


def _options(command: TyperCommand) -> dict[str, Option]:
    context = typer.Context(command)
    found = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.name is None or "--help" in parameter.opts:
            continue
        names = parameter.metavar if parameter.param_type_name == "argument" else record[0]
        text, default = _split_default(record[1])
        names = " ".join(str(names).split()).replace("|", "\\|")
        found[parameter.name] = Option(
            parameter.name, f"`{names}`", default, text.replace("|", "\\|")
        )
    return found


def _split_default(text: str) -> tuple[str, str]:
    """A help text without its default and range, and the default."""
    span = r"(?:[\d.]+<=)?x[<>]=[\d.]+"
    text = re.sub(rf"\s*\[{span}\]$|; {span}(?=\]$)", "", text)
    for ending in (r"\s*\[(?:default: )?([^\]]*)\]$", r"\s*\(default: (.*)\)$"):
        if match := re.search(ending, text):
            default = match[1].replace("|", "\\|")
            is_value = " " not in default and default != "required"
            return text[: match.start()], f"`{default}`" if is_value else default
    return text, ""


def _own_options(
    command: TyperCommand, all_commands: Mapping[str, TyperCommand]
) -> tuple[list[Option], list[Section]]:
    """The options of this command alone, and the sections whose options it shares."""
    options = _options(command)
    sections: list[Section] = []
    for section in SHARED:
        shared = _shared(section, all_commands)
        if not shared.keys() <= options.keys():
            continue
        sections.append(section)
        for name, reference in shared.items():
            each = options[name]
            if each.help == reference.help and each.default in ("", reference.default):
                del options[name]
    return list(options.values()), sections


def _shared(section: Section, all_commands: Mapping[str, TyperCommand]) -> dict[str, Option]:
    options = _options(all_commands[f"stepscope {SHARED[section][1]}"])
    fields = SECTIONS[section].__struct_fields__
    return {name: options[name] for name in fields if name in options}


def _title(section: Section) -> str:
    return SHARED[section][0]


def main() -> int:
    for name, generated in pages().items():
        path = DOCS / f"{name}.md"
        path.write_text(written_anew(path.read_text("utf-8"), generated), "utf-8")
    print(f"{len(pages())} pages in {DOCS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
