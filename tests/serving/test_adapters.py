"""LoRA adapters of a server: named as models, by themselves and in one batch with the base model."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ifbbench.build.adapters import adapter_names
from ifbbench.errors import InputError
from ifbbench.replay.run import run_trace
from ifbbench.settings.config import RunConfig
from tests.serving.clients import SMALL_POOL, ServerProcess, server_process

MODELS = ["tiny", "lora-0", "lora-1"]


def ask(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    content = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/{path}", content), timeout=300) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.parametrize("fleet", [(), pytest.param(("--replicas", "2"), marks=pytest.mark.slow)])
def test_adapters_are_models(fleet: Sequence[str], tmp_path: Path) -> None:
    recorded, responses = tmp_path / "recorded", tmp_path / "responses.json"
    options = ["--device", "cpu", "--model", "tiny", "--max_seq_len", "256", "--num_loras", "2", *SMALL_POOL, *fleet]
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with server_process(*options, "--record", str(recorded)) as server, ThreadPoolExecutor(6) as threads:
        listed = ask(server, "models")["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [
            ("tiny", None),
            ("lora-0", "tiny"),
            ("lora-1", "tiny"),
        ]
        assert ask(server, "models/lora-1")["id"] == "lora-1"
        answers = list(threads.map(lambda name: ask(server, "completions", model=name, **body), MODELS * 2))
        assert [answer["model"] for answer in answers] == MODELS * 2
        found = [answer["choices"][0]["token_ids"] for answer in answers]
        assert found[:3] == found[3:]
        assert len({tuple(tokens) for tokens in found}) == 3
        assert ask(server, "completions", **body)["choices"][0]["token_ids"] == found[0]
        for name in ("lora-2", ""):
            with pytest.raises(urllib.error.HTTPError) as raised:
                ask(server, "completions", model=name, **body)
            assert raised.value.code == 404
            assert "this server has tiny, lora-0, lora-1" in json.load(raised.value)["error"]["message"]
        assert server.end()[0] == 0
    run_trace(
        str(recorded),
        RunConfig(
            device="cpu",
            max_seq_len=256,
            num_loras=2,
            time_scale=0.0,
            responses_json=str(responses),
            output=str(tmp_path / "replayed"),
        ),
    )
    replayed = [row["response_tokens"] for row in json.loads(responses.read_text())]
    assert sorted(replayed) == sorted([*found, found[0]])


def test_adapters_in_files_have_the_names_of_their_folders(tmp_path: Path) -> None:
    for name in ("german", "code"):
        (tmp_path / name).mkdir()
    assert adapter_names(RunConfig(lora_dir=str(tmp_path))) == {"code": 0, "german": 1}
    (tmp_path / "german" / "adapter_config.json").touch()
    assert adapter_names(RunConfig(lora_dir=str(tmp_path / "german"))) == {"german": 0}
    assert adapter_names(RunConfig()) == {}
    with pytest.raises(InputError, match="--lora_dir"):
        adapter_names(RunConfig(lora_dir=str(tmp_path / "missing")))


def test_a_model_is_not_named_like_an_adapter() -> None:
    options = ["--device", "sim:h100-sxm", "--model", "llama-3.1-8b", "--num_loras", "1"]
    with (
        pytest.raises(AssertionError, match="Error: --served_model_name: lora-0 is also the name of an adapter"),
        server_process(*options, "--served_model_name", "lora-0"),
    ):
        pass
