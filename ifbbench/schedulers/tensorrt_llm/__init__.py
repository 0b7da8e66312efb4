"""TensorRT-LLM's scheduler: admission, capacity policies and micro batches."""
