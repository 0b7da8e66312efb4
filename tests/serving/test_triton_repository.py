"""The model repository of Triton: tensors, settings, and what is wrong before Triton starts."""

import importlib.util
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.serving.triton_repository import TritonConfig, model_config, read_parameters
from ifbbench.serving.triton_server import reserved_ports, serve_triton
from ifbbench.settings.config import RunConfig

IP_LOCAL_PORT_RANGE = 51  # the ports from which the kernel chooses one for a socket
# Of the model tensorrt_llm of tensorrtllm_backend: data type and dimensions.
INPUTS = {
    "input_ids": "INT32 -1",
    "input_lengths": "INT32 1",
    "request_output_len": "INT32 1",
    "draft_input_ids": "INT32 -1",
    "draft_logits": "FP32 -1 -1",
    "end_id": "INT32 1",
    "pad_id": "INT32 1",
    "stop_words_list": "INT32 2 -1",
    "bad_words_list": "INT32 2 -1",
    "embedding_bias": "FP32 -1",
    "beam_width": "INT32 1",
    "temperature": "FP32 1",
    "runtime_top_k": "INT32 1",
    "runtime_top_p": "FP32 1",
    "len_penalty": "FP32 1",
    "early_stopping": "BOOL 1",
    "repetition_penalty": "FP32 1",
    "min_length": "INT32 1",
    "presence_penalty": "FP32 1",
    "frequency_penalty": "FP32 1",
    "random_seed": "UINT64 1",
    "seed": "UINT64 1",
    "num_return_sequences": "INT32 1",
    "return_log_probs": "BOOL 1",
    "return_context_logits": "BOOL 1",
    "return_generation_logits": "BOOL 1",
    "stop": "BOOL 1",
    "streaming": "BOOL 1",
    "exclude_input_in_output": "BOOL 1",
    "prompt_embedding_table": "FP16 -1 -1",
    "prompt_table_extra_ids": "UINT64 -1",
    "prompt_vocab_size": "INT32 1",
    "lora_task_id": "UINT64 1",
    "lora_weights": "FP16 -1 -1",
    "lora_config": "INT32 -1 3",
}
OUTPUTS = {
    "output_ids": "INT32 -1 -1",
    "sequence_length": "INT32 -1",
    "cum_log_probs": "FP32 -1",
    "output_log_probs": "FP32 -1 -1",
    "context_logits": "FP32 -1 -1",
    "generation_logits": "FP32 -1 -1 -1",
    "batch_index": "INT32 1",
    "sequence_index": "INT32 1",
}


def tensors(text: str) -> dict[str, str]:
    """Type and dimensions of each tensor of config.pbtxt."""
    found = re.findall(r'name: "(\w+)", data_type: TYPE_(\w+), dims: \[(.*?)\]', text)
    return {name: f"{dtype} {dims.replace(',', '')}" for name, dtype, dims in found}


def test_the_tensors_are_those_of_the_backend() -> None:
    text = model_config(RunConfig(), TritonConfig())
    inputs, _, outputs = text.partition("\noutput [")
    assert tensors(inputs) == INPUTS
    assert tensors(outputs) == OUTPUTS
    required = [name for name in INPUTS if f'"{name}"' in text and not re.search(f'"{name}".*optional', text)]
    assert required == ["input_ids", "request_output_len"]


def test_parameters_are_the_settings() -> None:
    config = RunConfig(
        model='a "quoted" \\ name',
        max_batch_size=8,
        enable_chunked_context=False,
        slo="ttft=1s,e2e=20s",
        max_attention_window="64,128",
        temperature=0.7,
        device="sim:h100-sxm",
    )
    triton = TritonConfig(record="results/x", decoupled_mode=False, drain_timeout=2.5)
    text = model_config(config, triton)
    assert "decoupled: false" in text
    found = re.findall(r'key: ("\w+"), value { string_value: (".*") }', text)
    parameters = {json.loads(name): {"string_value": json.loads(value)} for name, value in found}
    assert read_parameters({"parameters": parameters}) == (config, triton)
    assert read_parameters({})[1] == TritonConfig()
    with pytest.raises(InputError, match="max_batch_siz"):
        read_parameters({"parameters": {"max_batch_siz": {"string_value": "8"}}})


def test_a_repository_for_a_triton_that_is_started_otherwise(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    options = ["--device", "sim:h100-sxm", "--model", "tiny", "--triton_model_name", "llm"]
    options += ["--model_repository", str(repository)]
    result = CliRunner().invoke(main, ["triton", *options])
    assert result.exit_code == 0, result.output
    assert sorted(str(path.relative_to(repository)) for path in repository.rglob("*.*")) == [
        "llm/1/model.py",
        "llm/config.pbtxt",
    ]
    assert 'key: "device", value { string_value: "sim:h100-sxm" }' in (repository / "llm/config.pbtxt").read_text()
    result = CliRunner().invoke(main, ["triton", "--model_repository", str(repository / "llm/config.pbtxt")])
    assert result.exit_code == 2


def test_errors_before_triton_starts(tmp_path: Path) -> None:
    def message(*options: str) -> str:
        result = CliRunner().invoke(main, ["triton", "--device", "sim:h100-sxm", "--model", "tiny", *options])
        assert result.exit_code == 2
        assert "Traceback" not in result.output
        return result.output

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        printed = message("--http_port", "0", "--grpc_port", port)
        assert f"--grpc_port: 127.0.0.1:{port} cannot be listened on" in printed
    printed = message("--http_port", port, "--metrics_port", port, "--grpc_port", "0")
    assert "is also that of another protocol" in printed
    assert "--http_port" in message("--http_port", "70000")
    assert "--record_lengths_only" in message("--record_lengths_only")
    free = ["--http_port", "0", "--grpc_port", "0", "--metrics_port", "0"]
    assert "nothing" in message(*free, "--model", "nothing")
    (tmp_path / "file").write_text("")
    assert "is a file" in message(*free, "--record", str(tmp_path / "file"))


def test_chosen_ports_are_reserved_until_triton_listens() -> None:
    given = TritonConfig(http_port=0, grpc_port=0, metrics_port=0)
    with reserved_ports(given) as triton:
        ports = {triton.http_port, triton.grpc_port, triton.metrics_port}
        assert len(ports) == 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as server:  # with SO_REUSEADDR, as Triton's
                assert server.getsockname()[1] == port


def test_a_chosen_port_is_not_free_for_other_programs() -> None:
    with reserved_ports(TritonConfig(http_port=0, grpc_port=0, metrics_port=0)) as triton, socket.socket() as other:
        only = (triton.http_port << 16 | triton.http_port).to_bytes(4, sys.byteorder)
        try:
            other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, only)
        except OSError:
            pytest.skip("needs Linux 6.3")
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", 0))


def test_a_missing_server_names_the_extra(monkeypatch) -> None:
    monkeypatch.setattr("ifbbench.serving.triton_server.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'ifbbench\[triton\]'"):
        serve_triton(RunConfig(device="null"), TritonConfig(http_port=0, grpc_port=0, metrics_port=0))


@pytest.mark.skipif(importlib.util.find_spec("pytriton") is None, reason="pytriton is not installed")
def test_a_python_without_a_shared_library_is_refused(monkeypatch) -> None:
    config, triton = RunConfig(device="null"), TritonConfig(http_port=0, grpc_port=0, metrics_port=0)
    names = {"INSTSONAME": "python.a"}
    monkeypatch.setattr("ifbbench.serving.triton_server.sysconfig.get_config_vars", lambda: names)
    with pytest.raises(InputError, match="no shared library libpython"):
        serve_triton(config, triton)
