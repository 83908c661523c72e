"""What can be asked of an output, and the book of compiled grammars. Pure."""

from __future__ import annotations

import json

import pytest

from aioprefill.engine.grammar_book import GrammarBook, GrammarLimits
from aioprefill.engine.grammar_port import Outcome
from aioprefill.errors import InvalidRequest, RequestTimeout
from aioprefill.grammar_spec import MAX_GRAMMAR_BYTES, MAX_SCHEMA_DEPTH, GrammarSpec, one_grammar
from aioprefill.testing.grammars import FakeGrammar


def spec(text: str) -> GrammarSpec:
    """A regular expression."""
    return GrammarSpec("regex", text)


def nested(depth: int) -> str:
    """A schema of lists in lists."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GrammarSpec("regex", " \n"), "regex: is empty"),
        (GrammarSpec("grammar", "x" * (MAX_GRAMMAR_BYTES + 1)), "grammar: has 65,537 bytes"),
        (GrammarSpec("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), "regex: has 65,538 bytes"),
        (GrammarSpec("regex", "a\0b"), "regex: contains a zero byte"),
        (GrammarSpec("regex", "\ud800"), "regex: is no valid text"),
        (GrammarSpec("json_schema", "{"), "json_schema: is no JSON"),
        (GrammarSpec("json_schema", "[1]"), "json_schema: must be a JSON object, got list"),
        (GrammarSpec("json_schema", nested(MAX_SCHEMA_DEPTH + 1)), "json_schema: nests deeper than 64"),
        (GrammarSpec("json_schema", nested(20_000)), "json_schema: nests deeper than 64"),
    ],
)
def test_what_is_wrong_at_a_glance_is_refused_by_the_field_s_name(bad: GrammarSpec, message: str) -> None:
    """Without compiling anything; sizes are in bytes."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        bad.validate()
    assert caught.value.field == bad.kind


def test_what_may_be_a_grammar_passes() -> None:
    """Also true, and a schema that nests as deep as is allowed."""
    for kind, text in (
        ("regex", "(a"),
        ("grammar", 'root ::= "x"'),
        ("json_schema", "true"),
        ("json_schema", json.dumps({"type": "object", "properties": {"a": {"enum": [1, [2]]}}})),
        ("json_schema", nested(MAX_SCHEMA_DEPTH)),
    ):
        GrammarSpec(kind, text).validate()  # type: ignore[arg-type]


def test_one_grammar_at_most() -> None:
    """Two exclude each other, none is none."""
    assert one_grammar() is None
    assert one_grammar(regex="a") == GrammarSpec("regex", "a")
    with pytest.raises(InvalidRequest, match="json_schema and grammar exclude each other"):
        one_grammar(json_schema="{}", grammar="root ::= [a]")
    with pytest.raises(InvalidRequest, match="json_schema: is no JSON"):
        one_grammar(json_schema="nope")


class Ears:
    """Waiters that remember what they heard."""

    def __init__(self) -> None:
        self.heard: list[Outcome] = []

    def __call__(self, outcome: Outcome) -> None:
        self.heard.append(outcome)


def test_a_grammar_is_compiled_once_for_all_that_ask() -> None:
    """Those who ask while it is queued and while it is compiled; later ones get it at once."""
    book, first, second, third = GrammarBook(), Ears(), Ears(), Ears()
    assert book.ask(spec("a"), first) is None and book.ask(spec("a"), second) is None
    assert book.next_job() == spec("a") and book.next_job() is None
    assert book.ask(spec("a"), third) is None
    grammar = FakeGrammar(spec("a"))
    assert book.compiled(spec("a"), grammar) == [first, second, third]
    assert book.ask(spec("a"), first) is grammar
    assert book.idle and book.kept == 1 and "kept=1" in repr(book)


