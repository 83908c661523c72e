"""What the documents show runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from aioprefill.engine.model_files import ResolvedModel

ROOT = Path(__file__).parent.parent


@pytest.mark.asyncio
async def test_the_embedding_example_runs(embedded_model: ResolvedModel) -> None:
    """As the README shows it: first tokens of real prompts, and the scheduler's counters."""
    example = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "examples" / "embed.py"), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(example.communicate(), 120)
    text = output.decode()
    assert example.returncode == 0
    assert "The capital of France is Paris" in text and "finished=3" in text


def test_the_readme_shows_the_example() -> None:
    """Line by line."""
    body = (ROOT / "examples" / "embed.py").read_text().split('"""\n', 1)[1].strip()
    assert body in (ROOT / "README.md").read_text()


def test_the_demo_answers_right_and_says_when(embedded_model: ResolvedModel) -> None:
    """One JSON object: texts, token counts, the four times of each prompt, and the totals."""
    run = subprocess.run(
        [sys.executable, "-m", "aioprefill", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    told = json.loads(run.stdout)
    assert len(told["prompts"]) == 8
    assert told["prompts"][0]["text"].startswith(" Paris")
    assert max(prompt["prompt_tokens"] for prompt in told["prompts"]) == 2000
    for prompt in told["prompts"]:
        assert 0 <= prompt["launched_ms"] <= prompt["first_token_ms"] <= prompt["transferred_ms"]
        assert prompt["arrival_ms"] >= 0 and prompt["generated_tokens"] > 0 and prompt["text"]
    assert told["max_in_flight"] == 2 and told["arrivals_during_forward"] > 0 and told["kv_bytes"] > 0


def test_the_import_is_light() -> None:
    """`import aioprefill` loads neither torch nor transformers nor nixl."""
    code = "import sys, aioprefill; assert not {'torch', 'transformers', 'nixl', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
