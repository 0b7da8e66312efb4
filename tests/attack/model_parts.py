"""Tries of what comes with models: tokenizers, chat templates and LoRA adapters, with changed fields or bytes."""

import asyncio
import json
import random
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from ifbbench.serving.config import ServerConfig
from ifbbench.settings.config import RunConfig
from tests.attack import hostile
from tests.attack.commands import Outcomes, fresh
from tests.attack.inputs import SIMULATED, json_lines
from tests.attack.models import MODEL
from tests.attack.servers import ENGINE, answers

WORDS = ("[UNK]", "a", "b", "he", "llo", "Ġx")
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 0,
            "content": "[UNK]",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: place for place, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
}
TEMPLATE = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }} {% endfor %}{{ bos_token }}"
TEMPLATES = (
    TEMPLATE,
    "{{ 1 / 0 }}",
    "{% for",
    "{{ messages.x.y.z }}",
    "{{ raise_exception('no') }}",
    "",
    "{{ messages[99]['a'] }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ messages.__class__.__mro__ }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% include 'x' %}",
    "{{ ''|foo }}",
    "{{ 'x' + 1 }}",
    "{{ messages|tojson }}",
    "{{ '%d'|format('x') }}",
    "{{ [1]|random|int|string|center(10**12) }}",
    "{{ {}[[]] }}",
)
TOKENIZER_CONFIG: dict[str, Any] = {
    "chat_template": TEMPLATE,
    "bos_token": "a",
    "eos_token": {"content": "b"},
    "pad_token": None,
}
PEFT: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "bias": "none",
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "use_rslora": False,
}


def tokenizer_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A tokenizer.json for a trace of texts, or of a server's model with its chat template."""
    tokenizer: Any = TOKENIZER if draw.random() < 0.3 else hostile.changed(TOKENIZER, draw)
    content = json.dumps(tokenizer).encode("utf-8", "surrogatepass")
    if draw.random() < 0.2:
        content = hostile.changed_bytes(content, draw)
    model = folder / "model"
    model.mkdir()
    (model / "tokenizer.json").write_bytes(content)
    if draw.random() < 0.5:
        trace = folder / "trace.jsonl"
        trace.write_bytes(json_lines([{"text": text, "n": 3} for text in ("a b he", "x", draw.choice(hostile.TEXTS))]))
        outcomes.attack(
            [
                "run",
                str(trace),
                *SIMULATED,
                "--columns",
                "prompt=text,output_len=n",
                "--tokenizer",
                str(model / "tokenizer.json"),
                "--output",
                str(fresh(folder, "run")),
            ],
            repr(content[:500]),
        )
        return
    (model / "config.json").write_text(json.dumps(MODEL))
    config = TOKENIZER_CONFIG | {"chat_template": draw.choice(TEMPLATES)}
    shown: Any = hostile.changed(config, draw) if draw.random() < 0.5 else config
    (model / "tokenizer_config.json").write_text(json.dumps(shown))
    if draw.random() < 0.2:
        (model / "chat_template.jinja").write_bytes(hostile.changed_bytes(TEMPLATE.encode(), draw))
    outcomes.call(lambda: asyncio.run(_chat(ENGINE.with_values(model=str(model)))), f"{shown} {content[:500]!r}")


async def _chat(config: RunConfig) -> int:
    bodies: list[tuple[str, Any]] = [
        ("chat/completions", {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 3}),
        ("completions", {"prompt": "he llo", "max_tokens": 2, "stop": ["b"]}),
    ]
    content = [(path, json.dumps(body).encode()) for path, body in bodies]
    return await answers(config, ServerConfig(), content)


@cache
def _adapter() -> bytes:
    import torch
    from safetensors.torch import save

    name = "base_model.model.model.layers.1.self_attn.q_proj.lora"
    return save({f"{name}_A.weight": torch.ones(4, 256), f"{name}_B.weight": torch.ones(256, 4)})


def adapter_try(outcomes: Outcomes, folder: Path, draw: random.Random) -> None:
    """A LoRA adapter as PEFT saves it, or as arrays of TensorRT-LLM."""
    adapter, kind = folder / "adapters" / draw.choice(("0", "7", "a", "-1", "9" * 30)), draw.random()
    adapter.mkdir(parents=True)
    note = ""
    if kind < 0.75:
        config: Any = PEFT if kind > 0.4 else hostile.changed(PEFT, draw)
        (adapter / "adapter_config.json").write_bytes(json.dumps(config).encode("utf-8", "surrogatepass"))
        content = _adapter()
        if kind > 0.4:
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(hostile.changed(json.loads(content[8 : 8 + size]), draw)).encode("utf-8", "replace")
            content = len(header).to_bytes(8, "little") + header + content[8 + size :]
        if draw.random() < 0.15:
            content = hostile.changed_bytes(content, draw)
        (adapter / "adapter_model.safetensors").write_bytes(content)
        note = f"{config} {content[:300]!r}"
    else:
        rows: Any = np.array([[1, 0, 2]])
        weights: Any = np.ones((1, 4096), np.float32)
        if draw.random() < 0.6:
            rows = draw.choice(
                (
                    rows[0],
                    rows.astype(float),
                    np.array([[1, draw.choice((-1, 2, 2**31)), 2]]),
                    np.array([[draw.randrange(-2, 20), 0, draw.choice((-1, 0, 1, 99, 2**40))]]),
                    np.array([["a"]]),
                    np.zeros((0, 3), int),
                    np.array([[1, 0, 2]] * 2),
                )
            )
        if draw.random() < 0.3:
            weights = draw.choice((weights[0], weights.astype(int), weights[:, :5], weights * np.nan, np.ones((2, 9))))
        for name, array in (("model.lora_weights", weights), ("model.lora_config", rows)):
            file = BytesIO()
            np.save(file, array)
            saved = file.getvalue()
            damaged = hostile.changed_bytes(saved, draw) if draw.random() < 0.2 else saved
            (adapter / f"{name}.npy").write_bytes(damaged)
        note = f"{rows} {weights.shape}"
    trace = folder / "trace.jsonl"
    trace.write_bytes(json_lines([{"arrival_s": 0, "prompt_len": 3, "output_len": 2, "lora_task_id": 0}]))
    device = draw.choice(("cpu", "sim:h100-sxm"))
    outcomes.attack(
        [
            "run",
            str(trace),
            "--device",
            device,
            "--lora_dir",
            str(folder / "adapters"),
            "--quiet",
            "--max_batch_size",
            "2",
            "--max_tokens_in_paged_kvcache",
            "64",
            "--lora_host_cache_bytes",
            "1000000",
            "--output",
            str(fresh(folder, "run")),
        ],
        note,
    )
