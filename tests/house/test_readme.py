"""The README and the pages of docs/ are right about knobs and commands."""

import json
import re
import shlex
from itertools import accumulate
from pathlib import Path

import pytest
import typer

from stepscope.engine.protocol.settings.knobs import Knobs
from stepscope.recordings import samples
from stepscope.tui.cli.command_line import command_tree
from stepscope.tui.cli.simulation.runs import EngineOptions
from stepscope.tui.cli.simulation.simulate import print_steps

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = (
    ROOT / "README.md",
    Path(samples.__file__).with_name("README.md"),
    *sorted(DOCS.glob("*.md")),
)


@pytest.mark.parametrize(("name", "value"), Knobs().as_dict().items())
def test_every_knob_is_described_with_its_default(name: str, value: object) -> None:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    assert f"| `{name}` | {shown} |" in (DOCS / "knobs.md").read_text("utf-8")


def commands() -> list[str]:
    """Every line of a code block and every code in a sentence that begins with `stepscope `."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text("utf-8")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += re.findall(
            r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        )
        found += [line.split(" | ")[0] for line in lines if line.startswith("stepscope ")]
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_documents_exists_with_its_options(line: str) -> None:
    """The command exists, has these options and lacks no argument; brackets mean optional.

    In a sentence two words name a command, or three if the first two name a group of commands.
    """
    plain = re.sub(r"\[[^]]*\]|\.\.\.", "", line)
    name, *arguments = shlex.split(plain, comments=True)
    command = command_tree()
    context = command.make_context(name, arguments)
    num_names = 1
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        _, command, arguments = command.resolve_command(context, rest)
        assert command is not None
        num_names += 1
        context = command.make_context(
            name, arguments, parent=context, resilient_parsing=len(line.split()) == num_names
        )


def test_the_workload_on_the_knobs_page_behaves_as_the_page_says(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = (DOCS / "knobs.md").read_text("utf-8")
    block = text.split("```json\n")[1].split("```")[0]
    second = json.loads(block)["requests"][1]
    said = re.search(r"`static` makes the second\s+request wait (\d+) steps.*`chunked` (\d+)", text)
    assert said is not None
    file = tmp_path / "workload.json"
    file.write_text(block)
    for batching, steps in zip(("static", "chunked"), said.groups(), strict=True):
        given = {"batching": batching}
        print_steps(str(file), EngineOptions(), given, is_alone=True)
        lines = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
        done = accumulate(line["sched"].get("1", 0) for line in lines)
        last = next(n for n, num_tokens in enumerate(done) if num_tokens >= second["prompt_len"])
        assert last - second["arrival_step"] + 1 == int(steps)
