"""Structured output with real engines, in one process: prefill, hand-off and decode of the tiny random Llama.

A random model has no idea of JSON: whatever parses does so because of the masks.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from aioprefill.config import EngineConfig, NativeConfig, SchedulerConfig
from aioprefill.decode.streams import Streams
from aioprefill.decode.worker import DecodeWorker
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import InvalidRequest, RequestAborted
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.native.host import NativeHost
from aioprefill.native.load import load_grammars
from aioprefill.request import PrefillHandle, PrefillRequest
from aioprefill.sampling_params import SamplingParams
from aioprefill.scheduler import PrefillScheduler
from aioprefill.transfer.in_process import InProcessPeer, InProcessTransfer
from aioprefill.wire.messages import Failed, Finished, Message, Token

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}-\d{3}(\.[xyz]+){0,2}!"
EBNF = 'root ::= pair (";" pair){0,2}\npair ::= [a-c] "=" [0-9]{1,3}\n'


def fits_schema(text: str) -> bool:
    """Whether the text is JSON that the schema describes. Written by hand, for it is small."""
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags", "ok"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 2
        and set(value["tags"]) <= {"x", "yy"}
        and isinstance(value["ok"], bool)
    )


def fits(pattern: str) -> Callable[[str], bool]:
    """Whether the whole text matches."""
    return lambda text: re.fullmatch(pattern, text) is not None


KINDS: list[tuple[GrammarSpec, Callable[[str], bool]]] = [
    (GrammarSpec("json_schema", json.dumps(SCHEMA)), fits_schema),
    (GrammarSpec("grammar", EBNF), fits(r"[a-c]=\d{1,3}(;[a-c]=\d{1,3}){0,2}")),
    (GrammarSpec("regex", r"[a-f]{2,5}-\d{3}!"), fits(r"[a-f]{2,5}-\d{3}!")),
]


@dataclass
class RealWorld:
    """A scheduler and a decode worker with real models, and what the worker streamed."""

    scheduler: PrefillScheduler
    host: NativeHost
    worker: DecodeWorker
    streams: Streams
    tokenizer: Tokenizer
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, asyncio.Future[Finished | Failed]] = field(default_factory=dict)

    def submit(self, name: str, grammar: GrammarSpec | None, **options: Any) -> PrefillHandle:
        """A request of its own random prompt, that the worker continues."""
        self.tokens[name], self.ends[name] = [], asyncio.get_running_loop().create_future()
        self.streams.attach(b"reader", name)
        generator = np.random.default_rng(sum(map(ord, name)))
        prompt = generator.integers(0, 512, int(generator.integers(1, 150)))
        options = {"max_new_tokens": 150, **options}
        return self.scheduler.submit(
            PrefillRequest(prompt, request_id=name, peer="decoder", grammar=grammar, **options)
        )

    async def output(self, name: str) -> tuple[str, str]:
        """Text and the reason of its end."""
        end = await asyncio.wait_for(self.ends[name], 60)
        assert isinstance(end, Finished), end
        text: str = self.tokenizer.decode([token for token in self.tokens[name] if token != 256])
        return text, end.reason

    def take(self, reader: bytes, message: Message) -> None:
        """What the worker streams."""
        if isinstance(message, Token):
            self.tokens[message.request_id].append(message.token_id)
        elif isinstance(message, Finished | Failed):
            assert message.request_id is not None
            self.ends[message.request_id].set_result(message)


@asynccontextmanager
async def real_world(folder: Path) -> AsyncIterator[RealWorld]:
    """At the end no page is held on either side."""

    def load() -> TransformersEngine:
        return TransformersEngine.load(
            folder,
            name="m",
            fingerprint="f",
            dtype="float32",
            kv_memory_bytes=32 << 20,
            threads=1,
        )

    prefill, decode = load(), load()

    def copy_pages(source: np.ndarray, target: np.ndarray) -> None:
        decode.pool.storage[torch.from_numpy(target)] = prefill.pool.storage[torch.from_numpy(source)]

    streams = Streams(lambda reader, message: world.take(reader, message), lambda room: worker.drop(room))
    decode_grammars = load_grammars(decode, EngineConfig())
    worker = DecodeWorker(decode, streams, max_batch_requests=16, grammars=decode_grammars)
    peer = InProcessPeer("decoder", decode.spec.layout, decode.num_pages, worker, copy_pages)
    worker.on_pages_free = peer.retry_reservations
    transfer = InProcessTransfer(prefill.spec.layout)
    transfer.add_peer(peer)
    grammars = load_grammars(prefill, EngineConfig())
    host = NativeHost(prefill, transfer, NativeConfig(chunk_tokens=64), grammars=grammars)
    decoding = asyncio.create_task(worker.run())
    async with PrefillScheduler(host, SchedulerConfig(drain_timeout_s=20)) as scheduler:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        world = RealWorld(scheduler, host, worker, streams, tokenizer)
        yield world
        async with asyncio.timeout(20):
            await worker.wait_idle()
        host.memory.check()
        assert host.memory.pool.held == 0
    decoding.cancel()
    await asyncio.wait([decoding])
    worker.close(RequestAborted("the test ends"))
    streams.close()
    assert decode_grammars is not None
    await decode_grammars.aclose()
    worker.pool.check()
    assert worker.pool.free == worker.pool.num_pages
    await decode.aclose()


@pytest.mark.asyncio
async def test_constrained_outputs_always_fit_and_unconstrained_ones_are_what_they_are_alone(
    tiny_llama: Path,
) -> None:
    """Three kinds, greedy and at random, in the same batches as requests without a grammar."""
    sampled = [
        SamplingParams(),
        SamplingParams(temperature=1.5, seed=3),
        SamplingParams(temperature=1.0, top_k=20, seed=4),
        SamplingParams(temperature=3.0, top_p=0.9, seed=5),
    ]
    async with real_world(tiny_llama) as w:
        plain = {"max_new_tokens": 30, "ignore_eos": True}
        for number, sampling in enumerate(sampled):
            w.submit(f"plain{number}", None, sampling=sampling, **plain)
        alone = {f"plain{number}": await w.output(f"plain{number}") for number in range(len(sampled))}
        tokens_alone = {name: w.tokens[name] for name in alone}
        w.worker.steps = 0
        for number, sampling in enumerate(sampled):
            for kind, (spec, _) in enumerate(KINDS):
                w.submit(f"g{kind}.{number}", spec, sampling=sampling, ignore_eos=bool(number % 2))
            w.submit(f"plain{number}", None, sampling=sampling, **plain)
        texts = set()
        for number in range(len(sampled)):
            for kind, (spec, fits_it) in enumerate(KINDS):
                text, reason = await w.output(f"g{kind}.{number}")
                assert fits_it(text) and reason == "eos", (spec.kind, text, reason)
                texts.add(text)
            await w.output(f"plain{number}")
            assert w.tokens[f"plain{number}"] == tokens_alone[f"plain{number}"]
        assert len(texts) > len(KINDS), "prompts and seeds still matter"
        assert w.worker.steps < sum(map(len, w.tokens.values())) / 2, "they were batched"


@pytest.mark.asyncio
async def test_a_bad_schema_is_refused_alone_and_the_first_token_alone_is_constrained_too(
    tiny_llama: Path,
) -> None:
    """With xgrammar's own words; a request without a peer gets a first token that fits."""
    async with real_world(tiny_llama) as w:
        bad = w.submit("bad", GrammarSpec("json_schema", '{"type": "nope"}'))
        good = w.submit("good", KINDS[2][0])
        with pytest.raises(InvalidRequest, match='json_schema: does not compile: Unsupported type "nope"'):
            await bad.wait_transferred()
        await good.wait_transferred()
        assert KINDS[2][1]((await w.output("good"))[0])
        digits = GrammarSpec("regex", "[0-9]{4}")
        handles = [
            w.scheduler.submit(PrefillRequest([number], grammar=digits, sampling=SamplingParams(2.0)))
            for number in range(20)
        ]
        firsts = [w.tokenizer.decode([(await handle).token_id]) for handle in handles]
        assert all(first.isdigit() for first in firsts) and len(set(firsts)) > 1
        w.streams.abandon(b"reader", "bad")


@pytest.mark.asyncio
async def test_aborts_of_constrained_requests_leak_nothing(tiny_llama: Path) -> None:
    """At random moments: while compiling, prefilling, in transfer, decoding."""
    async with real_world(tiny_llama) as w:
        generator = np.random.default_rng(5)
        handles = {}
        for number in range(24):
            name = f"r{number}"
            spec = GrammarSpec("regex", f"[a-z]{{1,{number % 5 + 20}}}")
            handles[name] = w.submit(name, spec if number % 3 else None, max_new_tokens=20)
            for _ in range(int(generator.integers(0, 40))):
                await asyncio.sleep(0)
            if number % 2:
                victim = f"r{int(generator.integers(0, number))}"
                handles[victim].abort("random")
                w.streams.abandon(b"reader", victim)
        outcomes = await asyncio.gather(
            *(handle.wait_transferred() for handle in handles.values()), return_exceptions=True
        )
        bad = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert all(isinstance(outcome, RequestAborted) for outcome in bad) and len(bad) < 24
