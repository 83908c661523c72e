"""A random Llama of two layers with a byte-level tokenizer, small enough for a forward of milliseconds."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512


def make_tiny_model(folder: Path) -> Path:
    """Save the model and its tokenizer in `folder`; the same weights each time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.4,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {"<s>": 0, "</s>": 1, **{letter: index + 2 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return folder
