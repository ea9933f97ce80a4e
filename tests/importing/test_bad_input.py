"""Whatever stands in a file: it is read, or one line says what is wrong, and where."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.engine.protocol.wire import encode
from stepscope.recordings.errors import RecordingError
from stepscope.recordings.importing.imported import foreign_session
from tests.importing.test_results import AIPERF, GUIDELLM, INFERENCE_PERF, SGLANG, result

SAMPLES = Path(__file__).parent / "samples"
_PLACE = "here stands something else"
_BAD = ("NaN", "-1", "1e400", "9" * 400, "9" * 5000, "null", '"x"', "[]", "{}", "true", "[[[]]]",
        '"\\ud800"', "1e-320")  # fmt: skip
_FEW = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors", "generated_texts")


def cut_down(tool: str) -> Any:
    """A result of a tool, with two requests."""
    if tool == "aiperf":
        return json.loads(AIPERF.read_text("utf-8").splitlines()[0])
    if tool == "guidellm":
        report = json.loads(GUIDELLM.read_text("utf-8"))
        request = report["benchmarks"][0]["requests"]["successful"][0]
        request["info"] = {"timings": request["info"]["timings"]}
        groups = {"successful": [request, request], "errored": [], "incomplete": []}
        return {"config": {}, "benchmarks": [{"requests": groups}]}
    if tool == "inference-perf":
        return json.loads(INFERENCE_PERF.read_text("utf-8"))[:2]
    values = result() if tool == "vllm" else json.loads(SGLANG.read_text("utf-8"))
    return values | {name: values[name][:2] for name in _FEW if name in values}


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    named = value.items() if isinstance(value, dict) else ()
    for key, each in named or (enumerate(value[:2]) if isinstance(value, list) else ()):
        yield from places(each, (*before, key))


def changed(document: Any, place: tuple[Any, ...], text: str) -> str:
    if not place:
        return text
    other = copy.deepcopy(document)
    inner = other
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = _PLACE
    return json.dumps(other).replace(json.dumps(_PLACE), text)


def read(path: Path) -> None:
    """Read a file to its end, or check the line that says why it cannot be read."""
    said = str(path)
    try:
        session = foreign_session(path)
        for each in session.messages if session is not None else ():
            encode(each)
    except RecordingError as error:
        said = str(error)
    assert "\n" not in said
    assert said.startswith(str(path))
    assert len(said) < 300 + len(str(path))


@pytest.mark.parametrize("tool", ["vllm", "sglang", "aiperf", "guidellm", "inference-perf"])
def test_any_value_in_any_place_is_read_or_refused_in_one_line(tmp_path: Path, tool: str) -> None:
    document, path = cut_down(tool), tmp_path / "result.json"
    for place in places(document):
        for bad in _BAD:
            path.write_text(changed(document, place, bad), "utf-8")
            read(path)
    whole = json.dumps(document)
    for end in range(0, len(whole), len(whole) // 50):
        path.write_text(whole[:end], "utf-8")
        read(path)


@pytest.mark.parametrize("name", ["vllm.log", "sglang.log", "trtllm.log"])
def test_any_change_of_a_log_is_read_or_refused_in_one_line(tmp_path: Path, name: str) -> None:
    text, path, chance = (SAMPLES / name).read_text("utf-8"), tmp_path / name, random.Random(1)
    for _ in range(300):
        at = chance.randrange(len(text))
        put = chance.choice(["", "9" * 400, "-", "nan", "1e400", ".", "99:99:99", "02-30", "\0"])
        path.write_text(text[:at] + put + text[at + chance.randrange(1, 6) :], "utf-8")
        read(path)


def test_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result()), "utf-8-sig")
    assert foreign_session(path).info.imported == "a result of vllm bench serve"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"benchmarks": [{"requests": {"successful": []}}], "config": {}}',
         "line 1, benchmarks[-1].requests: expected a request (guidellm saves them"),
        ('{"total_input_tokens": 7,\n "ttfts": [0.1,', "line 2: expected JSON, got the end of"),
        ('{"total_input_tokens": 7, "input_lens": [1], "output_lens": [1], "ttfts": [1]}',
         "line 1, itls: expected 1 entries (--output-details), got none"),
        ('[{"start_time": 1, "end_time": 2, "info": {"input_tokens": -3}}]',
         "line 1, request 1, input_tokens: expected an integer >= 0"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_with_the_option_that_saves_it(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "result.json"
    path.write_text(text, "utf-8")
    with pytest.raises(RecordingError, match=re.escape(said)):
        foreign_session(path)


def test_verify_says_that_a_log_is_no_recording(stepscope: Any) -> None:
    answer = stepscope("verify", str(SAMPLES / "vllm.log"))
    assert answer.exit_code
    assert "vllm.log is a log of vllm: only recordings can be verified" in answer.stderr


def test_records_are_not_counted_as_steps(stepscope: Any, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result()), "utf-8")
    assert "1,280 records in" in stepscope("compare", str(path), str(path), "--table").stdout
    assert "unknown steps in 10.0 s" in stepscope("stats", str(path)).stdout
    picture = tmp_path / "picture.txt"
    stepscope("screenshot", str(path), "-o", str(picture))
    drawn = picture.read_text("utf-8")
    assert "1,280 records in memory" in drawn
    # What a client saw: when tokens came, not phases of an engine.
    assert "▓prompt ━output" in drawn
    assert "╌" not in drawn
