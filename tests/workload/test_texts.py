"""Traces of texts: lengths by a rule, token ids by a tokenizer."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ifbbench.errors import InputError
from ifbbench.workload.formats import ReadOptions, write_trace
from ifbbench.workload.reading import read_trace
from ifbbench.workload.texts import PromptTexts, chat_text

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is so."}]
ROWS = [{"prompt": "one two three", "output_tokens": 5}, {"prompt": "one two four", "output_tokens": 5}]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer of whole words."""
    pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}
    document = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    document |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(("characters", "lengths"), [(4.0, [4, 3]), (1.0, [13, 12]), (5.5, [3, 3]), (100.0, [1, 1])])
def test_characters_per_token_round_up(texts: Path, characters: float, lengths: list[int]) -> None:
    trace = read_trace(texts, options=ReadOptions(characters_per_token=characters))
    assert [request.prompt_len for request in trace] == lengths
    assert f"each {characters:g} characters" in trace.notes[0]


def test_a_tokenizer_gives_ids(texts: Path, tokenizer: str, tmp_path: Path) -> None:
    trace = read_trace(texts, options=ReadOptions(tokenizer=tokenizer))
    assert [request.prompt_tokens for request in trace] == [(1, 2, 3), (1, 2, 0)]
    assert trace.notes == ()
    write_trace(trace, tmp_path / "ids.jsonl")
    assert list(read_trace(tmp_path / "ids.jsonl")) == list(trace)


def test_a_tokenizer_counts_answers(tokenizer: str, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two three two"}]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": turns}]))
    (request,) = read_trace(tmp_path / "chats.json", options=ReadOptions(tokenizer=tokenizer))
    assert (request.prompt_tokens, request.output_len) == ((1,), 3)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("system user assistant user", ("a\nb", "c")),
        ("system user tool assistant", ("a\nb\nc", "d")),
        ("user user assistant", ("a\nb", "c")),
        ("user assistant system user", ("a", "b")),
        ("assistant user assistant", ("a\nb", "c")),
        ("Human GPT", ("a", "b")),
        ("user bard", ("a", "b")),
        ("- -", ("a", "b")),
        ("user user", None),
        ("system user", None),
        ("system", None),
    ],
)
@pytest.mark.parametrize(
    ("name", "role", "content"), [("conversations", "from", "value"), ("conversation", "role", "content")]
)
def test_the_answer_of_a_conversation_is_known_by_its_role(
    name: str, role: str, content: str, roles: str, expected: tuple[str, str] | None, tmp_path: Path
) -> None:
    turns = [
        {role: one, content: letter} if one != "-" else {content: letter}
        for one, letter in zip(roles.split(), "abcd", strict=False)
    ]
    other = [{role: "user", content: "x"}, {role: "assistant", content: "yy"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({name: one}) + "\n" for one in (turns, other)))
    texts: list[str] = []

    class Noting(PromptTexts):
        def prompt(self, value: Any, name: str) -> tuple[int, tuple[int, ...] | None]:
            texts.append(value)
            return super().prompt(value, name)

        def output_len(self, answer: Any, name: str) -> int:
            texts.append(answer)
            return super().output_len(answer, name)

    with patch("ifbbench.workload.tool_formats.PromptTexts", Noting):
        trace = read_trace(tmp_path / "chats.jsonl")
    assert texts == [*(expected or ()), "x", "yy"]
    assert len(trace) == (2 if expected else 1)


def test_a_session_of_texts_is_tokenized_again_turn_by_turn(tokenizer: str, tmp_path: Path) -> None:
    turns = [{"text": "one", "output_length": 1}, {"text": "two three", "delay": 50, "output_length": 2}]
    (tmp_path / "sessions.jsonl").write_text(json.dumps({"turns": turns}))
    trace = read_trace(tmp_path / "sessions.jsonl", options=ReadOptions(tokenizer=tokenizer))
    assert [(one.request_id, one.arrival_s, one.prompt_tokens) for one in trace] == [(0, 0.0, (1,)), (1, 0.05, (2, 3))]


@pytest.mark.parametrize("content", [None, "", "{}", "not JSON"])
def test_a_tokenizer_that_cannot_be_read(texts: Path, tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"--tokenizer .*broken\.json: cannot be read"):
        read_trace(texts, skip_bad_rows=True, options=ReadOptions(tokenizer=str(path)))


def test_rows_without_an_output_length(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "Eight of"}\n')
    with pytest.raises(InputError, match=r"output_length is missing; .* or --default_output_len"):
        read_trace(path)
    (request,) = read_trace(path, options=ReadOptions(default_output_len=7))
    assert (request.prompt_len, request.output_len, request.max_new_tokens) == (2, 7, 7)


def test_messages_are_joined_by_role_and_content() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    assert chat_text(messages, "messages") == "system\nBe brief.\nuser\na\nb\nassistant\n\n"


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (None, "messages is missing"),
        ([], r"messages is \[\]"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"content": "x"}], r"messages\[0\].role is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is 3"),
    ],
)
def test_bad_messages(messages: object, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        chat_text(messages, "messages")


@pytest.mark.parametrize(
    ("row", "prompt_len", "output_len"),
    [
        # A length of the output says that the last message is a part of the prompt, which the server goes on from.
        ({"messages": CHAT, "output_length": 9}, 7, 9),
        ({"messages": CHAT}, 2, 3),
        ({"custom_id": "a", "body": {"messages": CHAT, "max_tokens": 9}}, 7, 9),
        ({"custom_id": "a", "body": {"messages": CHAT}}, 2, 3),
        ({"messages": [{"role": "user", "content": "Hi"}]}, None, None),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, None, None),
    ],
)
def test_the_last_message_of_a_log_is_the_answer(
    tmp_path: Path, row: dict[str, object], prompt_len: int | None, output_len: int | None
) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps(row))
    if prompt_len is None:
        with pytest.raises(InputError, match=r"output_length is missing; .* or --default_output_len"):
            read_trace(tmp_path / "log.jsonl")
        return
    (request,) = read_trace(tmp_path / "log.jsonl")
    assert (request.prompt_len, request.output_len) == (prompt_len, output_len)
