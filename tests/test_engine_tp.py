"""A model divided over two real processes: the same tokens, logits and KV as in one, or a refusal on both."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_support import GREEDY, Prompt, load, run
from engine_tp_ranks import SIZE, Ranks, Refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aioprefill.engine.port import Span
from aioprefill.engine.shard import EngineShard, default_threads, device_name
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import ConfigError
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.models import make_tiny_llama

MEMORY = 4 << 20
"""Of one rank; an unsharded engine's pages are twice as large."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Both processes, without an engine yet."""
    both = Ranks(tmp_path_factory.mktemp("ranks") / "store")
    yield both
    assert both.close() == [0, 0]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture
def single(tiny_llama: Path) -> Iterator[TransformersEngine]:
    """The unsharded engine."""
    engine = load(tiny_llama, memory=SIZE * MEMORY)
    yield engine
    engine.close()


class Play:
    """Prompts over scattered pages, cut into forwards that mix all kinds of spans."""

    def __init__(self, engine: TransformersEngine, *, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.free = self.rng.permutation(engine.num_pages).tolist()
        self.used: list[int] = []
        self.spec = engine.spec

    def sequence(self, length: int) -> Prompt:
        """A random prompt on pages of its own."""
        count = self.spec.layout.pages_for(length)
        taken, self.free = self.free[:count], self.free[count:]
        self.used += taken
        tokens = self.rng.integers(0, self.spec.vocab_size, length).astype(np.uint32)
        return Prompt(tokens, np.array(taken, dtype=np.int32))

    def forwards(self) -> Iterator[list[Span]]:
        """Chunked, packed, sharing a prefix's pages, decoding, and sampled in every way."""
        chunked, first, alone, long = (self.sequence(n) for n in (300, 64, 51, 700))
        tail = self.sequence(30)
        shared = Prompt(
            np.concatenate([first.tokens[:48], tail.tokens]),
            np.concatenate([first.pages[:3], tail.pages]),
            done=48,
        )
        seeded = SamplingParams(temperature=1.0, seed=7, logprobs=4)
        nucleus = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
        few = SamplingParams(temperature=1.2, top_k=20, seed=13)
        yield [chunked.span(70, sample=None)]
        yield [first.span(64), chunked.span(33, sample=None), alone.span(50, sample=seeded)]
        yield [shared.span(12, sample=few), chunked.span(1, sample=nucleus), alone.span(1)]
        yield [long.span(512, sample=None), shared.span(18, sample=seeded)]
        yield [chunked.span(196, sample=nucleus), long.span(187), long_decode(self, 9)]
        yield [self.sequence(1).span(1), self.sequence(33).span(33, sample=few)]

    def random(self, count: int) -> Iterator[list[Span]]:
        """`count` prompts of random lengths, cut at random."""
        left = [self.sequence(int(n)) for n in self.rng.integers(1, 120, count)]
        while left:
            spans = []
            for index in self.rng.permutation(len(left))[: self.rng.integers(1, 6)]:
                prompt = left[index]
                rest = len(prompt.tokens) - prompt.done
                size = int(self.rng.choice([1, rest, self.rng.integers(1, rest + 1)]))
                seed = int(self.rng.integers(1 << 40))
                sample = SamplingParams(temperature=1.0, seed=seed) if self.rng.random() < 0.5 else GREEDY
                spans.append(prompt.span(size, sample=sample))
            yield spans
            left = [prompt for prompt in left if prompt.done < len(prompt.tokens)]


def long_decode(play: Play, length: int) -> Span:
    """One more fresh prompt."""
    return play.sequence(length).span(length)


def logits(engine: TransformersEngine, spans: list[Span]) -> Any:
    """The unsharded engine's, shape (spans that sample, vocabulary)."""
    from functools import partial

    from aioprefill.engine.batch import pack

    batch = pack(spans, engine.spec, engine.num_pages, engine.pool.rows_per_page)
    return engine._stream.compute(partial(engine._logits, batch)).float().numpy()


def ids(outputs: list[Any]) -> list[int | None]:
    """The tokens alone: log-probabilities differ by rounding."""
    return [output and output.token_id for output in outputs]


def check_same(ranks: Ranks, engine: TransformersEngine, spans: list[Span]) -> None:
    """One forward on both: logits, and then what is sampled from them."""
    expected = logits(engine, spans)
    found = ranks.all("logits", spans)
    assert np.array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-3)
    right = run(engine, spans)
    for outputs in ranks.all("run", spans):
        assert ids(outputs) == ids(right)
        for output, other in zip(outputs, right, strict=True):
            if output is not None and other is not None:
                assert output.logprob == pytest.approx(other.logprob, abs=1e-3)
                assert [token for token, _ in output.top_logprobs] == [t for t, _ in other.top_logprobs]


