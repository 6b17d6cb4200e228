"""Text token by token: stop texts, what is held back for them, and characters of several tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocmega.engine.text import AnswerText


class Bytes:
    """A tokenizer of bytes: token n is byte n, and unfinished characters show as such."""

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def pushed(text: str, **options) -> AnswerText:
    answer = AnswerText(Bytes(), **options)
    for byte in text.encode():
        answer.push(byte)
    return answer


def test_characters_come_whole():
    answer = AnswerText(Bytes())
    seen = []
    for byte in "aé€b".encode():
        answer.push(byte)
        seen.append(answer.text)
    assert seen == ["a", "a", "aé", "aé", "aé", "aé€", "aé€b"]


def test_an_unfinished_character_comes_at_the_end():
    answer = AnswerText(Bytes())
    for byte in "a€".encode()[:-1]:
        answer.push(byte)
    assert answer.text == "a"
    answer.end()
    assert answer.text == "a\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one two")])
def test_a_stop_text_ends_the_answer(include, text):
    answer = pushed("one two three", stop=["three", "two"], include_stop=include)
    assert answer.stopped_by == "two"
    assert answer.text == answer.settled == text


def test_the_first_of_several_stop_texts_counts():
    answer = AnswerText(
        type("Words", (), {"decode": lambda self, tokens: "ab cd ef" * len(tokens)})(), ["ef", "b", "cd"]
    )
    answer.push(0)
    assert (answer.text, answer.stopped_by) == ("a", "b")


def test_what_may_become_a_stop_text_is_held_back():
    assert pushed("one tw", stop=["two"]).settled == "one "
    assert pushed("one ttw", stop=["two", "wo"]).settled == "one t"
    assert pushed("one tx", stop=["two"]).settled == "one tx"


@given(st.text("ab<>é", max_size=30), st.lists(st.text("ab<>é", min_size=1, max_size=4), max_size=3))
def test_what_is_settled_stays_and_ends_as_the_whole_text_would(text, stops):
    answer, before = AnswerText(Bytes(), stops), ""
    for byte in text.encode():
        answer.push(byte)
        assert answer.settled.startswith(before)
        before = answer.settled
        if answer.stopped_by is not None:
            break
    answer.end()
    # The end of the first stop text to be complete; of those complete at once the one that begins first.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert answer.text == (text[: min(ends)[1]] if ends else text)
    assert answer.text.startswith(before)
