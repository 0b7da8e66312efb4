"""From text to token ids and back, with the package `tokenizers`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ifbbench.errors import InputError
from ifbbench.model.gguf_file import GgufFile
from ifbbench.model.model_path import GGUF_SUFFIX, weights_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

TOKENIZER_FILE = "tokenizer.json"
# What `tokenizer.ggml.token_type` says of tokens that stand for nothing in a text, as `<|endoftext|>`.
CONTROL_TOKEN = 3
# How texts are cut into words before pairs are merged, by `tokenizer.ggml.pre`. Those of the models' tokenizer.json.
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {"llama-bpe": rf"{_WORD}|\p{{N}}{{1,3}}|{_OTHER}", "qwen2": rf"{_WORD}|\p{{N}}|{_OTHER}"}
DIGITS_APART = "smollm"


class TextTokenizer:
    """The tokenizer that comes with a model."""

    def __init__(self, tokenizer: "Tokenizer", first_tokens: tuple[int, ...] = ()) -> None:
        """first_tokens: those that every text begins with, where `tokenizer` does not add them itself."""
        self._tokenizer = tokenizer
        self._first_tokens = first_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special ones that the model expects at its beginning."""
        return [*self._first_tokens, *self._tokenizer.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones left out."""
        return str(self._tokenizer.decode(list(ids)))


def load_tokenizer(model: str) -> TextTokenizer:
    """The tokenizer of the model that `--model` names: its tokenizer.json, or the one in its GGUF file.

    InputError if it has none, or the package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("text needs the Python package tokenizers. Run `pip install ifbbench[gguf]`.") from error
    path = weights_path(model)
    if path is None:
        raise InputError(f"--model {model}: has no tokenizer, for its weights are random. Choose a model with one.")
    if path.suffix == GGUF_SUFFIX:
        return _from_gguf(GgufFile(path))
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise InputError(f"--model: {path} has no {TOKENIZER_FILE}. Expected the tokenizer beside the weights; "
                         "download it too.")
    try:
        return TextTokenizer(Tokenizer.from_file(str(file)))
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{file}: cannot be read as a tokenizer ({error}). Download the file again.") from error


def _from_gguf(file: GgufFile) -> TextTokenizer:
    """Byte-pair encoding over bytes, made of the file's own vocabulary and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    kind = file.value("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InputError(f"{file.path}: tokenizer.ggml.model is {kind!r}; expected gpt2 (byte-pair encoding). Choose "
                         f"a model of which you have the {TOKENIZER_FILE}.")
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _words(file)
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, type in zip(tokens, types, strict=True) if type == CONTROL_TOKEN]
    )
    begins = file.value("tokenizer.ggml.add_bos_token", False)
    return TextTokenizer(tokenizer, (file.value("tokenizer.ggml.bos_token_id"),) if begins else ())


def _words(file: GgufFile) -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    rule = file.value("tokenizer.ggml.pre")
    if rule == DIGITS_APART:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if rule not in WORDS:
        raise InputError(f"{file.path}: tokenizer.ggml.pre is {rule!r}; expected one of "
                         f"{', '.join([DIGITS_APART, *WORDS])}. Choose another model.")
    words = pre_tokenizers.Split(Regex(WORDS[rule]), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
