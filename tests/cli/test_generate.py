"""`ifbbench generate`, on a small GGUF file with a tokenizer."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ifbbench.cli.main import main
from tests.torch.model.gguf_writing import write_gguf
from tests.torch.transformers_reference import family_checkpoint

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", "--device", "cpu", *arguments])


def test_every_prompt_is_continued(tmp_path: Path) -> None:
    _, reference = family_checkpoint(tmp_path, "Llama")
    write_gguf(tmp_path / "model.gguf", reference, "llama")
    arguments = ("--model", str(tmp_path / "model.gguf"), "--max_new_tokens", "5", "he", "12 he")
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    first, second = result.output.splitlines()
    assert first.startswith("he")
    assert second.startswith("12 he")
    assert run(*arguments).output == result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny", "he"], "tiny: has no tokenizer"),
        (["--device", "null", "he"], "null runs no model"),
        (["--device", "sim:h100-sxm", "--model", "tiny", "he"], "sim:h100-sxm runs no model"),
        (["--model", "qwen3-0.6b", "he"], "qwen3-0.6b: has no tokenizer"),
        ([], "Missing argument"),
    ],
)
def test_bad_input(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
