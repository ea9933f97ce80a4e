"""A field is used, taken because it changes nothing, or refused by its name."""

import json
from typing import Any, get_type_hints

import pytest

from stepscope.engine.http.errors import ApiError
from stepscope.engine.http.job import Head, Job, chat_job, requested_tokens
from stepscope.engine.http.requests import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    decode,
)

USED = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


def chat(**fields: Any) -> ChatRequest:
    asked = {"messages": [{"role": "user", "content": "x"}], **fields}
    return decode(json.dumps(asked).encode(), ChatRequest)


def job(request: ChatRequest) -> Job:
    return chat_job(request, Head("", 0, "", None), 512)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def test_a_field_has_one_meaning() -> None:
    assert not (USED | NEUTRAL_VALUES.keys()) & IGNORED_FIELDS
    assert not USED & NEUTRAL_VALUES.keys()


@pytest.mark.parametrize("ask", [chat, completion])
def test_null_is_as_if_a_field_was_absent_in_any_field(ask: Any) -> None:
    names = {*USED, *IGNORED_FIELDS, *NEUTRAL_VALUES, "add_special_tokens", "next_years"}
    assert ask(**dict.fromkeys(names - {"prompt", "messages"})) == ask()


def test_fields_of_messages_parts_and_stream_options_may_be_null_or_ask_for_nothing() -> None:
    part = {"type": "text", "text": "x", "image_url": None, "new": None}
    hints = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "x"}}
    turn = {"role": "user", "content": [{**part, **hints}], "name": "", "newer": None}
    nothing = {"tool_calls": [], "annotations": [], "audio": None}
    answer = {"role": "assistant", "content": "y", **nothing}
    options = {"include_obfuscation": False, "include_usage": None, "newest": None}
    job(chat(messages=[turn, answer], stream=True, stream_options=options))
    job(chat(stream_options={"include_usage": False}))
    job(chat(stream_options={}))
    assert chat(response_format={"type": "text", "json_schema": None}) == chat()
    assert chat(structured_outputs={"json": None, "regex": None}) == chat()


def test_a_value_that_asks_for_something_is_refused() -> None:
    nothing: dict[str, tuple[Any, ...]] = {"logit_bias": ({}, False, []), **NEUTRAL_VALUES}
    for name, values in {**nothing, **dict.fromkeys(IGNORED_FIELDS, (["x"],))}.items():
        for value in values:
            assert chat(**{name: value}) == chat()
            assert completion(**{name: value}) == completion()
    for name in ("prompt_logprobs", *nothing):
        with pytest.raises(ApiError, match="cannot be honoured") as refused:
            completion(**{name: {"something": 1}})
        assert refused.value.error["param"] == name
    with pytest.raises(ApiError, match="prompt_logprobs: 0 cannot"):
        completion(prompt_logprobs=0)


def test_special_tokens_are_added_to_a_prompt_and_to_no_conversation() -> None:
    assert completion(add_special_tokens=True) == completion()
    assert chat(add_special_tokens=False) == chat()
    for ask, value in ((completion, False), (chat, True)):
        with pytest.raises(ApiError) as refused:
            ask(add_special_tokens=value)
        assert refused.value.error["param"] == "add_special_tokens"


def test_an_integer_may_be_written_with_a_decimal_point() -> None:
    hints = get_type_hints(CompletionRequest)
    whole = {name: 3.0 for name, kind in hints.items() if kind in (int, int | None)}
    assert whole, "the fields with integers"
    fields = {"max_tokens": 16.0, "n": 2.0, "seed": 3.0, "top_k": 40.0, "priority": -1.0, **whole}
    request = completion(**fields, stop_token_ids=[1.0], temperature=1.0, best_of=1.0)
    assert request == completion(
        **{name: int(value) for name, value in fields.items()}, stop_token_ids=[1], temperature=1
    )
    assert completion(prompt=[1.0, 2.0]).prompt == [1, 2]
    for wrong in (16.5, "16", 1e99):
        with pytest.raises(ApiError) as refused:
            completion(max_tokens=wrong)
        assert refused.value.error["param"] == "max_tokens"


@pytest.mark.parametrize("ask", [chat, completion])
def test_the_new_name_of_max_tokens_holds_for_both_kinds(ask: Any) -> None:
    assert requested_tokens(ask(max_completion_tokens=5)) == 5
    assert requested_tokens(ask(max_completion_tokens=5, max_tokens=5)) == 5
    with pytest.raises(ApiError, match="contradicts"):
        requested_tokens(ask(max_completion_tokens=5, max_tokens=6))


def test_what_a_stream_cannot_do_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        chat(stream_options={"include_obfuscation": True})
    assert refused.value.error["param"] == "stream_options.include_obfuscation"
    with pytest.raises(ApiError) as refused:
        job(chat(stream_options={"include_usage": True}))
    assert refused.value.error["param"] == "stream_options"
