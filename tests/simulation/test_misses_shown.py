"""What is shown of prefix misses is what the engine said of each prompt, added up by hand."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.wire import (
    Admitted,
    Arrived,
    BatchRow,
    EngineStatus,
    KVCounts,
    StepRecord,
)
from stepscope.recordings.file.messages import messages
from stepscope.recordings.file.reader import Recording
from stepscope.recordings.session.steps import StepTable
from stepscope.recordings.session.sums import sums_of
from stepscope.recordings.state.outcome import AppliedStep
from stepscope.recordings.state.session import SessionState

Run = Callable[..., str]


def _trace(path: Path, num_requests: int, apart_ms: int) -> Path:
    """Prompts with a few common beginnings, each with an end of its own."""
    chance = random.Random(2)
    beginnings = [[100 * each + i for i in range(chance.randint(2, 5))] for each in range(12)]
    lines = []
    for number in range(num_requests):
        beginning = chance.choice(beginnings)
        hashes = [*beginning[: chance.randint(1, len(beginning))], 10_000 + number]
        lines.append(
            {
                "timestamp": number * apart_ms,
                "input_length": 512 * len(hashes) - chance.randint(1, 31) * 16 - 3,
                "output_length": 4,
                "hash_ids": hashes,
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _recorded(run: Run, trace: Path, num_blocks: int) -> Path:
    path = trace.with_suffix(f".{num_blocks}.mcap")
    gpu = ("--gpu", "h100", "--num-blocks", str(num_blocks), "--max-model-len", "4096")
    run("simulate", str(trace), *gpu, "-o", str(path))
    return path


def _figures(run: Run, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("stats", str(path), "--json"))["figures"]
    return found


def _events(path: Path) -> dict[int, tuple[Arrived, Admitted]]:
    with Recording(path) as recording:
        told = [
            event
            for message, _, _, _ in messages(recording)
            if isinstance(message, StepRecord | EngineStatus)
            for event in message.events
        ]
    arrived = {each.request_id: each for each in told if isinstance(each, Arrived)}
    return {
        each.request_id: (arrived[each.request_id], each)
        for each in told
        if isinstance(each, Admitted)
    }


def test_figures_of_a_recording_are_the_sums_over_its_prompts(run: Run, tmp_path: Path) -> None:
    path = _recorded(run, _trace(tmp_path / "dense.jsonl", 80, 40), 400)
    prompts = _events(path)
    assert len(prompts) == 80
    looked_up = sum(arrived.num_prompt_tokens for arrived, _ in prompts.values())
    hit = sum(admitted.num_cached_tokens for _, admitted in prompts.values())
    misses = [admitted.misses for _, admitted in prompts.values() if admitted.misses is not None]
    evicted, diverged, twice = (
        sum(getattr(each, name) for each in misses)
        for name in ("num_evicted", "num_diverged", "num_more_hits_2x")
    )
    assert min(hit, evicted, diverged, twice) > 0
    expected = {
        "prefix_hit_rate": hit / looked_up,
        "prefix_evicted": evicted / looked_up,
        "prefix_diverged": diverged / looked_up,
        "prefix_new": (looked_up - hit - evicted - diverged) / looked_up,
        "prefix_hit_rate_2x": (hit + twice) / looked_up,
        "prefix_thrash": twice / (looked_up - hit),
    }
    figures = _figures(run, path)
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    screen = tmp_path / "kv.txt"
    run("screenshot", str(path), "--page", "kv", "-o", str(screen))
    drawn = screen.read_text()
    assert f"evicted    {evicted:>8,} {evicted / looked_up:>4.0%}" in drawn
    assert f"hits, 1.5x pool {figures['prefix_hit_rate_1_5x']:>7.0%}" in drawn


def test_explain_says_how_the_prompt_of_a_request_fared(run: Run, tmp_path: Path) -> None:
    path = _recorded(run, _trace(tmp_path / "dense.jsonl", 80, 40), 400)
    prompts = _events(path)
    misses, number = next(
        (admitted.misses, number)
        for number, (_, admitted) in prompts.items()
        if admitted.misses and admitted.misses.num_evicted and admitted.misses.num_diverged
    )
    arrived, admitted = prompts[number]
    said = run("explain", str(path), "--request", f"r{number}")
    new = arrived.num_prompt_tokens - admitted.num_cached_tokens
    new -= misses.num_evicted + misses.num_diverged
    parts = f"{admitted.num_cached_tokens:,} hit, {misses.num_evicted:,} evicted, "
    parts += f"{misses.num_diverged:,} diverged, {new:,} new"
    assert f"prompt of {arrived.num_prompt_tokens:,} tokens: {parts}" in said
    first = arrived.num_prompt_tokens - misses.num_diverged
    assert f"by r{misses.evicted_by}, after {misses.life_ns / 1e9:.1f} s in the cache; " in said
    of = f"diverged from r{misses.diverged_from} at token {first + 1:,} (block {first // 16 + 1})"
    assert of in said
    told = json.loads(run("explain", str(path), "--request", f"r{number}", "--json"))["prompt"]
    assert told["evicted"] == misses.num_evicted
    assert told["num_more_hits_2x"] == misses.num_more_hits_2x


def test_a_larger_pool_has_the_hit_rate_that_was_said_of_it(run: Run, tmp_path: Path) -> None:
    trace = _trace(tmp_path / "apart.jsonl", 80, 2_000)
    figures = {blocks: _figures(run, _recorded(run, trace, blocks)) for blocks in (300, 450, 600)}
    assert figures[300]["prefix_hit_rate_1_5x"] == figures[450]["prefix_hit_rate"]
    assert figures[300]["prefix_hit_rate_2x"] == figures[600]["prefix_hit_rate"]
    assert figures[300]["prefix_hit_rate"] < figures[450]["prefix_hit_rate"]


@pytest.mark.parametrize(("num_queried", "num_evicted"), [(0, 0), (90, None)])
def test_of_prompts_that_nobody_judged_the_misses_are_unknown_if_they_were_looked_up(
    num_queried: int, num_evicted: int | None
) -> None:
    record = StepRecord(
        step=0, schedule_start_ns=0, tokens_ns=9, num_prefill_tokens=90, num_decode_tokens=0,
        batch=[BatchRow(0, 0, 0, 90, 0, 6, 1)], kv=KVCounts(6, 0, 9, 0, num_queried),
        num_running=1, num_waiting=0, events=[Arrived(0, "a", 90, 4, 0, 0), Admitted(0, 0)],
    )  # fmt: skip
    outcome = SessionState().apply(record)
    table = StepTable()
    table.append(AppliedStep(1, record, outcome))
    assert sums_of(table, 0, 1).num_evicted_tokens == num_evicted


def test_of_an_attached_vllm_that_does_not_say_it_the_screen_names_the_setting(
    run: Run, tmp_path: Path
) -> None:
    screen = tmp_path / "kv.txt"
    run("screenshot", "vllm", "--page", "kv", "-o", str(screen))
    assert "why prompts miss: STEPSCOPE_PREFIX_HASHES=1" in screen.read_text()
