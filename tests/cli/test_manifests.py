"""`ifbbench config from` with YAML of Docker Compose and Kubernetes, files and standard input."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.settings.servers import plain_line, read_line

KUBERNETES = """
apiVersion: v1
kind: Service
metadata: {name: vllm}
---
kind: Deployment
spec:
  template:
    spec:
      initContainers:
      - {image: busybox, command: [sh, -c, echo hello]}
      containers:
      - image: vllm/vllm-openai:v0.19.1
        env:
        - {name: MODEL, value: llama-3.1-8b}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
        command: [/bin/sh, -c]
        args:
        - |
          vllm serve $(MODEL) --tensor-parallel-size 4 \\
            --max-num-seqs 128
"""
COMPOSE = """
services:
  sglang:
    image: lmsysorg/sglang:v0.5.6-cu129
    environment: {TP: 2}
    entrypoint: python3 -m sglang.launch_server
    command: >
      --model-path ${MODEL:-gpt-oss-120b}
      --tp ${TP} --port 30000
  grafana: {image: grafana/grafana, command: [--config, x]}
"""
ARGUMENTS = """
image: vllm/vllm-openai:v0.11.0
args:
- --model=llama-3.1-8b
- '--speculative-config={"method": "mtp", "num_speculative_tokens": 2}'
"""
ELSEWHERE = """
image: docker.io/vllm/vllm-openai:v0.19.1
env:
- {name: MODEL, valueFrom: {configMapKeyRef: {name: a, key: b}}}
- {name: SEQS, value: '8'}
args: [--model=$(MODEL), --max-num-seqs=$SEQS]
"""
MERGED = """
x-vllm: &vllm
  image: vllm/vllm-openai:v0.19.1
  environment: &variables {SEQS: "64", MODEL: llama-3.1-8b}
  command: --model=${MODEL} --max-num-seqs=${SEQS}
services:
  one:
    <<: *vllm
    environment: {<<: *variables, SEQS: "32"}
"""
EXTENDED = """
services:
  base:
    image: vllm/vllm-openai:v0.19.1
    environment: [SEQS=64, MODEL=llama-3.1-8b]
  one:
    extends: {service: base}
    environment: {SEQS: 32}
    command: --model=${MODEL} --max-num-seqs=${SEQS}
"""
VLLM, SGLANG = {"engine": "vllm", "model": "llama-3.1-8b"}, {"engine": "sglang", "model": "gpt-oss-120b"}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (KUBERNETES, VLLM | {"vllm_version": "0.19", "tp_size": 4, "max_batch_size": 128}),
        (COMPOSE, SGLANG | {"tp_size": 2}),
        (ARGUMENTS, VLLM | {"vllm_version": "0.15", "draft_mtp": 2}),
        (MERGED, VLLM | {"vllm_version": "0.19", "max_batch_size": 32}),
        (EXTENDED, VLLM | {"vllm_version": "0.19", "max_batch_size": 32}),
        (ELSEWHERE, VLLM | {"vllm_version": "0.19", "model": "$(MODEL)", "max_batch_size": 8}),
        (f"docker run vllm/vllm-openai:v0.{'9' * 5000} --model llama-3.1-8b", VLLM),
        ("[vllm, serve, llama-3.1-8b, --max-num-seqs, '8']", VLLM | {"max_batch_size": 8}),
        ("docker run vllm/vllm-openai:v0.32.0 --model llama-3.1-8b", VLLM),
        ("docker run --gpus all vllm/vllm-openai:latest sh -c 'vllm serve llama-3.1-8b'", VLLM),
    ],
)
def test_containers_are_read(text: str, values: dict[str, Any]) -> None:
    assert read_line(text).values == values


def test_the_version_of_an_image_is_named_with_the_one_that_is_simulated() -> None:
    assert read_line(ARGUMENTS).notes[-1].startswith("vllm/vllm-openai:v0.11.0: simulated by the rules of vLLM 0.15, ")
    assert read_line(COMPOSE).notes == [
        "lmsysorg/sglang:v0.5.6: simulated by the rules of SGLang 0.5.23, with the defaults of 0.5.23."
    ]
    assert read_line("docker run vllm/vllm-openai:v0.32.0 --model m").notes == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ARGUMENTS + "---" + KUBERNETES, "2 containers start a server"),
        ("- --model=m\n- --max-num-seqs=3", "starts no server"),
        ("services: {a: {image: nginx, command: [nginx]}}", "starts no server"),
        ("image: vllm/vllm-openai\ncommand: --model 'm", "check its quotes"),
        ("a: [", "starts no server"),
        ("a: &x [*x]", "starts no server"),
        ("[" * 3000, "starts no server"),
        ("services: {a: {extends: b}, c: {command: [vllm, serve, m]}}", "services.a.extends is 'b'; expected a serv"),
        ("services: {a: {extends: {service: b}}, b: {extends: a}}", "expected a service of this file"),
        ("services: {a: {extends: {service: b, file: c.yaml}}}", "c.yaml is another file.*`docker compose config`"),
    ],
)
def test_what_starts_no_server_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_line(text)
    result = CliRunner().invoke(main, ["config", "from", "--", text])
    assert (result.exit_code, bool(re.search(words, result.output))) == (2, True)


def test_a_line_with_json_is_no_yaml() -> None:
    line = 'vllm serve m --speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
    assert read_line(line).values["draft_mtp"] == 3
    assert plain_line(line) == line


def test_files_and_standard_input_are_read(tmp_path: Path) -> None:
    file = tmp_path / "my deployment.yaml"
    file.write_text(KUBERNETES)
    from_file = CliRunner().invoke(main, ["config", "from", str(file)])
    piped = CliRunner().invoke(main, ["config", "from", "-"], input=KUBERNETES)
    assert from_file.exit_code == 0, from_file.output
    assert from_file.stdout == piped.stdout
    config = tmp_path / "server.yaml"
    config.write_text(from_file.stdout)
    options = ["--config", str(config), "--device", "h100-sxm", "--changed", "--as", "vllm"]
    shown = CliRunner().invoke(main, ["config", "show", *options])
    assert shown.stdout == "vllm serve llama-3.1-8b --max-num-seqs 128 --tensor-parallel-size 4\n"


def test_a_file_that_is_not_there_is_named() -> None:
    result = CliRunner().invoke(main, ["config", "from", "deployment.yaml"])
    assert (result.exit_code, "deployment.yaml: there is no such file" in result.output) == (2, True)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    result = CliRunner().invoke(main, ["config", "from", str(file)])
    assert (result.exit_code, "cannot be read as text" in result.output) == (2, True)
