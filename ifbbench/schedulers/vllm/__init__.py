"""vLLM's scheduler and KV cache, checked against vLLM 0.32's own."""
