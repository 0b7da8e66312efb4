"""Models by name: their shapes, quantization and adapters, without a tensor."""
