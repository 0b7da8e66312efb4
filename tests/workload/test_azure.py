"""Azure's CSV files of 2023 and 2024."""

from pathlib import Path

import pytest

from ifbbench.errors import InputError
from ifbbench.workload.reading import read_trace
from ifbbench.workload.recorded_formats import parse_timestamp
from ifbbench.workload.statistics import trace_statistics

RECORDED = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"


def read(tmp_path, *rows, **options):
    path = tmp_path / "azure.csv"
    path.write_bytes("\r\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)).encode())
    return read_trace(path, **options)


def test_arrivals_count_from_the_first_row(tmp_path):
    trace = read(tmp_path, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")
    assert [request.arrival_s for request in trace] == [0.0, 4.314579]
    second = trace.requests[1]
    assert (second.request_id, second.prompt_len, second.max_new_tokens, second.output_len) == (1, 396, 109, 109)


def test_rows_out_of_order(tmp_path):
    trace = read(tmp_path, *(f"2023-11-16 18:15:{second:02},1,1" for second in (5, 3, 5, 9)))
    assert [request.arrival_s for request in trace] == [0, 2, 2, 6]
    assert [request.request_id for request in trace] == [1, 0, 2, 3]


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.0099300"),
        ("2024-05-10 02:00:00+02:00", "2024-05-10 00:00:00"),
        ("2024-05-10T00:00:00Z", "2024-05-10 00:00:00.0"),
    ],
)
def test_ways_to_write_a_time(text, same):
    assert parse_timestamp(text) == parse_timestamp(same)


def test_a_tenth_of_a_microsecond_is_kept():
    assert parse_timestamp("2023-11-16 18:15:46.6805901") - parse_timestamp("2023-11-16 18:15:46.6805900") == 100


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("yesterday,1,1", "TIMESTAMP is 'yesterday'"),
        ("2023-13-16 18:15:46,1,1", "TIMESTAMP is '2023-13-16 18:15:46'"),
        ("{,1,1", "TIMESTAMP is '{'"),
        ("2023-11-16 18:15:46,1,0", "GeneratedTokens is '0'"),
        ("2023-11-16 18:15:46,1.5,1", "ContextTokens is '1.5'"),
        ("2023-11-16 18:15:46,,1", "ContextTokens is ''"),
        ("2023-11-16 18:15:46,1", "GeneratedTokens is missing"),
    ],
)
def test_bad_row(tmp_path, row, complaint):
    rows = ("2023-11-16 18:15:40,1,1", row)
    with pytest.raises(InputError) as raised:
        read(tmp_path, *rows)
    assert f"azure.csv, line 3: {complaint}" in str(raised.value)
    assert read(tmp_path, *rows, skip_bad_rows=True).skipped_rows == 1


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the recorded Azure trace beside the checkout")
def test_recorded_trace_has_its_published_figures():
    statistics = trace_statistics(read_trace(RECORDED))
    assert statistics.requests == 19_366
    assert statistics.span_s == pytest.approx(3_502, abs=0.5)
    assert statistics.request_rate_per_s == pytest.approx(5.53, abs=0.005)
    assert statistics.gap_cv == pytest.approx(1.09, abs=0.005)
    prompt, output = statistics.prompt_tokens, statistics.output_tokens
    assert [round(prompt.mean), prompt.p50, round(prompt.p99)] == [1_155, 1_020, 4_142]
    assert [round(output.mean), output.p50, round(output.p99)] == [211, 129, 601]
