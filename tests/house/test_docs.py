"""Links in the documents work, generated parts match the tables, and commands and knobs exist."""

import json
import re
import shlex
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
import typer

from stepscope.tui.cli.command_line import command_tree
from stepscope.tui.cli.simulation.runs import EngineOptions
from stepscope.tui.cli.simulation.simulate import print_steps
from tests.house import generated_docs

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md")),
    ROOT / "recordings" / "samples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)


def without_code(path: Path) -> str:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]+`", lambda code: "x" * len(code[0]), text)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document, made from its headings as a repository's web page does."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


def links() -> list[tuple[str, str]]:
    """(document, target) of every relative link and picture."""
    return [
        (str(document.relative_to(ROOT)), target)
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document))
        if not re.match(r"[a-z]+:", target)
    ]


@pytest.mark.parametrize(("document", "target"), links())
def test_every_link_in_the_documents_leads_to_an_existing_file_and_heading(
    document: str, target: str
) -> None:
    path, _, anchor = target.partition("#")
    led_to = (ROOT / document).parent / path if path else ROOT / document
    assert led_to.exists()
    assert led_to.resolve().is_relative_to(ROOT)
    if anchor:
        assert anchor in anchors(led_to)


def test_every_page_and_picture_is_linked_from_a_document() -> None:
    targets = {
        ((ROOT / document).parent / target.partition("#")[0]).resolve()
        for document, target in links()
    }
    pages = {path for path in (ROOT / "docs").rglob("*") if path.is_file()}
    assert pages - targets == set()


def test_every_generated_documentation_page_matches_its_source_table() -> None:
    for page, generated in generated_docs.pages().items():
        text = (generated_docs.DOCS / f"{page}.md").read_text("utf-8")
        assert text == generated_docs.written_anew(text, generated), f"{page}: run 'make docs'"


def test_every_command_to_deploy_is_one_with_these_options() -> None:
    files = [ROOT / "docs" / "deploy.md", *sorted((ROOT / "docs" / "deploy").iterdir())]
    text = "\n".join(path.read_text("utf-8") for path in files).replace("\\\n", " ")
    begin = r"(?:stepscope|vllm-stepscope|bin/stepscope|\[stepscope),?\s+"
    found = re.findall(rf"{begin}((?:top|record|keys|doctor)\b[^\n\]`&#]*)", text)
    assert {line.split()[0].strip(",") for line in found} == {"top", "record", "keys", "doctor"}
    for line in found:
        words, command = shlex.split(line.replace(",", " ")), command_tree()
        while (inner := getattr(command, "commands", None)) is not None:
            command = inner[words.pop(0)]
        command.make_context("stepscope", words)


def commands() -> list[str]:
    """Every line of a code block and every code in a sentence that begins with `stepscope `."""
    found = []
    for document in DOCUMENTS:
        if document.name in ("ARCHITECTURE.md", "CHANGELOG.md"):
            continue
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
        num_names += 1
        context = command.make_context(
            name, arguments, parent=context, resilient_parsing=len(line.split()) == num_names
        )


def test_the_workload_on_the_knobs_page_behaves_as_the_page_says(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = (generated_docs.DOCS / "knobs.md").read_text("utf-8")
    block = text.split("```json\n")[1].split("```")[0]
    second = json.loads(block)["requests"][1]
    said = re.search(r"`static` makes the second\s+request wait (\d+) steps.*`chunked` (\d+)", text)
    file = tmp_path / "workload.json"
    file.write_text(block)
    for batching, steps in zip(("static", "chunked"), said.groups(), strict=True):
        given = {"batching": batching}
        print_steps(str(file), EngineOptions(), given)
        lines = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
        done = accumulate(line["sched"].get("1", 0) for line in lines)
        last = next(n for n, num_tokens in enumerate(done) if num_tokens >= second["prompt_len"])
        assert last - second["arrival_step"] + 1 == int(steps)
