"""Loading: what is read from a checkpoint, what is refused and by what name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import transformers
from engine_support import load, run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import aioprefill.engine.model_check as model_check
from aioprefill.engine.kv_pool import KVPool, default_kv_memory, pages_for_memory
from aioprefill.engine.model_loader import parse_device
from aioprefill.engine.port import Span
from aioprefill.engine.transformers_engine import TransformersEngine
from aioprefill.errors import ConfigError, ModelError
from aioprefill.kv_layout import KVLayout

LAYOUT = KVLayout("x", layers=3, kv_heads=2, head_dim=8, page_size=4, dtype="bfloat16")

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def save(folder: Path, kind: str, **changes: object) -> Path:
    """A random checkpoint of the architecture `kind`."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change values of a checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def test_the_spec_says_what_the_checkpoint_says(llama: Path) -> None:
    """Vocabulary, context, end-of-sequence ids, and the layout as seen in a forward."""
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    engine = load(llama)
    try:
        spec = engine.spec
        assert (spec.name, spec.vocab_size, spec.context_length) == ("tiny", 512, 2048)
        assert spec.eos_token_ids == (7, 9)
        assert spec.layout == KVLayout("tiny", 2, 2, 16, 16, "float32")
        assert engine.num_pages == (8 << 20) // spec.layout.page_bytes
    finally:
        engine.close()


def test_the_context_is_no_longer_than_the_pool_holds(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A longer sequence could never run; the log says so."""
    with caplog.at_level(logging.WARNING):
        engine = load(llama, memory=5 * 16 * 512)
    try:
        assert engine.num_pages == 5
        assert engine.spec.context_length == 80
        assert "limited to 80 tokens of 2048" in caplog.text
    finally:
        engine.close()


def test_a_pool_of_one_page_works(llama: Path) -> None:
    """The examination at load makes do with what there is."""
    load(llama, memory=16 * 512).close()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Gemma2", {"head_dim": 8}, "soft-capped attention scores"),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
        ("Jamba", {"num_experts": 2}, r"keeps state outside of a KV cache, or shares it, in layers \[0, 1\]"),
        ("Nemotron", {}, "does not pass keyword arguments on"),
        ("StableLm", {}, "does not pass keyword arguments on"),
        ("Olmoe", {"sliding_window": 8, "num_experts": 2, "num_experts_per_tok": 1}, "gives other logits"),
        ("Phi", {"sliding_window": 64}, "sliding window that its attention is not told"),
    ],
)
def test_architectures_that_would_go_wrong_are_refused_by_name(
    kind: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Each feature that paged attention lacks ends in a ModelError that says which."""
    with pytest.raises(ModelError, match=message):
        load(save(tmp_path, kind, **changes))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """A model that looks at later tokens cannot be chunked."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="looks at later tokens"):
        load(tmp_path)


def test_a_model_that_differs_on_pages_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at load is what stands between an unknown architecture and wrong tokens."""
    honest = model_check.own_logits

    def off(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
        return honest(model, token_ids) * 1.01

    monkeypatch.setattr(model_check, "own_logits", off)
    with pytest.raises(ModelError, match=r"gives other logits .* 0\.0099"):
        load(llama)


def test_longrope_is_served_up_to_where_its_frequencies_switch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Past that length the whole batch's frequencies would depend on who is in it."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    }
    folder = save(tmp_path, "Llama", rope_parameters=rope)
    with caplog.at_level(logging.WARNING):
        engine = load(folder)
    engine.close()
    assert engine.spec.context_length == 64
    assert "longrope" in caplog.text


def spoil_weights(folder: Path) -> None:
    """Cut the file in half."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def drop_weights(folder: Path) -> None:
    """No weights at all."""
    (folder / "model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    """Weights in a format that runs code."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def foreign(folder: Path) -> None:
    """An architecture that nobody knows."""
    edit_config(folder, model_type="martian")


def not_json(folder: Path) -> None:
    """A damaged config."""
    (folder / "config.json").write_text("{")


def no_config(folder: Path) -> None:
    """Some other folder."""
    (folder / "config.json").unlink()


def other_shape(folder: Path) -> None:
    """Weights of another size than the config says."""
    edit_config(folder, hidden_size=128)


@pytest.mark.parametrize(
    "spoil", [spoil_weights, drop_weights, only_pickle, foreign, not_json, no_config, other_shape]
)
def test_a_broken_folder_is_a_model_error_that_names_it(llama: Path, spoil: Callable[[Path], None]) -> None:
    """Whatever transformers makes of it, the caller sees one kind of error."""
    spoil(llama)
    with pytest.raises(ModelError, match=str(llama)):
        load(llama)


def test_missing_weights_are_not_made_up(llama: Path) -> None:
    """A checkpoint that lacks a layer would otherwise run on random numbers."""
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(llama)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype: 'int4' is unknown"),
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"device": "meta"}, "device: 'meta' is not supported"),
        ({"memory": 100}, "holds no page of 8,192 bytes"),
        ({"memory": 1 << 60}, "cannot allocate .* bytes of KV memory"),
    ],
)
def test_impossible_settings_are_config_errors(llama: Path, options: dict[str, object], message: str) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=message):
        load(llama, **options)  # type: ignore[arg-type]