def check_pools(ranks: Ranks, engine: TransformersEngine, pages: list[int] | None = None) -> None:
    """Each rank's pages (all, or those named) are its heads' slice of the unsharded engine's."""
    whole = engine.pool.storage.numpy()
    chosen = slice(None) if pages is None else pages
    for rank, pool in enumerate(ranks.all("pool")):
        heads = pool.shape[4]
        assert heads * SIZE == whole.shape[4]
        part = whole[:, :, :, :, rank * heads : (rank + 1) * heads]
        np.testing.assert_allclose(pool[chosen], part[chosen], rtol=0, atol=1e-3)


def test_logits_tokens_and_pages_are_those_of_the_unsharded_engine(
    ranks: Ranks, single: TransformersEngine, tiny_llama: Path
) -> None:
    """Mixed forwards, sampled and not: the same everywhere, and each rank holds its heads' KV alone."""
    for rank, loaded in enumerate(ranks.all("load", tiny_llama)):
        layout = loaded["spec"].layout
        assert (layout.kv_heads, layout.shards, layout.shard) == (1, 2, rank)
        assert layout.fingerprint == single.spec.layout.fingerprint
        assert layout.whole() == single.spec.layout
        assert (loaded["pages"], loaded["spec"].context_length) == (single.num_pages, 2048)
    for spans in Play(single).forwards():
        check_same(ranks, single, spans)
    check_pools(ranks, single)
    assert np.abs(single.pool.storage.numpy()).max() > 1


def test_random_schedules_are_the_same(ranks: Ranks, single: TransformersEngine, tiny_llama: Path) -> None:
    """Fifty prompts cut and packed at random."""
    ranks.all("load", tiny_llama)
    for spans in Play(single, seed=5).random(50):
        right = ids(run(single, spans))
        assert [ids(outputs) for outputs in ranks.all("run", spans)] == [right, right]
    check_pools(ranks, single)


def test_ranks_draw_the_same_token_without_a_seed(
    ranks: Ranks, single: TransformersEngine, tiny_llama: Path
) -> None:
    """Both sample on their own; nobody tells the other what."""
    ranks.all("load", tiny_llama)
    prompt = Play(single).sequence(20)
    sample = SamplingParams(temperature=3.0)
    drawn = []
    for _ in range(12):
        prompt.done = 0
        first, second = (ids(outputs) for outputs in ranks.all("run", [prompt.span(20, sample=sample)]))
        assert first == second
        drawn += first
    assert len(set(drawn)) > 4


def test_a_rank_that_waits_for_the_other_holds_nothing_up(
    ranks: Ranks, single: TransformersEngine, tiny_llama: Path, other_weights: Path
) -> None:
    """While rank 0's forward waits for rank 1's, rank 0 answers, and both stage new weights."""
    ranks.all("load", tiny_llama)
    spans = [Play(single).sequence(40).span(40)]
    ranks.ask(0, "launch", spans)
    assert ranks.answer(0) is None
    ranks.all("stage", other_weights)
    ranks.ask(1, "launch", spans)
    assert ranks.answer(1) is None
    assert [ids(outputs) for outputs in ranks.all("finish")] == [ids(run(single, spans))] * 2


def test_all_ranks_get_the_pages_of_the_one_with_least_memory(ranks: Ranks, tiny_llama: Path) -> None:
    """And the context that those hold."""
    page = 4096
    loaded = ranks.all("load", tiny_llama, kv_memory_bytes=(60 * page, 50 * page + 1))
    assert [one["pages"] for one in loaded] == [50, 50]
    assert [one["spec"].context_length for one in loaded] == [800, 800]


