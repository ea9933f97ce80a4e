"""What a user writes reaches the model, whichever form of content its chat template reads."""

from typing import Any

import pytest

from stepscope.engine.models.made_checkpoints import CHAT_TEMPLATE, byte_tokenizer
from stepscope.engine.protocol.knobs import ConfigError
from stepscope.engine.text.tokenizer import Tokenizer, render

EACH = "{% for m in messages %}<{{ m['role'] }}>CONTENT{% endfor %}"
LOOP = (
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }};{% endif %}{% endfor %}"
)
PRINT = "{{ m['content'] }}"
TEXT, SYSTEM = "m['content'] is string", "m['role'] == 'system'"
RAISE = "{{ raise_exception('no') }}"
# As of chat templates in use: what each message becomes.
CONTENTS = {
    "string": PRINT,
    "stripped": "{{ m['content'] | trim }}",
    "quoted": "{{ m['content'] | tojson }}",
    "list": LOOP,
    "list, strict": "{% for c in m['content'] %}{{ c['text'] + ';' }}{% endfor %}",
    "first part": "{{ m['content'][0]['text'] }};",
    "either": f"{{% if {TEXT} %}}{PRINT}{{% else %}}{LOOP}{{% endif %}}",
    "string system, list of others": f"{{% if {SYSTEM} %}}{PRINT}{{% else %}}{LOOP}{{% endif %}}",
    "string or raises": f"{{% if not {TEXT} %}}{RAISE}{{% endif %}}{PRINT}",
    "list or raises": f"{{% if {TEXT} %}}{RAISE}{{% endif %}}{LOOP}",
    "string system, or raises": (
        f"{{% if {SYSTEM} %}}{PRINT}{{% elif {TEXT} %}}{RAISE}{{% else %}}{LOOP}{{% endif %}}"
    ),
}
TEMPLATES = {name: EACH.replace("CONTENT", content) for name, content in CONTENTS.items()}


def turn(role: str, content: str | list[str]) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATION = [turn("system", "Be brief."), turn("user", "user"), turn("assistant", 'Ho, "é"')]
LAST = turn("tool", " 1\n<user>; ")


def prompt_of(template: str, messages: list[dict[str, Any]]) -> str:
    wrapped = byte_tokenizer()
    wrapped.chat_template = template
    tokenizer = Tokenizer(wrapped)
    prompt = tokenizer.decode(tokenizer.encode_chat(messages))
    assert "'type'" not in prompt
    return prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_text_reaches_the_prompt_in_the_form_that_the_template_reads(name: str) -> None:
    prompt = prompt_of(TEMPLATES[name], [*CONVERSATION, LAST])
    plain = prompt.replace(";<", "<").removesuffix(";")
    if name == "stripped":
        assert plain == '<system>Be brief.<user>user<assistant>Ho, "é"<tool>1\n<user>;'[:-1]
    elif name == "quoted":
        assert '<user>"user"' in prompt
    else:
        assert plain == '<system>Be brief.<user>user<assistant>Ho, "é"<tool> 1\n<user>; '


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("string", "<system>s<user>a\nb"),
        ("list", "<system>s;<user>a;b;"),
        ("either", "<system>s<user>a;b;"),
        ("string system, list of others", "<system>s<user>a;b;"),
        ("string or raises", "<system>s<user>a\nb"),
        ("list or raises", "<system>s;<user>a;b;"),
        ("string system, or raises", "<system>s<user>a;b;"),
    ],
)
def test_parts_of_a_message_are_given_as_parts_or_as_lines_of_one_text(
    name: str, prompt: str
) -> None:
    assert prompt_of(TEMPLATES[name], [turn("system", "s"), turn("user", ["a", "b"])]) == prompt


def test_a_prompt_is_the_one_that_transformers_renders_from_what_the_template_reads() -> None:
    wrapped = byte_tokenizer()
    for template, as_parts in ((CHAT_TEMPLATE, False), (TEMPLATES["list"], True)):
        wrapped.chat_template = template
        theirs = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} if as_parts else each
            for each in CONVERSATION
        ]
        right = wrapped.apply_chat_template(theirs, add_generation_prompt=True, return_dict=False)
        assert Tokenizer(wrapped).encode_chat(CONVERSATION) == right


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        ("<user>fixed", "messages[0] (role 'system')"),
        (EACH.replace("CONTENT", "{{ m['text'] }}"), "messages[0] (role 'system')"),
        ("{{ messages[0]['content'] }}{{ messages[2]['content'] }}", "messages[1] (role 'user')"),
        (
            "{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}",
            "messages[3] (role 'tool')",
        ),
        ("{{ messages[-1]['content'] }}", "messages[0]"),
        (EACH.replace("CONTENT", "{{ m['content'][0]['text'] }}"), "messages[4] (role 'user')"),
        (EACH.replace("CONTENT", "{{ m['content'][:0] }}"), "messages[0]"),
    ],
)
def test_a_template_that_leaves_a_text_out_refuses_the_conversation(
    template: str, left_out: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        prompt_of(template, [*CONVERSATION, LAST, turn("user", ["a", "b"])])
    assert refused.value.code == "bad_messages"
    assert left_out in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_empty_text_and_earlier_words_of_the_model_may_be_left_out() -> None:
    template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    messages = [turn("system", " "), turn("user", "Hi"), turn("assistant", "Ho")]
    assert prompt_of(template, messages) == "Hi"


def test_what_a_template_says_against_the_conversation_itself_is_passed_on() -> None:
    def refuse_long(turns: list[dict[str, Any]]) -> str:
        if len(str(turns[0]["content"])) > 60:
            raise ValueError("too long\nfor me")
        return str(turns[0]["content"])

    with pytest.raises(ConfigError, match="does not take them: too long for me"):
        render(refuse_long, [turn("user", "x" * 99)])