def test_a_page_size_below_one_is_a_config_error(llama: Path) -> None:
    """Rather than a division by zero later on."""
    with pytest.raises(ConfigError, match="page_size"):
        TransformersEngine.load(llama, name="x", fingerprint="x", page_size=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_config_error() -> None:
    """Asked for, not there."""
    with pytest.raises(ConfigError, match="no CUDA device"):
        parse_device("cuda:1")


def test_pages_lie_one_after_the_other_at_the_base_address() -> None:
    """A page is one block of `page_bytes` bytes, in the layout that a peer expects."""
    pool = KVPool(LAYOUT, 5)
    assert pool.storage.shape == (5, 3, 2, 4, 2, 8)
    assert pool.storage.is_contiguous()
    assert (pool.page_bytes, pool.nbytes) == (LAYOUT.page_bytes, 5 * LAYOUT.page_bytes)
    assert pool.base_address == pool.storage.data_ptr()
    assert pool.storage[3].data_ptr() == pool.base_address + 3 * pool.page_bytes
    assert (pool.memory, pool.device_id) == ("DRAM", 0)


def test_rows_address_key_and_value_of_each_layer() -> None:
    """The same row number is the token's place in every layer's view."""
    pool = KVPool(LAYOUT, 5)
    row = 4 * pool.rows_per_page + 2
    for layer in range(LAYOUT.layers):
        pool.k_rows[layer][row] = layer + 1
        pool.v_rows[layer][row] = -layer - 1
        assert (pool.storage[4, layer, 0, 2] == layer + 1).all()
        assert (pool.storage[4, layer, 1, 2] == -layer - 1).all()
    assert int((pool.storage != 0).sum()) == LAYOUT.layers * 2 * 2 * 8


def test_the_default_pool_is_a_quarter_of_free_memory_and_at_most_4_gib() -> None:
    """And a page count is rounded down."""
    memory = default_kv_memory()
    assert memory == 4 << 30 or memory == pytest.approx(psutil.virtual_memory().available / 4, rel=0.2)
    assert pages_for_memory(LAYOUT, LAYOUT.page_bytes * 7 - 1) == 6


def test_loading_twice_in_one_process_keeps_engines_apart(llama: Path) -> None:
    """Prefill and decode may share a process: each has its pool and its stream."""
    one, two = load(llama), load(llama)
    try:
        span = Span(np.arange(20, dtype=np.uint32), 0, np.array([8, 5], dtype=np.int32), None)
        run(one, [span])
        assert one.pool.storage[[5, 8]].any()
        assert not two.pool.storage[[5, 8]].any()
    finally:
        one.close()
        two.close()