def test_an_update_of_the_weights_gives_each_rank_its_part(
    ranks: Ranks, tiny_llama: Path, other_weights: Path
) -> None:
    """Logits and pages are then those of an engine that began with the new weights."""
    ranks.all("load", tiny_llama)
    engine = load(other_weights, memory=SIZE * MEMORY)
    try:
        names = ranks.all("update", other_weights)
        assert names[0] == names[1]
        play = Play(engine)
        for spans in play.forwards():
            check_same(ranks, engine, spans)
        # the examination at load left KV of the old weights in others
        check_pools(ranks, engine, play.used)
    finally:
        engine.close()


def spoiled(folder: Path, target: Path, spoil: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy with other tensors."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    spoil(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_new_weights_that_one_rank_refuses_are_refused_by_all(
    ranks: Ranks, single: TransformersEngine, tiny_llama: Path, other_weights: Path, tmp_path: Path
) -> None:
    """By name, on each rank; the old weights go on serving."""
    ranks.all("load", tiny_llama)
    missing = spoiled(tiny_llama, tmp_path / "missing", lambda tensors: tensors.pop("lm_head.weight"))
    cut = Path(shutil.copytree(other_weights, tmp_path / "cut"))
    os.truncate(cut / "model.safetensors", 10_000)
    wide = make_tiny_llama(tmp_path / "wide", hidden=128)
    expected = [
        (missing, "lm_head.weight", "lm_head.weight"),
        (wide, "has shape", "has shape"),
        ((other_weights, cut), "rank 1: model file .* its header says", "^model file .* its header says"),
        ((tiny_llama, other_weights), "rank 1 has other new weights", "rank 1 has other new weights"),
    ]
    for folder, *texts in expected:
        for text, answer in zip(texts, ranks.refusals("update", folder), strict=True):
            assert isinstance(answer, Refused)
            assert answer.args[0] == "ModelError"
            with pytest.raises(Refused, match=text):
                raise Refused(answer.args[1])
    check_same(ranks, single, [Play(single).sequence(30).span(30)])


