"""SGLang's scheduler (0.5.23): prefill or decode in each iteration, a radix tree as KV cache. docs/engines.md."""
