"""Masks in the sampler, and xgrammar behind its port: threads, errors, vocabularies."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from aioprefill.engine.batch import SampleRow
from aioprefill.engine.grammar import Grammars
from aioprefill.engine.grammar_port import CompiledGrammar, MaskWords, Outcome
from aioprefill.engine.grammar_xgrammar import XGrammarCompiler
from aioprefill.engine.sampling import Sampler
from aioprefill.errors import InvalidRequest, ModelError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.grammars import FakeCompiler

GREEDY = SamplingParams()
VOCABULARY = 512
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]
EOS = 256


def tokens_of(mask: MaskWords) -> list[int]:
    """Ids that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def mask_of(tokens: list[int], vocabulary: int = 70) -> MaskWords:
    """A mask that allows these."""
    bits = np.zeros(-(-vocabulary // 32) * 32, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


# Sampling


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_k=40),
        SamplingParams(temperature=5.0, seed=1, top_p=0.99),
        SamplingParams(temperature=1.0, seed=1, top_k=400, top_p=0.9),
    ],
)
def test_a_masked_row_gives_allowed_tokens_only_and_others_what_they_give_alone(
    params: SamplingParams, device: str
) -> None:
    """However it is sampled; log-probabilities are those of the unmasked distribution."""
    logits = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.to(device)

    def move(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    allowed = [3, 31, 32, 63, 64, 69]
    plain = [SampleRow(i, i, params) for i in range(40)]
    mixed = [SampleRow(i, i, params, (lambda: mask_of(allowed)) if i % 2 else None) for i in range(40)]
    alone = Sampler(plain).tokens(Sampler(plain).sample(logits.clone(), move))
    sampler = Sampler(mixed)
    together = sampler.tokens(sampler.sample(logits, move))
    logprobs = logits.log_softmax(-1)
    for i, (token, other) in enumerate(zip(together, alone, strict=True)):
        if i % 2:
            assert token.token_id in allowed
            assert token.logprob == pytest.approx(float(logprobs[i, token.token_id]), abs=1e-5)
        else:
            assert token == other
    if params == GREEDY:
        best = [allowed[int(row[allowed].argmax())] for row in logits[1::2]]
        assert [token.token_id for token in together[1::2]] == best
    else:
        assert len({token.token_id for token in together[1::2]}) > 1, "still random"


def test_a_mask_that_allows_nothing_is_not_applied() -> None:
    """NaN would be taken for a broken device, and fail the whole batch."""
    logits = torch.randn(1, 70)
    row = SampleRow(0, 0, GREEDY, lambda: mask_of([]))
    (token,) = Sampler([row]).tokens(Sampler([row]).sample(logits, torch.from_numpy))
    assert token.token_id == int(logits.argmax()) and np.isfinite(token.logprob)


def test_masks_are_asked_for_when_the_batch_is_sampled_not_before() -> None:
    """That is on the stream thread, where they cost the loop nothing."""
    asked: list[int] = []

    def mask() -> MaskWords:
        asked.append(1)
        return mask_of([5])

    sampler = Sampler([SampleRow(0, 0, GREEDY, mask)])
    assert asked == []
    sampler.sample(torch.randn(1, 70), torch.from_numpy)
    assert asked == [1]


# xgrammar


@pytest.fixture(scope="module")
def compiler(tiny_llama: Path) -> XGrammarCompiler:
    """For the tiny model: 257 tokens in its tokenizer, 512 in its vocabulary."""
    return XGrammarCompiler(tiny_llama, vocab_size=VOCABULARY, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    """One token per byte."""
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))


def test_masks_follow_the_output_and_end_where_the_grammar_does(
    compiler: XGrammarCompiler, tokenizer: Tokenizer
) -> None:
    """The end token is allowed where the grammar accepts, and nowhere else; ids without text never are."""
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    grammar = compiler.compile(GrammarSpec("regex", "ab?|c"))
    assert tokens_of(grammar.first_mask) == sorted([a, c]) and grammar.first_mask.shape == (16,)
    matcher = grammar.matcher()
    assert not matcher.accept(b) and not matcher.accept(EOS) and not matcher.accept(400)
    assert matcher.accept(a) and not matcher.over
    assert tokens_of(matcher.mask()) == sorted([b, EOS])
    assert matcher.accept(b) and tokens_of(matcher.mask()) == [EOS]
    assert matcher.accept(EOS) and matcher.over
    assert tokens_of(grammar.matcher().mask()) == sorted([a, c]), "matchers are independent"
    assert max(tokens_of(compiler.compile(GrammarSpec("regex", "(.|\n)*")).first_mask)) == EOS


