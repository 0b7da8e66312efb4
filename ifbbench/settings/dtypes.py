"""Data types of weights, and of keys and values."""

DTYPES = ("float32", "bf16", "fp16", "fp8", "fp8_block", "int4", "mxfp4", "nvfp4")
# Weights that only simulated devices have.
SIMULATED_DTYPES = ("fp8_block", "int4", "mxfp4", "nvfp4")
KV_CACHE_DTYPES = ("float32", "bf16", "fp16", "fp8")
DTYPE_BYTES = {
    "float32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4": 0.5, "mxfp4": 0.5, "nvfp4": 0.5,
}  # fmt: skip
