"""Model execution: a transformers model over a paged KV pool, model files, sampling."""
