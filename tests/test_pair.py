"""The real pair: two processes, NIXL between them, a client over ZMQ."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from reference import Reference, compare
from tokenizers import Tokenizer

from aioprefill.engine.model_files import ResolvedModel
from aioprefill.errors import AioprefillError, InvalidRequest, PeerError, WireError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.pair import Pair, ServerProcess, running_pair
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.models import make_tiny_llama
from aioprefill.wire.client import PairClient
from aioprefill.wire.stream import TokenStream

NEW_TOKENS = 8
FP32 = ("--dtype", "fp32")


def random_prompts(vocabulary: int, count: int, longest: int) -> list[np.ndarray]:
    """Lengths 1 to `longest`; two in three begin like another one."""
    generator = np.random.default_rng(11)
    beginnings = [generator.integers(0, vocabulary, longest // 2) for _ in range(3)]
    made = []
    for number in range(count):
        tokens = generator.integers(0, vocabulary, int(generator.integers(1, longest + 1)))
        if number % 3:
            shared = beginnings[number % len(beginnings)][: len(tokens)]
            tokens[: len(shared)] = shared
        made.append(tokens)
    made[0] = made[0][:1]
    return made


async def ask(client: PairClient, prompt: np.ndarray, **options: Any) -> tuple[TokenStream, list[int]]:
    """One prompt to its end."""
    stream = client.submit(prompt, **{"max_new_tokens": NEW_TOKENS, "ignore_eos": True, **options})
    return stream, [token async for token in stream]


async def check_answers(
    pair: Pair, folder: Path, vocabulary: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 prompts at once: greedy tokens as transformers' own, first-token log-probabilities within 1e-3."""
    made = random_prompts(vocabulary, 50, 700)
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        sampling = SamplingParams(logprobs=20)
        answers = await asyncio.gather(*(ask(client, prompt, sampling=sampling) for prompt in made))
        firsts = [await stream.first_token() for stream, _ in answers]
        stats = await client.stats()
        decode_stats = await client.stats("decode")
    assert stats["max_in_flight"] == 2 and stats["pages_held"] == 0
    assert stats["cached_tokens"] > 1000, "prefixes were reused"
    assert stats["launched"] > 10, "prompts ran in chunks"
    assert decode_stats["pages_free"] == decode_stats["pages"]
    reference = Reference(folder)
    verdicts: Counter[str] = Counter()
    worst = 0.0
    for number, (prompt, (_, tokens), first) in enumerate(zip(made, answers, firsts, strict=True)):
        expected = reference.generate(prompt.tolist(), NEW_TOKENS)
        verdict = compare(expected, tokens)
        assert verdict in ("same", "tie"), f"prompt {number} of {len(prompt)} tokens: {verdict}"
        verdicts[verdict] += 1
        logprobs = expected.logits[0].log_softmax(-1)
        worst = max(worst, *(abs(float(logprobs[token]) - value) for token, value in first.top_logprobs))
    assert worst < 1e-3
    with capsys.disabled():
        print(f"\n  answers of {folder.name}: {dict(verdicts)}, log-probabilities within {worst:.1e}")


