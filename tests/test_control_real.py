"""Control of a real prefill process with a real model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import Reference

from aioprefill.errors import ModelError
from aioprefill.pair import ServerProcess
from aioprefill.testing.models import make_tiny_llama
from aioprefill.wire.client import PairClient


async def ctl(endpoint: str, *arguments: str) -> tuple[int, str, str]:
    """`aioprefill ctl`: exit code, standard output, standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aioprefill", "ctl", *arguments, "--endpoint", endpoint),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_CONFIG_HOME": "/nonexistent"},
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode().strip(), err.decode().strip()


async def first(client: PairClient, prompt: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """The first token of a prompt, and the versions of the weights that made it."""
    answer = await client.submit(prompt, handoff=False).first_token()
    return answer.token_id, answer.weight_versions


def cut_weights(folder: Path, to: Path) -> Path:
    """A copy of a checkpoint whose weights end in the middle."""
    shutil.copytree(folder, to)
    weights = next(to.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    return to


@pytest.mark.asyncio
async def test_P7_new_weights_by_command_and_weights_that_do_not_fit(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """On a real model: the new weights' tokens and version; another architecture, a cut file and a folder
    that is not there are refused by name and the last good weights go on; a drain ends it with 0."""
    new = make_tiny_llama(tmp_path / "new", seed=9)
    deeper = make_tiny_llama(tmp_path / "deeper", layers=3)
    cut = cut_weights(new, tmp_path / "cut")
    prompts = [np.arange(start, start + 70) % 512 for start in range(4)]
    old_tokens, new_tokens = (
        [Reference(folder).generate(prompt.tolist(), 1).tokens[0] for prompt in prompts]
        for folder in (tiny_llama, new)
    )
    assert old_tokens != new_tokens
    options = ("--model", str(tiny_llama), "--dtype", "fp32", "--kv-memory", "16MiB")
    server = await ServerProcess.start("serve", "--listen", "tcp://127.0.0.1:0", *options)
    try:
        endpoint = await server.wait_ready()
        async with PairClient(endpoint, timeout_s=30) as client:
            assert [await first(client, prompt) for prompt in prompts] == [(t, (0,)) for t in old_tokens]
            code, out, _ = await ctl(endpoint, "update-weights", str(new), "--json")
            assert (code, json.loads(out)) == (0, {"weight_version": 1})
            for bad in (deeper, cut, tmp_path / "missing"):
                with pytest.raises(ModelError, match=str(bad)):
                    await client.update_weights(bad)
            assert [await first(client, prompt) for prompt in prompts] == [(t, (1,)) for t in new_tokens]
            code, out, err = await ctl(endpoint, "update-weights", str(deeper))
            assert (code, out) == (1, "") and err.startswith("error: ") and str(deeper) in err
            assert (await client.health()).ready
        assert (await ctl(endpoint, "drain"))[0] == 0
        assert await server.wait() == 0
    finally:
        await server.stop()
