"""Small random models for tests. Needs torch and transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM


def make_tiny_llama(
    folder: Path,
    *,
    vocab: int = 512,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    seed: int = 0,
) -> Path:
    """Save a random Llama (fp32 safetensors, config, byte-level tokenizer) in `folder`; returns it.

    The weights are a function of `seed` and the shape. Logits differ by much more than rounding, so that
    greedy tokens are well defined. `vocab` is at least 257.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=0.2,
        eos_token_id=256,
        bos_token_id=256,
        tie_word_embeddings=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