def test_errors_are_not_kept() -> None:
    """The next one who asks has it tried again."""
    book, ears = GrammarBook(), Ears()
    book.ask(spec("a"), ears)
    book.next_job()
    assert book.compiled(spec("a"), InvalidRequest("regex", "no")) == [ears]
    assert book.kept == 0 and book.ask(spec("a"), ears) is None and book.next_job() == spec("a")


def test_compilations_at_a_time_are_bounded_and_first_come_first_served() -> None:
    """The third begins when one has ended."""
    book = GrammarBook(GrammarLimits(running=2))
    for text in "abc":
        book.ask(spec(text), Ears())
    assert [book.next_job() for _ in range(3)] == [spec("a"), spec("b"), None]
    book.compiled(spec("b"), FakeGrammar(spec("b")))
    assert book.next_job() == spec("c") and not book.idle


def test_what_is_kept_is_bounded_by_number_and_the_longest_unused_goes() -> None:
    """Being asked for counts as use."""
    book = GrammarBook(GrammarLimits(entries=2))
    for text in "ab":
        book.compiled(spec(text), FakeGrammar(spec(text)))
    assert book.ask(spec("a"), Ears()) is not None
    book.compiled(spec("c"), FakeGrammar(spec("c")))
    assert book.kept == 2 and book.size == 200
    assert book.ask(spec("a"), Ears()) is not None and book.ask(spec("b"), Ears()) is None


def test_what_is_kept_is_bounded_by_bytes_also_by_one_that_is_too_large_alone() -> None:
    """The large one is given to those who asked, and not kept."""
    book, ears = GrammarBook(GrammarLimits(size=250)), Ears()
    for text in "abc":
        book.compiled(spec(text), FakeGrammar(spec(text)))
    assert book.kept == 2 and book.size == 200
    book.ask(spec("huge"), ears)
    book.next_job()
    assert book.compiled(spec("huge"), FakeGrammar(spec("huge"), size=1000)) == [ears]
    assert book.kept == 0 and book.size == 0


def test_one_compiled_twice_is_kept_once() -> None:
    """A late one may come back after it was compiled anew; its bytes count once."""
    book = GrammarBook()
    for size in (100, 70):
        book.compiled(spec("a"), FakeGrammar(spec("a"), size=size))
    assert book.kept == 1 and book.size == 70


def test_one_past_its_time_makes_room_and_is_kept_when_it_comes_after_all() -> None:
    """Its waiters are told once; who asks meanwhile is refused; another grammar goes on."""
    book, ears = GrammarBook(GrammarLimits(running=1)), Ears()
    book.ask(spec("slow"), ears)
    book.ask(spec("next"), ears)
    assert book.next_job() == spec("slow") and book.next_job() is None
    assert book.expired(spec("slow")) == [ears]
    assert book.next_job() == spec("next")
    assert isinstance(book.ask(spec("slow"), ears), RequestTimeout)
    grammar = FakeGrammar(spec("slow"))
    assert book.compiled(spec("slow"), grammar) == []
    assert book.ask(spec("slow"), ears) is grammar


def test_one_that_waits_past_its_time_is_not_begun() -> None:
    """And one that is unknown tells nobody."""
    book, ears = GrammarBook(), Ears()
    book.ask(spec("a"), ears)
    assert book.expired(spec("a")) == [ears] and book.next_job() is None and book.expired(spec("a")) == []


def test_late_ones_are_bounded() -> None:
    """Beyond, nothing new is begun until one of them ends; what is kept is still given."""
    book = GrammarBook(GrammarLimits(late=1))
    book.compiled(spec("known"), FakeGrammar(spec("known")))
    book.ask(spec("slow"), Ears())
    book.next_job()
    book.expired(spec("slow"))
    refused = book.ask(spec("new"), Ears())
    assert isinstance(refused, RequestTimeout) and "1 other grammars are past their limit" in str(refused)
    assert book.ask(spec("known"), Ears()) is not None
    book.compiled(spec("slow"), InvalidRequest("regex", "no"))
    assert book.ask(spec("new"), Ears()) is None
    book.drop_queued()
    assert book.next_job() is None
