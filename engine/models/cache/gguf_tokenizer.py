"""Converts the byte-level BPE tokenizer of a GGUF file into files that transformers reads."""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from stepscope.engine.protocol.settings.knobs import ConfigError

_PREFIX = "tokenizer.ggml."
_END_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>")


class _TokenType(IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer and its chat template, if there is one, to `folder`.

    Raises:
        ConfigError: the tokenizer is not one that we can convert.
        KeyError: a field is missing.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    kind, splits = fields[f"{_PREFIX}model"], fields.get(f"{_PREFIX}pre")
    if kind != "gpt2":
        _refuse(f"its tokenizer is of the kind {kind!r}; only 'gpt2' is converted")
    tokens: list[str] = fields[f"{_PREFIX}tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields[f"{_PREFIX}merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(splits)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields[f"{_PREFIX}token_type"], strict=True):
        if token_type in (_TokenType.CONTROL, _TokenType.USER_DEFINED):
            is_special = token_type == _TokenType.CONTROL
            added = [AddedToken(token, special=is_special, normalized=False)]
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)
    special = {
        name: tokens[fields[key]]
        for name, key in (
            ("bos_token", f"{_PREFIX}bos_token_id"),
            ("eos_token", f"{_PREFIX}eos_token_id"),
            ("unk_token", f"{_PREFIX}unknown_token_id"),
            ("pad_token", f"{_PREFIX}padding_token_id"),
        )
        if key in fields
    }
    if fields.get(f"{_PREFIX}add_bos_token", False):
        _begin_with(tokenizer, special["bos_token"], fields[f"{_PREFIX}bos_token_id"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=fields.get("tokenizer.chat_template"),
        **special,
    ).save_pretrained(folder)


def end_tokens(fields: Mapping[str, Any]) -> list[int]:
    """Return every token that ends a text or a turn: named ones, and control tokens by text."""
    named = (fields.get(f"{_PREFIX}{name}_token_id") for name in ("eos", "eot", "eom"))
    found = {token_id for token_id in named if token_id is not None}
    for token_id, text in enumerate(fields[f"{_PREFIX}tokens"]):
        is_control = fields[f"{_PREFIX}token_type"][token_id] == _TokenType.CONTROL
        if is_control and text in _END_TEXTS:
            found.add(token_id)
    return sorted(found)


def _pre_tokenizer(splits: str | None) -> Any:
    from tokenizers import pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if splits is None:
        _refuse(
            f"it does not say how its tokenizer splits text ({_PREFIX}pre): convert the model "
            "again with a newer llama.cpp"
        )
    if splits == "gpt-2":
        return words
    if splits != "smollm":
        _refuse(f"its tokenizer splits text by {splits!r}; only 'gpt-2' and 'smollm' are converted")
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _refuse(reason: str) -> NoReturn:
    raise ConfigError("gguf_tokenizer", reason)


def _begin_with(tokenizer: Any, token: str, token_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, token_id)]
    )
