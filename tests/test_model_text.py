"""Tokenizing and incremental decoding with the tokenizer of a model folder."""

from __future__ import annotations

import json
import shutil

import pytest

from aioprefill.engine.model_text import ModelText
from aioprefill.errors import ModelError

TEXT = "Über 日本語 🙂👩‍👩‍👧, 12345\n\n  done."


@pytest.fixture(scope="module")
def text(embedded_model):
    return ModelText(embedded_model.path)


@pytest.fixture
def folder(embedded_model, tmp_path):
    """A copy of the tokenizer's files, to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(embedded_model.path / name, tmp_path)
    return tmp_path


def test_round_trip(text):
    """Text comes back from its ids; the model's tokens for a well-known prompt are the known ones."""
    assert text.decode(text.encode(TEXT)) == TEXT
    assert text.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_stream_gives_whole_characters(text):
    """Pieces add up to the text, and none has half a character although characters span tokens."""
    stream, ids = text.stream(), text.encode(TEXT)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) == TEXT and stream.finish() == ""
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some token did end within a character


def test_stream_that_ends_within_a_character(text):
    """At every cut, pieces and rest add up to what decoding all at once gives."""
    ids = text.encode(TEXT)
    for end in range(len(ids) + 1):
        stream = text.stream()
        pieces = "".join(map(stream.push, ids[:end]))
        assert pieces + stream.finish() == text.decode(ids[:end])


def test_special_tokens_are_not_shown(text):
    """The end of a turn is no text."""
    stream = text.stream()
    assert [stream.push(i) for i in (504, 2)] == ["The", ""] and stream.finish() == ""


def test_chat_template(text):
    """A conversation is put as the model was trained on it, up to where the answer begins."""
    ids = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and text.decode(ids[-3:]) == "assistant\n"
    assert text.decode(ids).endswith("user\nHi\nassistant\n")


def test_chat_template_in_tokenizer_config(folder):
    """Older folders have one or several templates in tokenizer_config.json, and tokens as objects."""
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["bos_token"] = {"content": "<|im_start|>"}
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    for given in (template, [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]):
        path.write_text(json.dumps({**config, "chat_template": given}))
        found = ModelText(folder)
        assert found.encode_chat([{"role": "user", "content": "Hi"}]) == found.encode("<|im_start|>Hi")


def test_chat_errors(folder):
    """No template, one that refuses, and a damaged file are errors that name the folder."""
    text = ModelText(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ModelError, match="its chat template failed: no system role"):
        text.encode_chat([{"role": "user", "content": "Hi"}])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template; leave out --chat"):
        text.encode_chat([{"role": "user", "content": "Hi"}])
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be read"):
        text.encode_chat([{"role": "user", "content": "Hi"}])


def test_damaged_tokenizer(folder):
    """A tokenizer that cannot be read is an error, not a crash."""
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer can be read"):
        ModelText(folder)