@pytest.mark.asyncio
async def test_right_answers_smollm2(
    embedded_model: ResolvedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model in fp32 through the pair."""
    options = ("--model", str(embedded_model.path), *FP32, "--kv-memory", "600MiB")
    async with running_pair(options, serve=("--chunk-tokens", "512")) as pair:
        await check_answers(pair, embedded_model.path, 49152, capsys)


@pytest.mark.asyncio
async def test_the_pair_with_a_tiny_llama(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right answers, bad input, peers that refuse and die, restarts: on one pair, in turn."""
    options = ("--model", str(tiny_llama), *FP32, "--kv-memory", "16MiB", "--lease-s", "2")
    async with running_pair(options, serve=("--chunk-tokens", "128")) as pair:
        await check_answers(pair, tiny_llama, 512, capsys)
        await check_bad_input(pair)
        await check_sampling(pair)
        await check_structured_output(pair, tiny_llama)
        await check_a_disconnecting_client(pair)
        await check_another_layout_is_refused(pair, tiny_llama)
        await check_a_killed_decode_worker(pair)
        assert await pair.prefill.stop() == 0


async def check_bad_input(pair: Pair) -> None:
    """Each is refused by its field; a good request beside them is served."""
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        async with PairClient(pair.prefill.endpoint, peer="tcp://127.0.0.1:1", timeout_s=30) as other:
            other.submit([1, 2, 3], request_id="live")
            await other.ping()
            with pytest.raises(InvalidRequest, match="request_id"):
                await client.submit([1], request_id="live", handoff=False).first_token()
        for prompt, options, fieldname in (
            ([], {}, "prompt"),
            ([512], {}, "prompt"),
            ([1] * 2048, {}, "prompt"),
            ([1], {"sampling": SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
            ([1], {"sampling": SamplingParams(temperature=-1.0)}, "sampling.temperature"),
            ([1], {"sampling": SamplingParams(top_p=float("inf"))}, "sampling.top_p"),
            ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await client.submit(prompt, **options).first_token()  # type: ignore[arg-type]
            assert caught.value.field == fieldname
        with pytest.raises(PeerError, match="max_new_tokens"):
            await client.submit([1, 2], max_new_tokens=5000).transferred()
        assert len((await ask(client, np.arange(300) % 512))[1]) == NEW_TOKENS


async def check_sampling(pair: Pair) -> None:
    """A seed gives the same tokens, alone or in company."""
    sampling = SamplingParams(temperature=1.0, top_k=50, seed=42)
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        prompt = np.arange(40)
        _, alone = await ask(client, prompt, sampling=sampling)
        crowd = [
            ask(client, np.arange(n, n + 70) % 512, sampling=SamplingParams(temperature=2.0))
            for n in range(8)
        ]
        results = await asyncio.gather(ask(client, prompt, sampling=sampling), *crowd)
        assert results[0][1] == alone


async def check_structured_output(pair: Pair, folder: Path) -> None:
    """Greedy and at random the whole output matches; a bad one is refused alone, with the field's name."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pattern = r"[a-f]{2,5}-[0-9]{3}!"
    grammar = GrammarSpec("regex", pattern)
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        with pytest.raises(InvalidRequest, match="regex: does not compile") as caught:
            await client.submit([1], grammar=GrammarSpec("regex", "(a")).first_token()
        assert caught.value.field == "regex"
        plain = ask(client, np.arange(50))
        answers = await asyncio.gather(
            *(
                ask(
                    client, np.arange(n), grammar=grammar, max_new_tokens=40, sampling=SamplingParams(n / 4.0)
                )
                for n in range(1, 9)
            )
        )
        assert len((await plain)[1]) == NEW_TOKENS
    for _, tokens in answers:
        text = tokenizer.decode([token for token in tokens if token != 256])
        assert re.fullmatch(pattern, text), text


async def check_a_disconnecting_client(pair: Pair) -> None:
    """Its requests are aborted on both sides, and nothing stays in use."""
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        for number in range(10):
            client.submit(np.arange(number, number + 500) % 512, max_new_tokens=500, ignore_eos=True)
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        async with asyncio.timeout(30):
            while True:
                prefill, decode = await client.stats("prefill"), await client.stats("decode")
                if prefill["pages_held"] == 0 and decode["pages_free"] == decode["pages"]:
                    break
        assert prefill["open_requests"] == 0


async def check_another_layout_is_refused(pair: Pair, folder: Path) -> None:
    """Other page size, other weights: the handshake says what differs."""
    other_model = make_tiny_llama(folder.parent / "other-llama", seed=5)
    for options, text in (
        (("--model", str(folder), "--page-size", "32"), "page_size"),
        (("--model", str(other_model)), "fingerprint"),
    ):
        worker = await ServerProcess.start(
            "decode", "--listen", "tcp://127.0.0.1:0", *FP32, "--kv-memory", "16MiB", *options
        )
        try:
            endpoint = await worker.wait_ready()
            async with PairClient(pair.prefill.endpoint, peer=endpoint, timeout_s=30) as client:
                with pytest.raises(PeerError, match=text) as caught:
                    await client.submit([1, 2, 3]).transferred()
                assert endpoint in str(caught.value)
        finally:
            assert await worker.stop() == 0


async def check_a_killed_decode_worker(pair: Pair) -> None:
    """Its requests fail by its name; the prefill process goes on."""
    async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
        streams = [
            client.submit(np.arange(n, n + 600) % 512, max_new_tokens=300, ignore_eos=True) for n in range(6)
        ]
        await streams[0].first_token()
        pair.decode.signal(signal.SIGKILL)
        outcomes = await asyncio.gather(*(stream.finished() for stream in streams), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, AioprefillError)]
        assert failures and all(pair.decode.endpoint in str(failure) for failure in failures), outcomes
    async with PairClient(pair.prefill.endpoint, timeout_s=30) as client:
        assert (await client.submit([1, 2, 3], handoff=False).first_token()).prompt_tokens == 3
        async with asyncio.timeout(30):
            while (await client.stats())["pages_held"]:
                pass


@pytest.mark.asyncio
async def test_a_client_survives_the_death_and_the_restart_of_its_server(tiny_llama: Path) -> None:
    """A clear error, not a hang; a second SIGTERM ends a process at once with another exit code."""
    options = ("--model", str(tiny_llama), *FP32, "--kv-memory", "16MiB")
    server = await ServerProcess.start("serve", "--listen", "tcp://127.0.0.1:0", *options)
    endpoint = await server.wait_ready()
    async with PairClient(endpoint, timeout_s=30) as client:
        await client.submit([1, 2], handoff=False).first_token()
        server.signal(signal.SIGKILL)
        with pytest.raises(WireError, match=endpoint):
            await client.submit(np.arange(500), handoff=False).first_token()
        await server.stop()
        server = await ServerProcess.start("serve", "--listen", endpoint, *options)
        await server.wait_ready()
        async with asyncio.timeout(30):
            while True:
                try:
                    first = await client.submit([1, 2], handoff=False).first_token()
                    break
                except WireError:
                    continue
        assert first.prompt_tokens == 2
    assert await server.stop() == 0


@pytest.mark.asyncio
async def test_a_port_in_use_is_a_clear_error(tiny_llama: Path) -> None:
    """Exit code 2 and one line that names the port."""
    options = ("--model", str(tiny_llama), *FP32, "--kv-memory", "16MiB")
    first = await ServerProcess.start("decode", "--listen", "tcp://127.0.0.1:0", *options)
    endpoint = await first.wait_ready()
    second = await ServerProcess.start("decode", "--listen", endpoint, *options)
    with pytest.raises(AioprefillError, match=endpoint.rpartition(":")[2] + " is in use"):
        await second.wait_ready()
    assert await second.stop() == 2
    assert await first.stop() == 0


STARTER = """
import asyncio, signal, sys
from aioprefill.pair import running_pair
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without
async def main():
    async with running_pair(sys.argv[1:]) as pair:
        print(pair.prefill.pid, pair.decode.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_pair_ends_with_the_program_that_started_it(tiny_llama: Path, number: int) -> None:
    """Interrupted or killed: no process is left over."""
    options = ("--model", str(tiny_llama), *FP32, "--kv-memory", "16MiB")
    starter = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        STARTER,
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert starter.stdout is not None
    pids = [int(word) for word in (await starter.stdout.readline()).split()]
    servers = [psutil.Process(pid) for pid in pids]
    starter.send_signal(number)
    await asyncio.wait_for(starter.wait(), 20)
    gone, alive = await asyncio.to_thread(psutil.wait_procs, servers, timeout=20)
    assert len(gone) == 2 and not alive
