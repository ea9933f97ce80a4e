"""What holds of every attached engine: of its telemetry, and of an error in stepscope."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.engine.adapters.attached.attachment import Attachment
from stepscope.engine.protocol import wire
from tests.attached.published import Published
from tests.support.waiting import wait_for


class InjectedError(Exception):
    """An error that stepscope's code does not expect."""


def fail(*args: object, **kwargs: object) -> Any:
    raise InjectedError


def check_detached(
    attachment: Attachment, folder: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    """Check that an `InjectedError` left nothing of stepscope but one warning."""
    assert not attachment.is_attached
    wait_for(
        lambda: "stepscope" not in [thread.name for thread in threading.enumerate()],
        "sockets and threads are closed",
    )
    assert not [path for path in folder.iterdir() if path.is_socket()]
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"stepscope has detached itself, {engine} goes on: InjectedError" in warning.message


def check_rows(found: Published, scheduled: Sequence[dict[str, int]]) -> None:
    """Check that every token of each step is in a row or counted as wasted."""
    assert [step.step for step in found.steps] == list(range(len(scheduled)))
    for step, tokens in zip(found.steps, scheduled, strict=True):
        rows = {found.names[row.request_id]: row.num_tokens for row in step.batch or ()}
        for each in step.drafts or ():  # a row has the tokens that its request got
            rows[found.names[each.request_id]] += each.num_drafted - each.num_accepted
        assert sum(rows.values()) == step.num_prefill_tokens + step.num_decode_tokens
        assert sum(rows.values()) + (step.num_wasted_tokens or 0) == sum(tokens.values())
        assert rows.items() <= tokens.items()


def check_computed_tokens(found: Published) -> None:
    """Check that a request computed its prompt and output, less the prefix hit."""
    prompts = {each.request_id: each.num_prompt_tokens for each in found.of(wire.Arrived)}
    hits = {
        each.request_id: each.num_cached_tokens + each.num_loaded_tokens
        for each in found.of(wire.Admitted)
    }
    whole = found.ends.keys() - found.preempted
    assert whole
    for name in whole:
        num_fed = max(0, found.ends[name].num_output_tokens - 1)
        assert found.num_row_tokens[name] == prompts[name] + num_fed - hits[name]
    firsts = [each.request_id for each in found.of(wire.FirstToken)]
    assert len(firsts) == len(set(firsts))
    assert {name for name, each in found.ends.items() if each.num_output_tokens} <= set(firsts)


def check_no_token_id(messages: Sequence[tuple[int, wire.Telemetry]], secret: int) -> None:
    needle = msgspec.msgpack.encode(secret)[1:]
    assert not [message for _, message in messages if needle in wire.encode(message)]
