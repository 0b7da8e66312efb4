"""The engines that have a scheduler here."""

TRTLLM, VLLM, SGLANG = "trtllm", "vllm", "sglang"
ENGINES = (TRTLLM, VLLM, SGLANG)
ENGINE_NAMES = {TRTLLM: "TensorRT-LLM", VLLM: "vLLM", SGLANG: "SGLang"}
# Engines that write log lines of iterations.
LOGGED_ENGINES = (VLLM, SGLANG)
