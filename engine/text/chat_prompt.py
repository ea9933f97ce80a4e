"""`render`: a conversation in the model's chat template, in the form that the template reads.

Some templates read a message's content as a string, some as a list of parts, some as either. One
that gets the other form leaves the text out, or prints the list, without an error. So marks are
rendered first in place of the texts: they show what reaches the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stepscope.engine.protocol.settings.config_error import ConfigError

# Longest part of a chat template's own error message that is passed on.
LONGEST_REASON = 300

Turns: TypeAlias = list[dict[str, Any]]
Template: TypeAlias = Callable[[Turns], str]


def render(template: Template, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt of a conversation.

    Args:
        template: renders turns with `role` and `content`.
        messages: turns with `role` and `content`: a text, or the texts of its parts.

    Raises:
        ConfigError: the template refuses the conversation, or leaves out the text of a message
            that is not the model's own (`bad_messages`).
    """
    roles = [message["role"] for message in messages]
    contents = [message["content"] for message in messages]
    texts = [[content] if isinstance(content, str) else content for content in contents]
    as_sent = [isinstance(content, list) for content in contents]  # each one's form: as a list?
    tried: list[tuple[Sequence[bool], list[bool]]] = []
    refusal: ConfigError | None = None
    for forms in (as_sent, [False] * len(texts), [True] * len(texts)):
        try:
            shown = _shown(template, roles, texts, forms)
        except ConfigError as error:
            refusal = refusal or error
            continue
        if all(shown):
            return _rendered(template, roles, texts, forms)
        tried.append((forms, shown))
    if refusal is not None and not tried:
        raise refusal
    forms = [
        next((forms[at] for forms, shown in tried if shown[at]), form)
        for at, form in enumerate(as_sent)
    ]
    shown = _shown(template, roles, texts, forms)
    for number, (role, is_shown) in enumerate(zip(roles, shown, strict=True)):
        # A template may leave out what the model itself said earlier.
        if not is_shown and role != "assistant":
            raise ConfigError(
                "bad_messages",
                f"messages: the model's chat template leaves out the text of messages[{number}] "
                f"(role {role[:40]!r}); send a conversation without it, or a prompt",
            )
    return _rendered(template, roles, texts, forms)


def _shown(
    template: Template, roles: Sequence[str], texts: Sequence[list[str]], forms: Sequence[bool]
) -> list[bool]:
    """For each message, return whether all its texts reach the prompt as they are."""
    marks = [
        [f"mark{number}x{at}end" if text.strip() else text for at, text in enumerate(parts)]
        for number, parts in enumerate(texts)
    ]
    prompt = _rendered(template, roles, marks, forms).casefold()
    return [
        all(
            # Else the list of parts was printed, not read.
            mark in prompt and f"'text': '{mark}" not in prompt and f'"text": "{mark}' not in prompt
            for mark in parts
            if mark.strip()
        )
        for parts in marks
    ]


def _rendered(
    template: Template, roles: Sequence[str], texts: Sequence[list[str]], forms: Sequence[bool]
) -> str:
    contents = [
        [{"type": "text", "text": text} for text in parts] if is_list else "\n".join(parts)
        for parts, is_list in zip(texts, forms, strict=True)
    ]
    turns = [{"role": role, "content": each} for role, each in zip(roles, contents, strict=True)]
    try:
        return template(turns)
    except Exception as error:
        # Put on one line, because a template may raise any message.
        detail = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        raise ConfigError(
            "bad_messages", f"messages: the model's chat template does not take them: {detail}"
        ) from error
