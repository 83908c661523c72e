"""Structured output by xgrammar: from a text to masks over a model's tokens."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar
from transformers import PreTrainedTokenizerFast

from aioprefill.engine.grammar_port import MaskWords
from aioprefill.engine.model_text import load_tokenizer
from aioprefill.errors import InvalidRequest
from aioprefill.grammar_spec import GrammarSpec

logger = logging.getLogger(__name__)

# "[12:34:56] /where/it/was/built.cc:94: "
_ORIGIN = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: ")
_LONGEST_MESSAGE = 500
_CONTROL = re.compile(rb"[\x00-\x1f]")


class XGrammarCompiler:
    """Compiles for the tokenizer of a model folder; any thread.

    `vocab_size` is the model's, which may exceed the tokenizer's: ids that no text belongs to are never
    allowed. Nor are special tokens, whatever their text, except that `eos_token_ids` are where the grammar
    may end; without any, the output ends as soon as it matches. Raises `ModelError` when the folder has no
    tokenizer.
    """

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._ends_by_itself = not eos_token_ids
        if self._ends_by_itself:
            # xgrammar wants an end token: one that the model does not have
            eos_token_ids, vocab_size = (vocab_size,), vocab_size + 1
        info = _tokenizer_info(load_tokenizer(folder), vocab_size, list(eos_token_ids))
        self._vocab_size = vocab_size
        self._compiler = _compiler(info)
        # xgrammar lets strings of bounded length have control characters, which no JSON on one line has
        self._json_compiler = _compiler(_without(info, _CONTROL))

    def compile(self, spec: GrammarSpec) -> XGrammar:
        """See `engine.grammar.Compiler.compile`."""
        try:
            compiled = self._compile(spec)
            grammar = XGrammar(compiled, self._vocab_size, ends_by_itself=self._ends_by_itself)
        except (RuntimeError, ValueError, TypeError) as err:
            raise InvalidRequest(spec.kind, f"does not compile: {_message(err)}") from err
        if not grammar.first_mask.any():
            raise InvalidRequest(spec.kind, "allows no output: no token of the model can begin it")
        return grammar

    def _compile(self, spec: GrammarSpec) -> Any:
        match spec.kind:
            case "json_schema":
                # one line with fixed spacing: free white space has no end
                return self._json_compiler.compile_json_schema(spec.text, any_whitespace=False)
            case "regex":
                return self._compiler.compile_regex(spec.text)
            case "grammar":
                return self._compiler.compile_grammar(spec.text)


class XGrammar:
    """Implements `CompiledGrammar`."""

    def __init__(self, compiled: Any, vocab_size: int, *, ends_by_itself: bool) -> None:
        self._compiled = compiled
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        bits[:vocab_size] = 1
        self._all: MaskWords = np.packbits(bits, bitorder="little").view(np.int32)
        self._ends_by_itself = ends_by_itself
        self.first_mask: MaskWords = self.matcher().mask()
        self.size: int = compiled.memory_size_bytes + self.first_mask.nbytes

    def matcher(self) -> XGrammarMatcher:
        """See `CompiledGrammar.matcher`."""
        matcher = xgrammar.GrammarMatcher(self._compiled, terminate_without_stop_token=self._ends_by_itself)
        return XGrammarMatcher(matcher, self._all)


class XGrammarMatcher:
    """Implements `Matcher`."""

    def __init__(self, matcher: Any, everything: MaskWords) -> None:
        self._matcher = matcher
        self._all = everything

    @property
    def over(self) -> bool:
        """See `Matcher.over`."""
        return bool(self._matcher.is_terminated())

    def accept(self, token_id: int) -> bool:
        """See `Matcher.accept`."""
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> MaskWords:
        """See `Matcher.mask`. Should xgrammar fail, nothing is allowed; the token that comes will not fit."""
        words: npt.NDArray[np.int32] = np.full((1, len(self._all)), -1, dtype=np.int32)
        try:
            self._matcher.fill_next_token_bitmask(words)
        except RuntimeError as err:
            logger.error("no token mask: %s", _message(err))
            words[:] = 0
        row: MaskWords = words[0] & self._all  # xgrammar leaves what lies behind the vocabulary as it is
        return row


def _tokenizer_info(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> Any:
    """What xgrammar knows of the tokens, with special ones of no text."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    found = xgrammar.TokenizerInfo.from_huggingface(fast, vocab_size=vocab_size, stop_token_ids=eos_token_ids)
    texts = list(found.decoded_vocab)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        if token.special and token_id < vocab_size:
            texts[token_id] = b""
    return _with_texts(found, texts)


def _without(info: Any, unwanted: re.Pattern[bytes]) -> Any:
    """The same, where tokens that contain something are never allowed."""
    return _with_texts(info, [b"" if unwanted.search(text) else text for text in info.decoded_vocab])


def _with_texts(info: Any, texts: list[bytes]) -> Any:
    return xgrammar.TokenizerInfo(
        texts,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=info.vocab_size,
        stop_token_ids=info.stop_token_ids,
        add_prefix_space=info.add_prefix_space,
    )


def _compiler(info: Any) -> Any:
    """One thread each, for serving goes on meanwhile; and the cache is not here, but in the book."""
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _message(err: Exception) -> str:
    text = _ORIGIN.sub("", " ".join(str(err).split()))
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"
