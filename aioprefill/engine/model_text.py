"""Text to token ids and back, with the tokenizer of a model folder. Imports no torch.

Only clients and frontends need this: schedulers and engines speak of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioprefill.errors import ModelError


class ModelText:
    """The tokenizer of a model. Raises `ModelError` where the folder has none that can be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = load_tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that the model shall continue; begins as the model wants texts to begin."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that ends where the assistant's answer begins.

        `messages` have "role" and "content". Raises `ModelError` when the model has no chat template, or
        the template refuses the conversation.
        """
        config = _read_json(self._folder / "tokenizer_config.json")
        template = _chat_template(self._folder, config)
        from transformers.utils.chat_template_utils import render_jinja_template

        words = {name: _token_text(config.get(name)) for name in config if name.endswith("_token")}
        try:
            rendered, _ = render_jinja_template(
                [list(messages)], chat_template=template, add_generation_prompt=True, **words
            )
        except Exception as err:  # a template raises what it likes
            raise ModelError(f"model folder {self._folder}: its chat template failed: {err}") from err
        ids: list[int] = self._tokenizer.encode(rendered[0], add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """Decoding of tokens that come one by one."""
        return TextStream(self._tokenizer)


class TextStream:
    """Gives each piece of text as soon as no later token can change it."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty in the middle of a character."""
        self._ids.append(token_id)
        piece: str = self._decoder.step(self._tokenizer, token_id) or ""
        self._given += piece
        return piece

    def finish(self) -> str:
        """What is left at the end: a character that was cut off, as a replacement character."""
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole.removeprefix(self._given) if whole.startswith(self._given) else ""


def load_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model folder. Raises `ModelError` when none can be read."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer  # older formats; slow to import

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as err:  # tokenizers raises bare Exception
        raise ModelError(f"model folder {folder}: no tokenizer can be read from it: {err}") from err


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as err:
        raise ModelError(f"model file {path} cannot be read: {err}") from err


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    if not isinstance(found, str):
        raise ModelError(f"model folder {folder}: the model has no chat template; leave out --chat")
    return found


def _token_text(token: Any) -> str | None:
    """A special token as text; older files have it as an object."""
    return token.get("content") if isinstance(token, dict) else token
