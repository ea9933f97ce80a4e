"""Texts of single tokens, and prompts that a chat template makes of a conversation."""

import pytest
from transformers import PreTrainedTokenizerFast

from stepscope.engine.models.made_checkpoints import EOS_TOKEN_ID, byte_tokenizer
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.text.tokenizer import PROSE, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


def test_the_text_of_a_special_token_is_its_name_and_of_half_a_character_a_replacement(
    tokenizer: Tokenizer,
) -> None:
    texts = [tokenizer.token_text(i) for i in (0x41, 0xC3, EOS_TOKEN_ID, 99_999)]
    assert texts == ["A", "\ufffd", "<|endoftext|>", ""]


def test_characters_per_token_are_measured_on_prose(tokenizer: Tokenizer) -> None:
    class Words:
        def encode(self, text: str) -> list[int]:
            return list(range(len(text.split())))

    assert tokenizer.chars_per_token == 1.0
    assert 400 < len(PROSE) < 2000
    assert Tokenizer(Words()).chars_per_token == len(PROSE) / len(PROSE.split())


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}]


def with_template(template: str | dict[str, str] | None) -> Tokenizer:
    wrapped = byte_tokenizer()
    wrapped.chat_template = template
    return Tokenizer(wrapped)


def test_of_several_chat_templates_the_default_is_used() -> None:
    several = with_template({"default": "{{ messages[0].content }}!", "tool_use": "tools"})
    assert several.encode_chat(TURNS) == list(b"Hi!")


def test_a_chat_template_gets_the_special_tokens_and_the_tokenizer_adds_none() -> None:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer().backend_tokenizer,
        bos_token="<|im_start|>",
        add_bos_token=True,
    )
    wrapped.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    assert Tokenizer(wrapped).encode_chat(TURNS) == [258, *b"Hi"]


@pytest.mark.parametrize(
    ("template", "code", "said"),
    [
        (None, "no_chat_template", "send a prompt"),
        ("{{ raise_exception('Only user,\n  please') }}", "bad_messages", "Only user, please"),
        ("{{ messages[7].content }}", "bad_messages", "has no element 7"),
        ("{% if %}", "bad_messages", "Expected an expression"),
        ({"rag": "x"}, "bad_messages", "no default"),
        ("{{ raise_exception('x' * 5000) }}", "bad_messages", "xxx"),
    ],
)
def test_a_conversation_that_the_chat_template_rejects_gives_a_one_line_error(
    template: str | dict[str, str] | None, code: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        with_template(template).encode_chat(TURNS)
    assert refused.value.code == code
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("messages: ")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'system'}) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_cannot_reach_beyond_the_conversation(template: str) -> None:
    """A checkpoint's template is untrusted code."""
    with pytest.raises(ConfigError) as refused:
        with_template(template).encode_chat(TURNS)
    assert refused.value.code == "bad_messages"
