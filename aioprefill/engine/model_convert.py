"""Converts a GGUF file into a folder of bf16 safetensors with config and tokenizer, once.

Runs as a child process (`python -m aioprefill.engine.model_convert FILE FOLDER`): it takes some 20 s and
several times the model's size in memory, which a serving process should neither wait for nor keep.
The child prints the fraction done, a line each, and ends when its standard input does: with its parent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from aioprefill.engine.model_manifest import Report, last_words
from aioprefill.errors import ModelError

CONVERSION = 1
"""Raised when the result of a conversion changes, so that caches are made anew."""

# Tokens that end a text or a turn in one model family or other. GGUF files name one end token, while a
# chat model ends turns with one and texts with another.
_END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>",
)  # fmt: skip


def convert_gguf(source: Path, folder: Path, report: Report) -> None:
    """Convert in a child process; `folder` and a log beside it are made. Blocks.

    Raises `ModelError` with the child's last words, and `OSError` where the disk is full.
    """
    report("converting", 0.0)
    command = [sys.executable, "-m", "aioprefill.engine.model_convert", str(source), str(folder)]
    log = folder.with_name(folder.name + ".log")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                report("converting", float(line))
            child.wait()
        finally:
            child.kill()
            child.communicate()
    if child.returncode != 0:
        said = last_words(log, "")
        raise ModelError(f"model file {source} could not be converted (exit {child.returncode}): {said}")


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(0.1, flush=True)
    place: dict[str, Any] = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **place
    )
    print(0.75, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **place)
    print(0.95, flush=True)
    _make_plain(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    print(1.0, flush=True)


def _make_plain(model: Any, tokenizer: Any) -> None:
    """Forget that the model came quantized, and name every token that ends its output."""
    model.hf_quantizer = None
    for name in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(name, None)
    ends = _end_tokens(model, tokenizer)
    model.config.eos_token_id = ends
    model.generation_config.eos_token_id = ends
    tokenizer.model_max_length = model.config.max_position_embeddings


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    declared = model.config.eos_token_id
    ends = [declared] if isinstance(declared, int) else list(declared or ())
    special = {
        str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ends += [special[word] for word in _END_TOKENS if word in special]
    return list(dict.fromkeys(ends))


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main(arguments: list[str]) -> int:
    """The child process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _convert(Path(arguments[0]), Path(arguments[1]))
    except Exception as err:
        print(f"{type(err).__name__}: {err}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # not by sys.exit: torch's threads and the reader of standard input need no waiting for
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
