"""The model repository of Triton Inference Server: a model with the tensors of TensorRT-LLM's backend, and its
settings."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from ifbbench.files import replace_file
from ifbbench.serving.config import FrontDoorConfig
from ifbbench.serving.library.request_tensors import TENSORS
from ifbbench.settings.config import RunConfig, settings
from ifbbench.settings.fields import Setting, declare, file_name, located, settings_of
from ifbbench.settings.names import from_mapping

MODEL_NAME, VERSION = "tensorrt_llm", "1"
# Inputs that are not those of a request of the engine.
STOP, NUM_SEQUENCES = "stop", "num_return_sequences"
MAX_SEQUENCES = 128
# The file descriptor of a pipe from `ifbbench triton`, whose end of file ends the model's process.
PIPE_VARIABLE = "IFBBENCH_TRITON_PIPE"
# A named pipe to `ifbbench triton`, which the model's process keeps open; it writes there why it ends the server.
FIFO_VARIABLE = "IFBBENCH_TRITON_FIFO"
# Prompts of one Triton request.
MAX_PROMPTS = 256
REQUIRED = ("input_ids", "request_output_len")
TRITON_TYPES = {"int32": "INT32", "uint64": "UINT64", "float16": "FP16", "float32": "FP32", "bool": "BOOL"}
# Where the backend has another type than the documentation of the batch manager.
OTHER_TYPES = {"early_stopping": "BOOL"}
# Outputs by name: type and dimensions.
OUTPUTS = {
    "output_ids": ("INT32", [-1, -1]),
    "sequence_length": ("INT32", [-1]),
    "cum_log_probs": ("FP32", [-1]),
    "output_log_probs": ("FP32", [-1, -1]),
    "context_logits": ("FP32", [-1, -1]),
    "generation_logits": ("FP32", [-1, -1, -1]),
    "batch_index": ("INT32", [1]),
    "sequence_index": ("INT32", [1]),
}

_server, _model = partial(declare, "server"), partial(declare, "model of triton")
_port = partial(_server, minimum=0, maximum=65535)


@dataclass(frozen=True)
class TritonConfig(FrontDoorConfig):
    """All settings of Triton and of its model. Values are checked on construction."""

    http_port: int = _port(8000, "Port of HTTP; 0 takes a free one.")
    grpc_port: int = _port(8001, "Port of gRPC; 0 takes a free one.")
    metrics_port: int = _port(8002, "Port of /metrics; 0 takes a free one.")
    triton_model_name: str = _model(
        MODEL_NAME, "Name of the model in Triton.", convert=partial(file_name, name="--triton_model_name")
    )
    decoupled_mode: bool = _model(
        True, "A request may have several responses, as streams need; without it each has one, as /infer of HTTP needs."
    )
    exclude_input_in_output: bool = _model(
        False, "output_ids begin after the prompt. Streams, and requests that say so, have new tokens only anyway."
    )
    cancellation_check_period_ms: int = _model(
        100, "How often to look for requests that clients have cancelled.", minimum=1, unit="ms"
    )
    stats_check_period_ms: int = _model(100, "How often to update the metrics.", minimum=1, unit="ms")


@cache
def triton_settings() -> tuple[Setting, ...]:
    """All settings of Triton, in the order of `TritonConfig`."""
    return settings_of(TritonConfig)


def write_repository(directory: Path, config: RunConfig, triton: TritonConfig) -> Path:
    """Write the model repository `directory`; returns the directory of the model. Errors are those of `new_file`."""
    model = directory / triton.triton_model_name
    with located("--model_repository"):
        replace_file(model / "config.pbtxt", model_config(config, triton))
        replace_file(model / VERSION / "model.py", MODEL_PY)
    return model


# Triton's interpreter ignores PYTHONPATH.
MODEL_PY = '''"""The batch manager of ifbbench as a model of Triton's Python backend; config.pbtxt has its settings."""

import os
import sys

sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))

from ifbbench.serving.triton_model import TritonPythonModel  # noqa: E402, F401
'''


def model_config(config: RunConfig, triton: TritonConfig) -> str:
    """The text of config.pbtxt. Its parameters are the settings that are not the default."""
    inputs = [
        _tensor(
            name,
            OTHER_TYPES.get(name) or TRITON_TYPES[tensor.dtype],
            [int(size) if size.isdigit() else -1 for size in tensor.shape],
            is_optional=name not in REQUIRED,
        )
        for name, tensor in TENSORS.items()
    ]
    inputs.append(_tensor(STOP, "BOOL", [1], is_optional=True))
    inputs.append(_tensor(NUM_SEQUENCES, "INT32", [1], is_optional=True))
    outputs = [_tensor(name, dtype, dims) for name, (dtype, dims) in OUTPUTS.items()]
    return (
        f'name: {_text(triton.triton_model_name)}\nbackend: "python"\nmax_batch_size: {MAX_PROMPTS}\n'
        f"model_transaction_policy {{ decoupled: {str(triton.decoupled_mode).lower()} }}\n"
        "instance_group [ { count: 1, kind: KIND_CPU } ]\n"
        f"input [\n{_list(inputs)}\n]\noutput [\n{_list(outputs)}\n]\n"
        + "".join(
            f"parameters {{ key: {_text(name)}, value {{ string_value: {_text(value)} }} }}\n"
            for name, value in _parameters(config, triton).items()
        )
    )


def _tensor(name: str, dtype: str, dims: list[int], is_optional: bool = False) -> str:
    optional = ", optional: true" if is_optional else ""
    return f'  {{ name: "{name}", data_type: TYPE_{dtype}, dims: {dims}{optional} }}'


def _list(items: list[str]) -> str:
    return ",\n".join(items)


def _text(value: str) -> str:
    """`value` as a text of protobuf."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _parameters(config: RunConfig, triton: TritonConfig) -> dict[str, str]:
    given = [(one, getattr(config, one.name)) for one in settings()]
    given += [(one, getattr(triton, one.name)) for one in triton_settings()]
    return {
        one.name: "none" if value is None else str(value) for one, value in given if value != one.command_line_default
    }


def read_parameters(model_config: Mapping[str, Any]) -> tuple[RunConfig, TritonConfig]:
    """The settings in the parameters of config.pbtxt, which Triton gives as JSON. InputError if one is wrong."""
    found = {name: value["string_value"] for name, value in model_config.get("parameters", {}).items()}
    own = {one.name for one in fields(TritonConfig)}
    triton = TritonConfig(**{name: value for name, value in found.items() if name in own})
    return from_mapping({name: value for name, value in found.items() if name not in own}, command_line=True), triton
