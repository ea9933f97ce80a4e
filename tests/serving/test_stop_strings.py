"""Text ends at the first stop string, however it is cut into tokens; no part of it is sent."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.engine.protocol.sampling_params import SamplingParams
from stepscope.engine.scheduling.request import Request
from stepscope.engine.text.text_stream import StopText
from stepscope.engine.text.tokenizer import TextStream

EOS = 9_999
# Tokens of several characters, and every byte: so a character may come in parts.
PIECES = ("the", " cat", "END", "EN", "D", "\n\n", "ab", "aba", "世", "é", " ", "🧑‍🚀")
FIRST_PIECE = 256


def decode(token_ids: Sequence[int]) -> str:
    spelled = b"".join(
        bytes([token_id]) if token_id < FIRST_PIECE else PIECES[token_id - FIRST_PIECE].encode()
        for token_id in token_ids
        if token_id != EOS
    )
    return spelled.decode(errors="replace")


def tokens(*pieces: str) -> list[int]:
    """Each piece as one token if there is one, else as its bytes."""
    known = {piece: [FIRST_PIECE + place] for place, piece in enumerate(PIECES)} | {"EOS": [EOS]}
    return [token_id for piece in pieces for token_id in known.get(piece, piece.encode())]


def request(stops: Sequence[str] = (), **sampling: object) -> Request:
    params = SamplingParams(stop=tuple(stops), **{"max_tokens": 1000, **sampling})  # type: ignore[arg-type]
    stop_text = StopText(TextStream(decode), stops, params.include_stop)
    ends = frozenset({EOS})
    return Request(0, [1, 2], params, arrival_ns=0, eos_token_ids=ends, stop_text=stop_text)


def generated(made: Request, token_ids: Sequence[int]) -> tuple[list[str], str | None]:
    """The piece of text of each token, and why the request ended."""
    pieces = []
    for token_id in token_ids:
        made.token_ids.append(token_id)
        reason = made.finish_reason_after(token_id)
        pieces.append(made.stop_text.take())
        if reason is not None:
            return pieces, reason
    return pieces, None


def first_stop(text: str, stops: Sequence[str], armed_from: int = 0) -> tuple[int, str] | None:
    """Where the first completed stop string begins, found by trying every end of the text."""
    for end in range(armed_from + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


kinds = [tokens(*PIECES), list(b"abEND"), list("世é€".encode()), range(256)]
token_lists = st.lists(st.one_of(*map(st.sampled_from, kinds)), max_size=40)
stop_texts = st.text("abEND", min_size=1, max_size=4) | st.sampled_from(
    ["世", "é", "END\n", "the cat", "€a", "�", "\n\n", "ba"]
)
stop_lists = st.lists(stop_texts, min_size=1, max_size=4)


@given(token_lists, stop_lists, st.booleans())
def test_text_pieces_join_to_the_text_cut_at_its_first_stop_string(
    token_ids: list[int], stops: list[str], include_stop: bool
) -> None:
    made = request(stops, max_tokens=max(1, len(token_ids)), include_stop=include_stop)
    pieces, reason = generated(made, token_ids)
    text = decode(token_ids)
    found = first_stop(text, stops)
    if found is None:
        assert "".join(pieces) == text
        assert reason == ("length" if token_ids else None)
        assert made.stop is None
        return
    at, stop = found
    assert "".join(pieces) == text[: at + len(stop) if include_stop else at]
    assert (reason, made.stop) == ("stop", stop)
    # Not a token later than needed, unless it ends in a character that only the end makes certain.
    if "�" not in text:
        assert first_stop(decode(token_ids[: len(pieces) - 1]).rstrip("�"), stops) is None


@given(token_lists, stop_lists, st.integers(0, 10))
def test_stop_strings_completed_before_min_tokens_do_not_end_the_request(
    token_ids: list[int], stops: list[str], min_tokens: int
) -> None:
    stream = TextStream(decode)
    certain_pieces = [stream.push([token_id]) for token_id in token_ids]
    certain = "".join(certain_pieces)
    held_back = len("".join(certain_pieces[:min_tokens]))
    made = request(stops, max_tokens=1000, min_tokens=min_tokens)
    pieces, reason = generated(made, token_ids)
    found = first_stop(certain, stops, armed_from=held_back)
    if found is None:
        assert reason is None
        made.stop_text.finish(armed=False)
        assert "".join(pieces) + made.stop_text.take() == decode(token_ids)
    else:
        assert reason == "stop"
        assert "".join(pieces) == certain[: found[0]]
        assert len(pieces) > min_tokens


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "stop"),
    [
        (["the", " cat", "END", "the"], ["END"], ["the", " cat", ""], "END"),
        (["ab", "EN", "D", "ab"], ["END"], ["ab", "", ""], "END"),
        (["ab", "EN", "ab"], ["END"], ["ab", "", "ENab"], None),
        (["the", " cat"], ["e c"], ["th", ""], "e c"),  # begins and ends inside a token
        (["世", "é"], ["世é"], ["", ""], "世é"),
        (["a", "a", "a", "b"], ["aab"], ["", "", "a", ""], "aab"),
        (["ab", "aba"], ["abab", "ba"], ["", "a"], "ba"),  # complete first
        (["the cat"], ["cat", "e cat"], [*"th", "", "", "", "", ""], "e cat"),  # begins first
        (["END"], ["N", "END"], ["E"], "N"),
        (["a", "b", "c", "x"], ["abcd", "bc"], ["", "", "a"], "bc"),
        (["ab", "EN", "EOS"], ["END"], ["ab", "", "EN"], None),  # released at the end
    ],
)
def test_text_that_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str], expected: list[str], stop: str | None
) -> None:
    made = request(stops)
    given_out, _ = generated(made, tokens(*pieces))
    assert given_out == expected
    assert made.stop == stop


@pytest.mark.parametrize(("include_stop", "text"), [(False, "the"), (True, "the cat")])
def test_the_text_of_a_stop_token_is_included_only_on_request(
    include_stop: bool, text: str
) -> None:
    (cat,) = tokens(" cat")
    made = request(["END"], stop_token_ids=(cat,), include_stop=include_stop)
    pieces, reason = generated(made, [*tokens("the"), cat])
    assert ("".join(pieces), reason, made.stop) == (text, "stop", cat)


def test_the_end_of_sequence_token_is_named_as_stop_only_with_ignore_eos() -> None:
    plain = request(["END"], stop_token_ids=(EOS,))
    assert generated(plain, [EOS]) == ([""], "stop")
    assert plain.stop is None
    ignoring = request(["END"], stop_token_ids=(EOS,), ignore_eos=True)
    assert generated(ignoring, [EOS]) == ([""], "stop")
    assert ignoring.stop == EOS
