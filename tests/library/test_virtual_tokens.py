"""Prompts with virtual tokens give the tokens of transformers for the same embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ifbbench import InferenceRequest, SamplingParams
from tests.library.client import Client
from tests.library.managers import check_nothing_leaked, manager_of
from tests.torch.transformers_reference import Reference, checkpoint

VOCABULARY, HIDDEN = 199, 48
WAYS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"enable_chunked_context": True, "max_num_tokens": 8, "context_chunk_unit": 4},
    "pauses and chunks": {
        "enable_chunked_context": True,
        "max_num_tokens": 16,
        "context_chunk_unit": 4,
        "policy": "max_utilization",
        "kv_cache_config": {"max_tokens": 48},
    },
    "reuse": {"kv_cache_config": {"max_tokens": 400, "enable_block_reuse": True}, "max_batch_size": 2},
    "overlap": {"enable_trt_overlap": True},
    "async": {"overlap": "async"},
    "drafts": {"draft_ngram": 2},
    "static": {"model_type": "V1"},
}


def tables() -> list[np.ndarray]:
    """Three tables; the last is the first with one number changed."""
    random = np.random.default_rng(3)
    first, second = (random.normal(size=(5, HIDDEN)).astype(np.float32) for _ in range(2))
    last = first.copy()
    last[0, 0] += 4.0
    return [first, second, last]


def requests_with_tables() -> list[InferenceRequest]:
    """The same prompt with each table twice, other prompts, and one without virtual tokens."""
    random = np.random.default_rng(4)
    common = [VOCABULARY + 2, VOCABULARY, VOCABULARY + 4, *random.integers(0, VOCABULARY, 13).tolist()]
    prompts = [(common, table) for table in (0, 1, 2, 0, 1, 2)]
    for index in range(4):
        prompt = random.integers(0, VOCABULARY + 5, int(random.integers(1, 18))).tolist()
        prompts.append((prompt, index % 3))
    found = tables()
    requests = [
        InferenceRequest(index, prompt, 9, prompt_embedding_table=found[table], exclude_input_from_output=True)
        for index, (prompt, table) in enumerate(prompts)
    ]
    plain = [token % VOCABULARY for token in common]
    return [*requests, InferenceRequest(len(requests), plain, 9, exclude_input_from_output=True)]


def expected(reference: Reference, request: InferenceRequest, **options: Any) -> list[int]:
    ids = np.asarray(request.input_ids)
    embeddings = reference.get_input_embeddings()(torch.from_numpy(np.minimum(ids, VOCABULARY - 1)).long()).detach()
    for place in np.flatnonzero(ids >= VOCABULARY):
        assert request.prompt_embedding_table is not None
        embeddings[place] = torch.from_numpy(request.prompt_embedding_table[ids[place] - VOCABULARY])
    tokens = reference.generate(
        inputs_embeds=embeddings[None],
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return list(tokens[0].tolist())


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_the_embeddings(tmp_path: Path, way: str) -> None:
    _, reference = checkpoint(tmp_path)
    requests = requests_with_tables()
    client = Client(requests)
    manager = manager_of(client, str(tmp_path), start=False, **{"device": "cpu", **WAYS[way]})
    manager.close()
    assert [answer.error for answer in client.answers] == [""] * len(requests)
    for answer in client.answers:
        assert answer.tokens == expected(reference, answer.request)
    assert len({tuple(answer.tokens) for answer in client.answers[:3]}) == 3
    if way.startswith("pauses"):
        assert sum(line["Paused Requests"] for line in client.statistics) > 0
    if way == "reuse":
        # The same table a second time: three blocks of the 15 tokens before the last, and a part of a fourth.
        assert manager.kv_cache.counters.reused >= 3 * 4
    check_nothing_leaked(manager)


def test_gpt2_adds_positions_to_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=128, initializer_range=0.15
    )
    reference = transformers.GPT2LMHeadModel(config).float().eval()
    reference.save_pretrained(tmp_path)
    requests = requests_with_tables()[:3]
    client = Client(requests)
    manager_of(client, str(tmp_path), start=False, device="cpu").close()
    assert [answer.tokens for answer in client.answers] == [expected(reference, request) for request in requests]


def test_beams_and_penalties_leave_virtual_tokens_out(tmp_path: Path) -> None:
    _, reference = checkpoint(tmp_path)
    prompt = [VOCABULARY + 1, VOCABULARY, 7, VOCABULARY + 3, 9]
    request = InferenceRequest(
        1,
        prompt,
        8,
        beam_width=3,
        prompt_embedding_table=tables()[0],
        exclude_input_from_output=True,
        sampling=SamplingParams(presence_penalty=0.5),
    )
    client = Client([request])
    manager_of(client, str(tmp_path), start=False, max_beam_width=3, device="cpu").close()
    assert (client.answers[0].error, len(client.answers[0].tokens)) == ("", 8)
    client = Client(
        [
            InferenceRequest(
                1, prompt, 8, beam_width=3, prompt_embedding_table=tables()[0], exclude_input_from_output=True
            )
        ]
    )
    manager_of(client, str(tmp_path), start=False, max_beam_width=3, device="cpu").close()
    assert client.answers[0].tokens == expected(reference, client.answers[0].request, num_beams=3)


@pytest.mark.parametrize("extra_ids", [None, [7] * 16])
def test_blocks_are_shared_only_with_equal_tables(tmp_path: Path, extra_ids: list[int] | None) -> None:
    """Also where the client gives extra ids of its own."""
    checkpoint(tmp_path)
    first, second, _ = tables()
    prompt = [VOCABULARY + 1, *range(15)]
    reused = []
    for other in (first, second):
        client = Client()
        manager = manager_of(
            client,
            str(tmp_path),
            start=False,
            device="cpu",
            max_batch_size=1,
            kv_cache_config={"max_tokens": 160, "enable_block_reuse": True},
        )
        for request_id, table in enumerate((first, other)):
            client.submit(
                InferenceRequest(request_id, prompt, 2, prompt_embedding_table=table, token_extra_ids=extra_ids)
            )
            while manager.step():
                pass
        reused.append(manager.kv_cache.counters.reused)
        manager.close()
    assert reused == [4, 0]
