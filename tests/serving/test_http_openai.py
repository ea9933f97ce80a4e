"""The `openai` client, unmodified, against a real engine behind the real server."""

from collections.abc import Iterator
from typing import Any

import pytest

PARTS = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "!"}]
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PARTS}]
ENDLESS: Any = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def library() -> Any:
    """The `openai` module, imported by the one worker of a test run that needs it."""
    import openai

    return openai


@pytest.fixture(scope="module")
def client(library: Any, served_model: Any) -> Iterator[Any]:
    with library.OpenAI(
        base_url=f"{served_model.url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        yield client


def test_the_model_is_listed_and_found_by_its_name(library: Any, client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.model_extra["with_tokens"] is False  # only the client sees its prompts
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(library.NotFoundError, match="no model 'huge' here; this server has 'tiny'"):
        client.models.retrieve("huge")


def test_a_stream_has_the_text_of_the_whole_answer_in_one_chunk_per_token(client: Any) -> None:
    asked: Any = {**ENDLESS, "prompt": "abcde", "max_tokens": 9}
    whole = client.completions.create(**asked)
    assert whole.id.startswith("cmpl-")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 9)
    assert (whole.usage.total_tokens, whole.choices[0].finish_reason) == (14, "length")
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert len(chunks) == 9
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.completion_tokens) == ([], 9)


def test_a_chat_gets_the_same_answer_streamed_or_whole(client: Any) -> None:
    asked: Any = {**ENDLESS, "messages": MESSAGES, "max_completion_tokens": 12, "stop": None}
    (choice,) = client.chat.completions.create(**asked, logprobs=None).choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert len(chunks) == 12
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 11
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_a_chat_answer_can_be_sent_back_as_part_of_the_conversation(client: Any) -> None:
    first = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
    conversation = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(model="tiny", messages=conversation, max_tokens=4)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_chat_without_max_tokens_ends_at_the_models_maximum_length(client: Any) -> None:
    done = client.chat.completions.create(**ENDLESS, messages=MESSAGES)
    assert done.usage.total_tokens == 512
    assert done.choices[0].finish_reason == "length"


def test_every_form_of_prompt_is_accepted_and_choices_are_in_order(client: Any) -> None:
    def ask(prompt: Any) -> Any:
        return client.completions.create(**ENDLESS, prompt=prompt, max_tokens=4)

    ids = list(b"abcde")
    texts = [ask(prompt).choices[0].text for prompt in ("abcde", "xyz")]
    assert ask(ids).choices[0].text == texts[0]
    for prompt in (["abcde", "xyz"], [ids, list(b"xyz")]):
        both = ask(prompt)
        assert [(choice.index, choice.text) for choice in both.choices] == [*enumerate(texts)]
        assert both.usage.prompt_tokens == 8


def test_several_choices_differ_are_repeatable_and_count_the_prompt_once(client: Any) -> None:
    asked: Any = {**ENDLESS, "prompt": "abcde", "max_tokens": 16, "n": 3, "seed": -7}
    asked["temperature"] = 1.5
    done = client.completions.create(**asked)
    texts = [choice.text for choice in done.choices]
    assert len(set(texts)) == 3
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 48)
    streamed = ["", "", ""]
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


def test_a_stop_string_ends_the_text_before_it_and_is_named(client: Any) -> None:
    asked: Any = {**ENDLESS, "prompt": "abcde", "max_tokens": 60}
    text = client.completions.create(**asked).choices[0].text
    stop = text[3:5]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    assert stopped.model_extra == {"stop_reason": stop}
    asked["extra_body"] = {"ignore_eos": True, "include_stop_str_in_output": True}
    kept = client.completions.create(**asked, stop=stop).choices[0]
    assert kept.text == text[: text.index(stop)] + stop


def test_the_bytes_of_all_tokens_are_the_text_and_their_offsets_are_places_in_it(
    client: Any,
) -> None:
    """The model is untrained: its text is full of parts of characters."""
    asked: Any = {**ENDLESS, "max_tokens": 40, "seed": 5, "temperature": 1.5}
    chat: Any = {**asked, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**chat).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**chat, stream=True)]
    tokens = [token for chunk in chunks for token in chunk.logprobs.content]
    assert tokens == whole.logprobs.content
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == whole.message.content
    data = b"".join(bytes(each.bytes) for each in tokens if not each.token.startswith("<|"))
    assert data.decode(errors="replace") == text
    assert "\ufffd" in text
    assert all(bytes(top.bytes) for each in tokens for top in each.top_logprobs if top.token)

    prompt: Any = {**asked, "prompt": "abc", "logprobs": 3}
    done = client.completions.create(**prompt).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**prompt, stream=True)]
    assert [at for part in parts for at in part.logprobs.text_offset] == done.logprobs.text_offset
    assert "".join(part.text for part in parts) == done.text
    for token, at in zip(done.logprobs.tokens, done.logprobs.text_offset, strict=True):
        if token.startswith("<|"):
            assert at <= len(done.text)
        elif token:
            assert done.text[at] == token[0] or token == "\ufffd"


def test_errors_become_the_openai_clients_own_exceptions(library: Any, client: Any) -> None:
    with pytest.raises(library.NotFoundError) as unknown:
        client.completions.create(model="huge", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(library.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert too_long.value.code == "context_length_exceeded"
    # litellm and others know the error by these words (litellm#10793).
    assert "this model's maximum context length is 512 tokens" in str(too_long.value)
    with pytest.raises(library.BadRequestError) as tools:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"
