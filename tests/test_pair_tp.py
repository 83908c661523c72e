"""The real pair with a prefill server of two ranks: a divided model, shards that the decode worker joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_pair import FP32, ask, check_answers

from aioprefill.pair import running_pair
from aioprefill.wire.client import PairClient


@pytest.mark.asyncio
async def test_two_ranks_give_the_tokens_of_the_whole_model(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 prompts at once, prefixes reused, in chunks; then a pause, new weights, a drain of both ranks."""
    options = ("--model", str(tiny_llama), *FP32, "--kv-memory", "16MiB")
    serve = ("--chunk-tokens", "128", "--tp", "2")
    async with running_pair(options, serve=serve) as pair:
        await check_answers(pair, tiny_llama, 512, capsys)
        async with PairClient(pair.prefill.endpoint, pair.decode.endpoint, timeout_s=30) as client:
            await client.pause("retract")
            await client.resume()
            assert (await client.update_weights(tiny_llama))["weight_version"] == 1
            stream, tokens = await ask(client, range(100))  # type: ignore[arg-type]
            assert len(tokens) == 8 and (await stream.first_token()).weight_versions == (1,)
        assert await pair.prefill.stop() == 0
