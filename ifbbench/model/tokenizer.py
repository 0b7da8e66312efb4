"""A model's tokenizer, from tokenizer.json or from its GGUF file, with the package `tokenizers`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ifbbench.errors import InputError
from ifbbench.model.gguf_file import GgufFile
from ifbbench.model.named_models import GGUF_SUFFIX, weights_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

TOKENIZER_FILE = "tokenizer.json"
# `tokenizer.ggml.token_type` of special tokens such as `<|endoftext|>`.
CONTROL_TOKEN = 3
# The pattern that splits text into words before pairs are merged, by `tokenizer.ggml.pre`. From the tokenizer.json of
# these models.
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {"llama-bpe": rf"{_WORD}|\p{{N}}{{1,3}}|{_OTHER}", "qwen2": rf"{_WORD}|\p{{N}}|{_OTHER}"}
SINGLE_DIGITS = "smollm"


class TextTokenizer:
    """Encodes text to token ids and decodes them."""

    def __init__(self, tokenizer: "Tokenizer", first_tokens: tuple[int, ...] = ()) -> None:
        """first_tokens: put before every text, where `tokenizer` does not add them itself."""
        self._tokenizer = tokenizer
        self._first_tokens = first_tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects at the beginning."""
        return [*self._first_tokens, *self._tokenizer.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids)))


def load_tokenizer(model: str) -> TextTokenizer:
    """The tokenizer of the model `model`, a value of `--model`.

    InputError if the model has none, or the package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError("text needs the Python package tokenizers. Run `pip install ifbbench[gguf]`.") from error
    path = weights_path(model)
    if path is None:
        raise InputError(f"--model {model}: has no tokenizer, because its weights are random. Choose a model with one.")
    if path.suffix == GGUF_SUFFIX:
        return _from_gguf(GgufFile(path))
    file = path / TOKENIZER_FILE
    if not file.is_file():
        raise InputError(f"--model: {path} has no {TOKENIZER_FILE}. Expected the tokenizer beside the weights; "
                         "download it too.")
    try:
        return TextTokenizer(Tokenizer.from_file(str(file)))
    except Exception as error:  # the package raises no narrower class
        raise InputError(f"{file}: cannot be read as a tokenizer ({error}). Download the file again.") from error


def _from_gguf(file: GgufFile) -> TextTokenizer:
    """Byte-level byte-pair encoding with the vocabulary and merges of the file."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    kind = file.value("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InputError(f"{file.path}: tokenizer.ggml.model is {kind!r}; expected gpt2 (byte-pair encoding). Choose "
                         f"a model of which you have the {TOKENIZER_FILE}.")
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, type in zip(tokens, types, strict=True) if type == CONTROL_TOKEN]
    )
    adds_bos = file.value("tokenizer.ggml.add_bos_token", False)
    return TextTokenizer(tokenizer, (file.value("tokenizer.ggml.bos_token_id"),) if adds_bos else ())


def _pre_tokenizer(file: GgufFile) -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    rule = file.value("tokenizer.ggml.pre")
    if rule == SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if rule not in WORD_PATTERNS:
        raise InputError(f"{file.path}: tokenizer.ggml.pre is {rule!r}; expected one of "
                         f"{', '.join([SINGLE_DIGITS, *WORD_PATTERNS])}. Choose another model.")
    split = pre_tokenizers.Split(Regex(WORD_PATTERNS[rule]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
