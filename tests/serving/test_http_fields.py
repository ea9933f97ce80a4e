"""Each field of OpenAI, vLLM and llama.cpp is used, or refused with a reason."""

import json
from typing import Any, get_type_hints

import pytest

from stepscope.engine.http.errors import ApiError
from stepscope.engine.http.openai.job import Head, Job, chat_job, requested_tokens
from stepscope.engine.http.openai.requests import (
    UNUSED_FIELDS,
    ChatRequest,
    CompletionRequest,
    decode,
)

# The names in the requests of vLLM's and of llama.cpp's server.
VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
    chat_template chat_template_kwargs continue_final_message documents echo ec_transfer_params
    guided_choice guided_decoding_backend guided_grammar guided_json guided_regex
    guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
    kv_transfer_params length_penalty logprob_token_ids max_completion_tokens max_tokens
    media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds prompt_logprobs
    repetition_detection repetition_penalty request_id response_format return_mm_kwargs
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens
    stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
LLAMA_CPP = """
    adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
    generation_prompt grammar grammar_lazy grammar_triggers id_slot json_schema lora min_keep
    mirostat mirostat_eta mirostat_tau multimodal_data n_cache_reuse n_cmpl n_discard n_indent
    n_keep n_predict n_probs parse_tool_calls post_sampling_probs preserved_tokens
    reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty
    response_fields return_progress return_tokens samplers sse_ping_interval t_max_predict_ms
    thinking_forced_open timings_per_token top_n_sigma typical_p verbose xtc_probability
    xtc_threshold
"""
USED = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


def chat(**fields: Any) -> ChatRequest:
    asked = {"messages": [{"role": "user", "content": "x"}], **fields}
    return decode(json.dumps(asked).encode(), ChatRequest)


def job(request: ChatRequest) -> Job:
    return chat_job(request, Head("", 0, "", None), 512)


def completion(**fields: Any) -> CompletionRequest:
    return decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def test_every_field_of_openai_vllm_and_llama_cpp_is_decided_once() -> None:
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chats

    names = {*VLLM.split(), *LLAMA_CPP.split()}
    for kind in (
        chats.CompletionCreateParamsStreaming,
        completions.CompletionCreateParamsStreaming,
    ):
        names |= kind.__annotations__.keys()
    assert names - USED - UNUSED_FIELDS.keys() == {"add_special_tokens"}
    assert not USED & UNUSED_FIELDS.keys()


@pytest.mark.parametrize("ask", [chat, completion])
def test_null_is_as_if_a_field_was_absent_in_any_field(ask: Any) -> None:
    names = {*USED, *UNUSED_FIELDS, "add_special_tokens", "a_field_of_next_year"}
    assert ask(**dict.fromkeys(names - {"prompt", "messages"})) == ask()


def test_fields_of_messages_parts_and_stream_options_may_be_null_or_ask_for_nothing() -> None:
    part = {"type": "text", "text": "x", "image_url": None, "new": None}
    hints = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "x"}}
    turn = {"role": "user", "content": [{**part, **hints}], "name": "", "newer": None}
    answer = {
        "role": "assistant",
        "content": "y",
        "tool_calls": [],
        "annotations": [],
        "audio": None,
    }
    options = {"include_obfuscation": False, "include_usage": None, "newest": None}
    request = chat(messages=[turn, answer], stream=True, stream_options=options)
    job(request)
    job(chat(stream_options={"include_usage": False}))
    job(chat(stream_options={}))
    assert chat(response_format={"type": "text", "json_schema": None}) == chat()
    assert chat(structured_outputs={"json": None, "regex": None}) == chat()


@pytest.mark.parametrize("name", UNUSED_FIELDS)
def test_a_value_that_asks_for_something_is_refused_with_the_reason(name: str) -> None:
    reason, values = UNUSED_FIELDS[name]
    for value in (["something"] * 400,) if values is None else values:
        assert chat(**{name: value}) == chat()
        assert completion(**{name: value}) == completion()
    if values is not None:
        with pytest.raises(ApiError, match="cannot be honoured") as refused:
            completion(**{name: {"something": 1}})
        assert reason in str(refused.value)
        assert refused.value.error["param"] == name


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