def test_a_model_without_an_end_token_ends_as_soon_as_it_matches(
    tiny_llama: Path, tokenizer: Tokenizer
) -> None:
    """There is nothing else that could tell."""
    compiler = XGrammarCompiler(tiny_llama, vocab_size=VOCABULARY, eos_token_ids=())
    matcher = compiler.compile(GrammarSpec("regex", "[ab]{2,5}")).matcher()
    a = tokenizer.token_to_id("a")
    assert matcher.accept(a) and not matcher.over and matcher.accept(a) and matcher.over
    with pytest.raises(InvalidRequest, match="regex: allows no output"):
        compiler.compile(GrammarSpec("regex", ""))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "regex: does not compile: Regex parsing error at position 3: The parenthesis"),
        (
            "grammar",
            "root ::= x",
            'grammar: does not compile: EBNF parser error at line 1, column 10: Rule "x"',
        ),
        ("grammar", 'a ::= "x"', 'grammar: does not compile: .*root rule with name "root" is not found'),
        ("json_schema", '{"type": "nope"}', 'json_schema: does not compile: Unsupported type "nope"'),
        ("json_schema", '{"$ref": "#/x"}', "json_schema: does not compile: Cannot find field"),
        ("json_schema", "false", "json_schema: does not compile: .*cannot accept any value"),
    ],
)
def test_what_does_not_compile_is_refused_by_the_field_s_name_with_xgrammar_s_words(
    compiler: XGrammarCompiler, kind: str, text: str, message: str
) -> None:
    """Without the place in xgrammar's source, which tells a user nothing."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        compiler.compile(GrammarSpec(kind, text))  # type: ignore[arg-type]
    assert caught.value.field == kind


def test_json_has_no_control_characters_in_strings_of_bounded_length_either(
    compiler: XGrammarCompiler, tokenizer: Tokenizer
) -> None:
    """xgrammar's own rule for such strings allows them; a regular expression still may."""
    ids = {tokenizer.encode(chr(code)).ids[0] for code in range(32)}
    matcher = compiler.compile(GrammarSpec("json_schema", '{"type": "string", "maxLength": 6}')).matcher()
    assert matcher.accept(tokenizer.token_to_id('"'))
    allowed = set(tokens_of(matcher.mask()))
    assert len(ids) == 32 and not ids & allowed and tokenizer.token_to_id("a") in allowed
    anything = compiler.compile(GrammarSpec("regex", r"[^a]"))
    assert ids <= set(tokens_of(anything.first_mask))


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    """A grammar that matches the text of one does not allow the token itself, which users never see."""
    tokenizer = Tokenizer.from_str(
        '{"version":"1.0","added_tokens":[{"id":2,"content":"<x>","single_word":false,"lstrip":false,'
        '"rstrip":false,"normalized":false,"special":true}],"normalizer":null,"pre_tokenizer":null,'
        '"post_processor":null,"decoder":{"type":"Fuse"},"model":{"type":"WordLevel","vocab":{"a":0,"<y>":1},"unk_token":"a"}}'
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = XGrammarCompiler(tmp_path, vocab_size=4, eos_token_ids=(3,))
    assert tokens_of(compiler.compile(GrammarSpec("regex", "[a-z<>]+")).first_mask) == [0, 1]


# Threads


async def ask(grammars: Grammars, spec: GrammarSpec) -> Outcome:
    """Its outcome, now or later."""
    told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    outcome = grammars.ask(spec, told.set_result)
    return await asyncio.wait_for(told, 20) if outcome is None else outcome


@pytest.mark.asyncio
async def test_compiling_does_not_block_the_loop(tiny_llama: Path) -> None:
    """While one takes some tenths of a second, the loop turns; when it is known, asking costs nothing."""
    grammars = Grammars.for_model(tiny_llama, vocab_size=VOCABULARY, eos_token_ids=(EOS,), timeout_s=20)
    await ask(grammars, GrammarSpec("regex", "a"))
    generator = np.random.default_rng(1)
    words = ["".join(generator.choice(list("abcdefgh"), 8)) for _ in range(6000)]
    spec = GrammarSpec("regex", "|".join(words))
    asked = asyncio.ensure_future(ask(grammars, spec))
    gaps, last = [], time.perf_counter()
    while not asked.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    outcome = await asked
    assert not isinstance(outcome, Exception) and outcome.size > 1000
    assert len(gaps) > 10 and max(gaps) < 0.5 * sum(gaps), f"{len(gaps)} turns, {max(gaps)} of {sum(gaps)} s"
    assert grammars.ask(spec, lambda _: None) is outcome
    await grammars.aclose()
    assert not [thread for thread in threading.enumerate() if thread.name == "aioprefill-grammar"]


@pytest.mark.asyncio
async def test_without_xgrammar_a_request_is_told_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else needs it: the module that does is imported with the first grammar."""
    monkeypatch.delitem(sys.modules, "aioprefill.engine.grammar_xgrammar", raising=False)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    grammars = Grammars.for_model(tiny_llama, vocab_size=VOCABULARY, eos_token_ids=(EOS,), timeout_s=20)
    outcome = await ask(grammars, GrammarSpec("regex", "a"))
    assert isinstance(outcome, InvalidRequest) and "regex: structured output needs xgrammar" in str(outcome)
    await grammars.aclose()


@pytest.mark.asyncio
async def test_a_folder_without_a_tokenizer_is_told_to_the_request(tmp_path: Path) -> None:
    """As an error of the request, which alone needs it."""
    with pytest.raises(ModelError):
        XGrammarCompiler(tmp_path, vocab_size=VOCABULARY, eos_token_ids=(EOS,))
    grammars = Grammars.for_model(tmp_path, vocab_size=VOCABULARY, eos_token_ids=(EOS,), timeout_s=20)
    outcome = await ask(grammars, GrammarSpec("grammar", 'root ::= "a"'))
    assert isinstance(outcome, InvalidRequest) and "no tokenizer can be read" in str(outcome)
    await grammars.aclose()


class Gate(FakeCompiler):
    """Compiles when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """See `Compiler.compile`."""
        assert self.open.wait(20)
        return super().compile(spec)


@pytest.mark.asyncio
async def test_closing_tells_nobody_and_waits_for_what_is_compiled() -> None:
    """But begins nothing more."""
    gate, told = Gate(), []
    grammars = Grammars(lambda: gate)
    for text in "abc":
        assert grammars.ask(GrammarSpec("regex", text), told.append) is None
    closing = asyncio.ensure_future(grammars.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    gate.open.set()
    await asyncio.wait_for(closing, 5)
    assert told == [] and sorted(gate.compiled) == ["a", "b"]
    await grammars.aclose()
