"""`render`: a conversation in the model's chat template, in the form that the template reads.

Some templates read a message's content as a string, some as a list of parts, some as either. One
that gets the other form leaves the text out, or prints the list, without an error. So marks are
rendered first in place of the texts: they show what reaches the prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepscope.engine.protocol.settings.config_error import ConfigError

# Longest part of a chat template's own error message that is passed on.
LONGEST_REASON = 300


def render(
    template: Callable[[list[dict[str, Any]]], str], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the prompt of a conversation.

    Args:
        template: renders turns with `role` and `content`.
        messages: turns with `role` and `content`: a text, or the texts of its parts.

    Raises:
        ConfigError: the template refuses the conversation, or leaves out the text of a message
            that is not the model's own (`bad_messages`).
    """
    roles = [message["role"] for message in messages]
    as_sent = [isinstance(message["content"], list) for message in messages]
    texts = [
        message["content"] if is_list else [message["content"]]
        for message, is_list in zip(messages, as_sent, strict=True)
    ]
    marks = [
        [f"mark{number}x{at}end" if text.strip() else text for at, text in enumerate(parts)]
        for number, parts in enumerate(texts)
    ]

    def rendered(forms: Sequence[bool], texts: Sequence[list[str]]) -> str:
        contents = (
            [{"type": "text", "text": text} for text in parts] if is_list else "\n".join(parts)
            for parts, is_list in zip(texts, forms, strict=True)
        )
        turns = zip(roles, contents, strict=True)
        try:
            return template([{"role": role, "content": content} for role, content in turns])
        except Exception as error:
            # Put on one line, because a template may raise any message.
            detail = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
            raise ConfigError(
                "bad_messages", f"messages: the model's chat template does not take them: {detail}"
            ) from error

    tried: list[tuple[Sequence[bool], list[bool]]] = []  # forms, and which texts reach the prompt

    def reaches_all(forms: Sequence[bool]) -> bool:
        prompt = rendered(forms, marks).casefold()
        shown = [all(_is_read(mark, prompt) for mark in parts) for parts in marks]
        tried.append((forms, shown))
        return all(shown)

    refusal: ConfigError | None = None
    for forms in (as_sent, [False] * len(texts), [True] * len(texts)):
        try:
            if reaches_all(forms):
                break
        except ConfigError as error:
            refusal = refusal or error
    else:
        if refusal is not None and not tried:
            raise refusal
        # No form does for all. Give each message the one in which it is shown.
        reaches_all(
            [
                next((forms[at] for forms, shown in tried if shown[at]), form)
                for at, form in enumerate(as_sent)
            ]
        )
    chosen, shown = tried[-1]
    for number, (role, is_shown) in enumerate(zip(roles, shown, strict=True)):
        # A template may leave out what the model itself said earlier.
        if not is_shown and role != "assistant":
            raise ConfigError(
                "bad_messages",
                f"messages: the model's chat template leaves out the text of messages[{number}] "
                f"(role {role[:40]!r}); send a conversation without it, or a prompt",
            )
    return rendered(chosen, texts)


def _is_read(mark: str, prompt: str) -> bool:
    """Whether the template wrote a text as it is, and not in a list of parts that it printed."""
    printed = f"'text': '{mark}", f'"text": "{mark}'
    return not mark.strip() or (mark in prompt and not any(each in prompt for each in printed))