def refused(ranks: Ranks, folder: Any, **options: Any) -> list[Any]:
    """The errors of loading, (class, message) by rank."""
    answers = ranks.refusals("load", folder, **options)
    assert all(isinstance(answer, Refused) for answer in answers), answers
    return [answer.args for answer in answers]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [
        (9, 3, "the model has 3 KV heads, they cannot be divided over 2 ranks; use --tp 3 or --tp 1"),
        (4, 1, "the model has 1 KV head, it cannot be divided over 2 ranks; use --tp 1"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_by_all(
    ranks: Ranks, tmp_path: Path, heads: int, kv_heads: int, message: str
) -> None:
    """With the numbers of ranks that would do."""
    model = make_tiny_llama(tmp_path / "odd", hidden=72, heads=heads, kv_heads=kv_heads)
    assert refused(ranks, model) == [("ModelError", message)] * 2


def test_a_model_without_a_plan_is_refused_by_all(ranks: Ranks, tmp_path: Path) -> None:
    """transformers knows no way to divide it."""
    config = transformers.OPTConfig(
        vocab_size=300,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    message = (
        "transformers has no tensor-parallel plan for opt models, so they cannot be divided over 2 ranks; "
        "use --tp 1"
    )
    assert refused(ranks, tmp_path) == [("ModelError", message)] * 2


def test_what_one_rank_cannot_load_is_refused_by_all(ranks: Ranks, tiny_llama: Path, tmp_path: Path) -> None:
    """The others name the rank and its cause, and nobody waits."""
    bare = Path(shutil.copytree(tiny_llama, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    first, second = refused(ranks, (tiny_llama, bare))
    assert first[0] == second[0] == "ModelError"
    assert first[1] == f"rank 1: {second[1]}"
    assert second[1].startswith(f"{bare} cannot be loaded")
    first, second = refused(ranks, tiny_llama, fingerprint=("one", "two"))
    assert first == second == ("ModelError", "rank 1 has other model files than rank 0: 'two', not 'one'")
    first, second = refused(ranks, tiny_llama, kv_memory_bytes=(10, MEMORY))
    assert first[0] == "ConfigError"
    assert second == ("ModelError", f"rank 0: {first[1]}")
    ranks.all("load", tiny_llama)


def test_a_process_group_of_another_shape_is_refused(ranks: Ranks, tiny_llama: Path) -> None:
    """Before anything is loaded."""
    for kind, message in refused(ranks, tiny_llama, shard=EngineShard(0, 4)):
        assert kind == "ConfigError"
        assert message.startswith("tp 4: this is rank 0 of 4, but the process group says rank")


def test_without_a_process_group_a_shard_is_refused(tiny_llama: Path) -> None:
    """The message says what the process must do first."""
    with pytest.raises(ConfigError, match="initialize torch"):
        TransformersEngine.load(tiny_llama, name="x", fingerprint="x", shard=EngineShard(1, 2))


def test_a_shard_of_one_is_an_engine_like_any(tiny_llama: Path) -> None:
    """No process group is asked for."""
    options = {"dtype": "float32", "kv_memory_bytes": MEMORY, "threads": 1}
    engine = TransformersEngine.load(
        tiny_llama, name="x", fingerprint="x", shard=EngineShard(0, 1), **options
    )
    assert (engine.spec.layout.kv_heads, engine.spec.layout.shards) == (2, 1)
    engine.close()


SMALL = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
MODELS: dict[str, Callable[[], Any]] = {
    "tied_embeddings": lambda: transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "biases_and_windows": lambda: transformers.Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
    "norms_of_heads": lambda: transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32),
    "fused_projections": lambda: transformers.GPTNeoXConfig(**SMALL),
    "experts": lambda: transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, sliding_window=None
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_other_architectures(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Their plans divide other layers; a vocabulary that is odd is divided, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(tmp_path)
    engine = load(tmp_path, memory=SIZE * MEMORY)
    try:
        ranks.all("load", tmp_path)
        for spans in Play(engine).forwards():
            check_same(ranks, engine, spans)
        check_pools(ranks, engine)
    finally:
        engine.close()


def test_ranks_share_the_cores(ranks: Ranks, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its part of them, but at least one; a setting has its way."""
    cores = len(os.sched_getaffinity(0))
    ranks.all("load", tiny_llama)
    assert ranks.all("threads") == [max(1, cores // 2)] * 2
    ranks.all("load", tiny_llama, threads=2)
    assert ranks.all("threads") == [2, 2]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert [default_threads(size) for size in (2, 3, 32)] == [8, 5, 1]


def test_each_rank_takes_a_cuda_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number on this machine; a device with a number is taken at its word."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    shard = EngineShard(5, 8)
    assert device_name("cuda", shard) == "cuda:5"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [device_name(name, shard) for name in ("cuda", "cuda:3", "cpu")] == ["cuda:1", "cuda:3", "cpu"]


def test_a_closed_engine_leaves_nothing(ranks: Ranks, tiny_llama: Path, other_weights: Path) -> None:
    """Not even after a refusal or an update: no thread of ours, and the group can hold another engine."""
    ranks.all("load", tiny_llama)
    ranks.all("update", other_weights)
    assert ranks.all("close") == [[], []]
    assert json.dumps(ranks.all("load", tiny_llama)[0]["pages"]) == json.dumps(MEMORY // 4096)


def test_a_rank_that_fails_half_way_is_done_with(tmp_path: Path, tiny_llama: Path) -> None:
    """The ranks are out of step: it computes nothing more, and the others fail when it is gone."""
    pair = Ranks(tmp_path / "store")
    try:
        spec = pair.all("load", tiny_llama)[0]["spec"]
        assert spec.layout.shards == SIZE
        prompt = np.arange(20, dtype=np.uint32)
        spans = [Span(prompt, 0, np.arange(2, dtype=np.int32), GREEDY)]
        pair.ask(1, "spoil")
        assert pair.answer(1) is None
        pair.ask(0, "run", spans)
        for _ in range(2):
            pair.ask(1, "run", spans)
            error = pair.answer(1)
            assert isinstance(error, Refused)
            assert error.args[0] == "DeviceError sticky"
            assert "no memory for this" in error.args[1]
        pair.end(1)
        error = pair.answer(0)
        assert isinstance(error, Refused)
        assert error.args[0] == "DeviceError sticky"
    finally:
        assert pair.close() == [0, 0]
