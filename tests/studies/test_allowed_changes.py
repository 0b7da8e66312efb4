"""The changes that `why` tries: which ones, and which first."""

from typing import Any

from ifbbench.build.engine import build_engine
from ifbbench.settings.config import RunConfig
from ifbbench.studies.allowed_changes import ASIDE, DEVICE, Allowed

SIMULATED = {"device": "sim:h200-sxm"}


def allowed(values: dict[str, Any], waited_s: dict[str, float], longest: int, windows: bool = False) -> Allowed:
    config = RunConfig(**SIMULATED | values)
    resolved = build_engine(config).config.as_dict()
    blocks: dict[str, Any] = {"max": 100, "peak_used": 90}
    if windows:
        blocks["per_window_size"] = {"8192": {}, "100": {}}
    limits = {"batch_size": 0.0, "num_tokens": 0.0, "kv_blocks": 1.0, "none": 0.0}
    summary = {"kv_blocks": blocks, "bound_by": limits, "waiting_by_limit": waited_s, "pauses": 0}
    summary |= {"peak_scheduled_requests": 8, "overloaded": False}
    return Allowed(config, resolved, summary, waited_s, 4000, False, False, longest)


def test_with_several_windows_shorter_sequences_are_tried() -> None:
    """TensorRT-LLM divides the memory by the lengths of windows, and the longest is that of a sequence: the default
    length of Llama 4, 10 million tokens, leaves next to nothing for its windows of 8,192."""
    model = {"model": "llama-4-scout", "tp_size": 8}
    assert {"max_seq_len": 5120} in allowed(model, {"kv_blocks": 1.0}, 5000, windows=True).changes()
    assert {"max_seq_len": 5376} in allowed(model, {"kv_blocks": 1.0}, 5120, windows=True).changes()
    short = allowed(model | {"max_seq_len": 9000}, {"kv_blocks": 1.0}, 5000, windows=True)
    shorter_than_a_multiple = allowed(model | {"max_seq_len": 250}, {"kv_blocks": 1.0}, 100, windows=True)
    for one in (short, shorter_than_a_multiple, allowed(model, {}, 5000)):
        assert not any("max_seq_len" in change for change in one.changes())


def test_mixed_chunks_come_first_where_requests_stand_aside() -> None:
    values = {"engine": "sglang", "model": "llama-3.1-8b"}
    assert allowed(values, {ASIDE: 9.0, DEVICE: 1.0}, 100).changes()[0] == {"enable_mixed_chunk": True}
    assert allowed(values, {ASIDE: 0.0, DEVICE: 1.0}, 100).changes()[0] != {"enable_mixed_chunk": True}
