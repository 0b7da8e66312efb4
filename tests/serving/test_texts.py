"""Texts: bytes as tokens, texts that grow, stop texts, chat templates."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifbbench.errors import InputError
from ifbbench.serving.texts import ByteTokenizer, ChatTemplate, GrowingText, Texts

BYTES = ByteTokenizer(4096)


def test_bytes_are_the_tokens_of_a_model_without_a_tokenizer() -> None:
    texts = Texts("llama-3.1-8b", 128_256)
    assert not texts.has_tokenizer
    assert texts.encode("é!") == [0xC3, 0xA9, ord("!")]
    assert BYTES.decode([0xC3, 0xA9, ord("!"), 300]) == "é!" + chr(ord("a") + 300 % 26)
    with pytest.raises(InputError, match="empty"):
        texts.encode("")


def test_a_chat_without_a_template_is_roles_and_contents() -> None:
    texts = Texts("tiny", 4096)
    ids = texts.encode_chat([{"role": "system", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}])
    assert BYTES.decode(ids) == "system\na\nuser\nb\nassistant\n"
    with pytest.raises(InputError, match=r"messages\[0\]"):
        texts.encode_chat([{"content": "a"}])


def test_the_template_of_a_model_directory_is_used(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.of(tmp_path)
    assert found is not None
    assert found.render([{"role": "user", "content": "hi"}]) == "<s>[user]hi[assistant]"
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InputError, match="roles must alternate"):
        refusing.render([])
    with pytest.raises(InputError, match="chat template"):
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"content": "a"}])
    assert ChatTemplate.of(tmp_path / "absent") is None


@given(st.text(max_size=30), st.lists(st.integers(1, 4), min_size=1), st.lists(st.text(min_size=1, max_size=3)))
def test_a_text_that_grows_is_the_same_in_any_steps(text: str, steps: list[int], stops: list[str]) -> None:
    ids = list(text.encode())
    growing, place = GrowingText(BYTES, stops), 0
    parts: list[str] = []
    while place < len(ids):
        size = steps[len(parts) % len(steps)]
        parts.append(growing.add(ids[place : place + size]))
        place += size
        if growing.stop is not None:
            break
    parts.append(growing.end())
    ends = [text.find(stop) for stop in stops if stop in text]
    assert (growing.stop is not None) == bool(ends)
    found = "".join(parts)
    if ends:
        # Which stop comes first depends on the steps where one lies within another.
        assert found in {text[:end] for end in ends}
    else:
        assert found == text


def test_no_part_of_a_character_is_sent() -> None:
    growing = GrowingText(BYTES)
    assert [growing.add([byte]) for byte in "€a".encode()] == ["", "", "€", "a"]


def test_what_may_be_the_beginning_of_a_stop_text_is_held_back() -> None:
    growing = GrowingText(BYTES, ["END"])
    assert [growing.add(list(part.encode())) for part in ("aE", "N", "xE")] == ["a", "", "ENx"]
    assert growing.add(list(b"NDb")) == ""
    assert growing.stop == "END"
    assert growing.end() == ""
