"""`stepscope chat`: each answer ends with its figures, and Ctrl-C stops only the answer."""

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.support.done import Done
from tests.support.engines.live_engine import ByteCodec, LiveEngine
from tests.support.screens.terminal import Terminal

FIGURES = r"\[TTFT [\d.,]+ ms  ITL [\d.,]+ ms  slowest token \d+ after [\d.,]+ ms: [\d.]+ ms \w"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The conversations that reached the engine, whose codec accepts them."""
    conversations: list[list[tuple[str, str]]] = []

    def encode_chat(
        codec: ByteCodec, messages: Sequence[Mapping[str, str]], most: int | None = None
    ) -> list[int]:
        conversations.append([(each["role"], each["content"]) for each in messages])
        return list(b"a prompt")

    monkeypatch.setattr(ByteCodec, "encode_chat", encode_chat)
    return conversations


def test_each_chat_answer_ends_with_its_figures_and_is_part_of_the_next_turn(
    live_engine: LiveEngine,
    asked: list[list[tuple[str, str]]],
    stepscope: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nagain\n"))
    done = stepscope("chat", live_engine.endpoint.control, "--max-tokens", "5")
    assert done.exit_code == 0
    assert len(re.findall(FIGURES, done.stdout)) == 2
    assert asked == [[("user", "hello")], [("user", "hello"), ("assistant", ""), ("user", "again")]]


def test_without_a_chat_template_the_refusal_is_shown_in_one_line(
    live_engine: LiveEngine, stepscope: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    done = stepscope("chat", live_engine.endpoint.control)
    assert done.exit_code == 0
    assert "refused: messages: bytes have no chat template" in done.stdout


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_chat_and_its_engine(
    terminal: Callable[..., Terminal],
) -> None:
    screen = terminal(
        *(sys.executable, "-m", "stepscope.tui.cli", "chat", "--model", "demo"),
        *("--max-tokens", "8000"),
    )
    screen.wait_for("demo on .*Ctrl-D leaves", timeout_s=90)
    screen.send("hello\n")
    screen.wait_for("\n[^ \n>][^\n]{100}[^ \n]")  # a full line of the answer
    screen.send("\x03")
    screen.wait_for(FIGURES + r"[^>]*\n> *\n")
    screen.send("\x04")
    assert screen.wait_for_exit() == 0
