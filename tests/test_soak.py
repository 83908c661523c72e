"""The soak: its bookkeeping can see each fault, and a short run on the real pair shows none."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from aioprefill.bench import soak
from aioprefill.bench.soak_book import Book
from aioprefill.bench.soak_cases import Case
from aioprefill.bench.soak_leaks import growth
from aioprefill.sampling_params import SamplingParams
from aioprefill.wire.messages import Failed, Finished, FirstToken, Message, Token, Transferred

CASE = Case(np.array([1, 2], dtype=np.uint32), SamplingParams(), 3, True, (7, 8, 9))
FIRST = FirstToken("r", 7, 0.0, (), 2, 0, 0.0, 0.0)
SENT = Transferred("r", 1.0, 10)
GOOD: list[tuple[str, Message]] = [
    ("prefill", FIRST),
    ("prefill", SENT),
    ("decode", Token("r", 0, 7)),
    ("decode", Token("r", 1, 8)),
    ("decode", Token("r", 2, 9)),
    ("decode", Finished("r", "length", 3)),
]


def faults_of(heard: list[tuple[str, Message]], tokens: list[int] | None = None) -> dict[str, int]:
    """What a book makes of these messages, and of the tokens that were read."""
    book = Book()
    book.opened("r", CASE, handoff=True)
    for side, message in heard:
        book.heard(side, message)
    book.finished("r", [7, 8, 9] if tokens is None else tokens)
    return {kind: count for kind, count in book.faults.items() if count}


@pytest.mark.parametrize(
    ("heard", "tokens", "expected"),
    [
        (GOOD, None, {}),
        ([*GOOD, ("decode", Finished("r", "length", 3))], None, {"duplicated": 1}),
        ([*GOOD, ("decode", Failed("peer", "late", "r"))], None, {"duplicated": 1}),
        ([*GOOD, ("prefill", Failed("aborted", "late", "r"))], None, {"duplicated": 1}),
        ([GOOD[0], *GOOD], None, {"duplicated": 1}),
        ([*GOOD[:4], GOOD[3], *GOOD[4:]], None, {"duplicated": 1}),
        ([*GOOD[:3], *GOOD[4:]], None, {"lost": 1}),
        ([*GOOD[:4], ("decode", Token("r", 2, 6)), GOOD[5]], None, {"wrong_tokens": 1}),
        (GOOD, [7, 8], {"wrong_tokens": 1}),
    ],
    ids=["right", "end", "late-failure", "two-ends", "first", "token", "gap", "wrong", "short"],
)
def test_the_book_sees_each_fault(
    heard: list[tuple[str, Message]], tokens: list[int] | None, expected: dict[str, int]
) -> None:
    """Twice, missing, wrong or too few: each counts once, under its name; a right run counts nothing."""
    assert faults_of(heard, tokens) == expected


def test_growth_names_what_became_more() -> None:
    """A descriptor or thread more is a leak; memory has some slack; less is none."""
    before = {"decode_fds": 10, "decode_threads": 4, "decode_rss_mib": 100.0}
    assert growth(before, {"decode_fds": 9, "decode_threads": 4, "decode_rss_mib": 120.0}) == {}
    after = {"decode_fds": 11, "decode_threads": 5, "decode_rss_mib": 140.0}
    assert growth(before, after) == {"decode_fds": 1, "decode_threads": 1, "decode_rss_mib": 40.0}


def test_a_short_soak_on_the_real_pair_loses_doubles_and_leaks_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A minute of random load with aborts, lost clients, pauses in all modes and new weights."""
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    options = ["--minutes", "0.9", "--warmup-s", "6", "--prompts", "20", "--seed", "3"]
    summary = soak.run(parser.parse_args(options)).summary
    with capsys.disabled():
        print(f"\n  soak: {summary}")
    for key in ("lost", "duplicated", "wrong_tokens", "leaked"):
        assert summary[key] == 0, summary
    for key in ("finished", "aborted", "disconnects", "client_kills", "weight_updates", "pauses_retract"):
        assert summary[key] > 0, f"nothing was tried: {summary}"
