"""Requests and limits for tests that hold whatever they are."""

from dataclasses import dataclass

from hypothesis import strategies as st

from ifbbench.engine.request import Request
from ifbbench.engine.sampling_params import OutputOptions, StopConditions
from ifbbench.kv.attention_window import ceil_div
from ifbbench.schedulers.limits import BatchingConfig
from ifbbench.schedulers.tensorrt_llm.policies import POLICY_CLASSES
from tests.engine.engine import token_of, with_tokens


@dataclass(frozen=True)
class Wish:
    """A request to be made; `end` is the position of the output token that ends it early, if it gets there."""

    at: int
    prompt_len: int
    max_new_tokens: int
    output_len: int
    priority: float
    end: int | None
    is_streamed: bool = False

    def request(self, request_id: int) -> Request:
        request = Request(
            request_id,
            self.prompt_len,
            self.max_new_tokens,
            output_len=self.output_len,
            priority=self.priority,
            options=OutputOptions(streaming=self.is_streamed),
        )
        if self.end is not None:
            request.stop = StopConditions((token_of(request, self.prompt_len + self.end),))
        return with_tokens(request)


def wishes(streaming: bool = False) -> st.SearchStrategy[Wish]:
    """Any request; with `streaming`, some of them stream."""
    return st.builds(
        Wish,
        at=st.integers(0, 15),
        prompt_len=st.integers(1, 26),
        max_new_tokens=st.integers(1, 20),
        output_len=st.integers(1, 20),
        priority=st.sampled_from([0.2, 0.5, 0.5, 0.5, 0.9]),
        end=st.one_of(st.none(), st.none(), st.integers(0, 19)),
        is_streamed=st.booleans() if streaming else st.just(False),
    )


@st.composite
def configs(draw) -> BatchingConfig:
    """Limits as the engine resolves them: a chunk unit is at most max_num_tokens, without chunks a prompt is too."""
    max_seq_len = draw(st.integers(4, 45))
    max_num_tokens = draw(st.integers(1, 40))
    chunk_unit = draw(st.one_of(st.none(), st.integers(1, max_num_tokens)))
    longest = max_seq_len - 1 if chunk_unit else min(max_seq_len - 1, max_num_tokens)
    return BatchingConfig(
        policy=draw(st.sampled_from(sorted(POLICY_CLASSES))),
        max_batch_size=draw(st.integers(1, 7)),
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_input_len=longest,
        tokens_per_block=draw(st.sampled_from([1, 2, 3, 4, 8])),
        num_blocks=draw(st.integers(1, 40)),
        chunk_unit=chunk_unit,
        chunking_policy=draw(st.sampled_from(["first_come_first_served", "equal_progress"])),
    )


def is_possible(request: Request, config: BatchingConfig) -> bool:
    """Whether the engine has to take the request, by the rules of admission. Streaming has one of its own."""
    prompt = request.prompt_len
    longest = min(prompt + request.max_new_tokens, config.max_seq_len)
    return prompt <= config.max_input_len and ceil_div(longest, config.tokens_per_block) <= config.num_blocks


def expected_outputs(wish: Wish, request: Request, config: BatchingConfig) -> list[int]:
    """The tokens that the request must get, however it was scheduled."""
    prompt = wish.prompt_len
    length = min(wish.output_len, wish.max_new_tokens, config.max_seq_len - prompt)
    tokens = [token_of(request, prompt + index) for index in range(length)]
    for index, token in enumerate(tokens):
        if token in request.stop.end_tokens:
            return tokens[: index + 1]
    return tokens
