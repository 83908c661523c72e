"""Structured output on the command line and over the wire's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aioprefill.cli.app import app
from aioprefill.cli.grammar_text import read_grammar
from aioprefill.errors import InvalidRequest
from aioprefill.grammar_spec import MAX_GRAMMAR_BYTES, GrammarSpec


def test_an_option_is_a_file_or_the_text_itself(tmp_path: Path) -> None:
    """Texts that no file can be called are texts."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}', encoding="utf-8")
    assert read_grammar("json_schema", str(file)) == '{"type": "string"}'
    for text in ('{"a": 1}', 'root ::= "é"', "x" * 10_000, "a\0b", str(tmp_path)):
        assert read_grammar("grammar", text) == text
    assert read_grammar("grammar", None) is None


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """Missing, too large, not UTF-8."""
    binary, large = tmp_path / "a.ebnf", tmp_path / "b.ebnf"
    binary.write_bytes(b"\xff\xfe")
    large.write_text("x" * (MAX_GRAMMAR_BYTES + 1))
    for path, message in (
        (binary, "is not UTF-8"),
        (large, "more than 65,536 bytes"),
        (tmp_path / "c.json", "there is no file"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            read_grammar("grammar", str(path))
        assert caught.value.field == "grammar" and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "nope"], "json_schema: is no JSON"),
        (["--json-schema", "missing.json"], "json_schema: there is no file missing.json"),
        (["--regex", ""], "regex: is empty"),
        (["--regex", "a", "--grammar", 'root ::= "a"'], "regex and grammar exclude each other"),
    ],
)
def test_bad_options_end_before_anything_is_sent(options: list[str], message: str) -> None:
    """With the field's name."""
    result = CliRunner().invoke(app, ["generate", "x", *options])
    text = " ".join((result.output + str(result.exception or "")).split())
    assert result.exit_code != 0 and message in text


def test_generate_sends_the_grammar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a file, as part of the job."""
    jobs: list[Any] = []

    async def take(config: object, job: Any) -> int:
        jobs.append(job)
        return 0

    monkeypatch.setattr("aioprefill.cli.generate.run_generate", take)
    file = tmp_path / "g.ebnf"
    file.write_text('root ::= "a"')
    assert CliRunner().invoke(app, ["generate", "x", "--grammar", str(file)]).exit_code == 0
    assert CliRunner().invoke(app, ["generate", "x"]).exit_code == 0
    assert [job.grammar for job in jobs] == [GrammarSpec("grammar", 'root ::= "a"'), None]
