"""A recording of a real prefill process with a real model and a real decode peer, killed in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_support import read
from wire_support import wait_until

from aioprefill.errors import AioprefillError
from aioprefill.grammar_spec import GrammarSpec
from aioprefill.pair import LOOPBACK, ServerProcess, running_pair
from aioprefill.sampling_params import SamplingParams
from aioprefill.testing.models import make_tiny_llama
from aioprefill.wire.client import PairClient

WITHOUT_MODEL = """
import sys
from aioprefill.cli import main
try:
    main()
finally:
    loaded = [name for name in ("torch", "transformers", "nixl", "zmq") if name in sys.modules]
    assert not loaded, loaded
"""


def replay(*arguments: str) -> tuple[int, str]:
    """`aioprefill replay` in a process of its own that loads no model and no transport."""
    done = subprocess.run(
        (sys.executable, "-c", WITHOUT_MODEL, "replay", *arguments),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_CONFIG_HOME": "/nonexistent"},
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.mark.asyncio
async def test_a_recording_of_a_killed_server_replays_elsewhere(tiny_llama: Path, tmp_path: Path) -> None:
    """Chunked prompts to a decode worker, sampling, grammars, an abort, pauses and new weights over the wire;
    after SIGKILL the recording has it all, up to the last moment, and replays without a model."""
    path = tmp_path / "incident.rec"
    new = make_tiny_llama(tmp_path / "new", seed=9)
    options = ("--model", str(tiny_llama), "--dtype", "fp32", "--kv-memory", "16MiB")
    random = np.random.default_rng(3)

    async def ask(client: PairClient, length: int, **more: Any) -> int:
        stream = client.submit(random.integers(0, 256, length), max_new_tokens=4, ignore_eos=True, **more)
        await stream.transferred()
        return (await stream.first_token()).token_id

    serve = ("--chunk-tokens", "64", "--record", str(path))
    async with running_pair(options, serve=serve) as pair:
        async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
            lengths = (3, 500, 70, 64, 200)
            firsts = await asyncio.gather(
                *(ask(client, length, request_id=f"r{length}") for length in lengths),
                ask(client, 90, request_id="warm", sampling=SamplingParams(temperature=1.0, logprobs=5)),
            )
            regex = client.submit([1, 2, 3], max_new_tokens=4, grammar=GrammarSpec("regex", "[0-9]{3}"))
            await regex.transferred()
            await client.pause("in_place")
            held = client.submit(random.integers(0, 256, 100), request_id="held")
            await client.ping()
            held.abort()
            with pytest.raises(AioprefillError):
                await held.first_token()
            await client.resume()
            await client.update_weights(new)
            await ask(client, 150, request_id="last")
            calls = (await client.stats())["host_calls"]
            await wait_until(lambda: len(read(path)[1]) >= calls, "every call is written")
        pair.prefill.signal(signal.SIGKILL)
        assert await pair.prefill.wait() == -signal.SIGKILL
    code, out = await asyncio.to_thread(replay, str(path), "--json")
    found = json.loads(out)
    assert (code, found["same"], found["end"]) == (0, True, "cut off"), out
    assert found["calls"] >= calls > 50 and found["tp"] == 1
    code, out = await asyncio.to_thread(replay, str(path), "--text")
    assert (
        code == 0 and "weights are swapped" in out and "abort held" in out and "transfer last success" in out
    )
    for length, token in zip((*lengths, 90), firsts, strict=True):
        assert f"{'warm' if length == 90 else f'r{length}'} sampled {token}" in out


@pytest.mark.asyncio
async def test_two_real_ranks_are_recorded_once(tiny_llama: Path, tmp_path: Path) -> None:
    """Rank 0 has the file; what both ranks decided replays on one host without a group."""
    path = tmp_path / "a.rec"
    options = ("--model", str(tiny_llama), "--dtype", "fp32", "--kv-memory", "16MiB", "--chunk-tokens", "64")
    server = await ServerProcess.start(
        "serve", "--listen", LOOPBACK, *options, "--tp", "2", "--record", str(path)
    )
    try:
        endpoint = await server.wait_ready()
        async with PairClient(endpoint, timeout_s=30) as client:
            streams = [client.submit(np.arange(length) % 256, handoff=False) for length in (3, 100, 300)]
            tokens = [(await stream.first_token()).token_id for stream in streams]
        assert await server.stop() == 0, list(server.lines)
    finally:
        await server.stop()
    code, out = await asyncio.to_thread(replay, str(path), "--json")
    found = json.loads(out)
    assert (code, found["same"], found["end"], found["tp"]) == (0, True, "closed", 2), out
    code, out = await asyncio.to_thread(replay, str(path), "--text")
    assert code == 0 and all(f"sampled {token}" in out for token in tokens)
