"""Any CSV or JSON lines by naming its columns, and times in any unit."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ifbbench.cli.main import main
from ifbbench.errors import InputError
from ifbbench.workload.formats import ReadOptions
from ifbbench.workload.reading import read_trace
from ifbbench.workload.trace import Trace

LENGTHS = "prompt_len=in,output_len=out"


def read(tmp_path: Path, content: str, columns: str) -> Trace:
    (tmp_path / "file").write_text(content)
    return read_trace(tmp_path / "file", options=ReadOptions(columns=columns))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_lengths_alone(tmp_path: Path, separator: str) -> None:
    trace = read(tmp_path, "in,other,out\n5,x,6\n7,,8\n".replace(",", separator), LENGTHS)
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in trace] == [(0.0, 5, 6), (0.0, 7, 8)]


@pytest.mark.parametrize(
    ("field", "times", "arrivals"),
    [
        ("arrival_s", (2.5, 4), [2.5, 4.0]),
        ("arrival_ms", (2500, 4000), [2.5, 4.0]),
        ("arrival_us", (2_500_000, 4_000_000), [2.5, 4.0]),
        ("arrival_ns", (2_500_000_000, 4_000_000_000), [2.5, 4.0]),
        ("arrival_s", (1759312800.25, 1759312801.5), [0.0, 1.25]),
        ("arrival_ms", (1759312800250, 1759312801500), [0.0, 1.25]),
        ("arrival_s", ("2025-10-01T10:00:00.25Z", "2025-10-01T12:00:01.5+02:00"), [0.0, 1.25]),
        ("arrival_ms", ("2025-10-01 10:00:00", "2025-10-01 10:00:01.25"), [0.0, 1.25]),
        ("arrival_s", ("1.2e-5", "2e-4"), [1.2e-5, 2e-4]),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "json lines"])
def test_units_of_time(tmp_path: Path, field: str, times: tuple[object, ...], arrivals: list[float], kind: str) -> None:
    rows = [{"t": time, "in": 3, "out": 4} for time in times]
    lines = ["t,in,out", *(f"{row['t']},3,4" for row in rows)] if kind == "csv" else list(map(json.dumps, rows))
    trace = read(tmp_path, "\n".join(lines), f"{LENGTHS},{field}=t")
    assert [one.arrival_s for one in trace] == arrivals


def test_every_field(tmp_path: Path) -> None:
    header, row = "n,p,q,l,c,m,in,out", "9,what is this,0.25,3,chat,64,1,6"
    columns = "request_id=n,prompt=p,priority=q,lora_task_id=l,class=c,max_new_tokens=m,output_len=out"
    (request,) = read(tmp_path, f"{header}\n{row}\n", columns)
    assert (request.request_id, request.prompt_len, request.priority, request.lora_task_id) == (9, 3, 0.25, 3)
    assert (request.request_class, request.max_new_tokens, request.output_len) == ("chat", 64, 6)


def test_quoted_fields_over_several_lines_are_found_again(tmp_path: Path) -> None:
    content = 'p,out,c\n"two\nlines, and more",6,"a\nb"\nshort,7,c\n'
    trace = read(tmp_path, content, "prompt=p,output_len=out,class=c")
    assert [(one.prompt_len, one.output_len, one.request_class) for one in trace] == [(5, 6, "a\nb"), (2, 7, "c")]


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ("prompt_len", "--columns has 'prompt_len'; expected FIELD=COLUMN"),
        ("prompt_len=", "--columns has 'prompt_len='; expected FIELD=COLUMN"),
        ("prompt_length=in,output_len=out", "the field 'prompt_length'.* Did you mean prompt_len"),
        ("prompt_len=inn,output_len=out", "the column 'inn'; the file has in, out, t. Did you mean in?"),
        ("output_len=out", "needs prompt_len .* or prompt"),
        ("prompt_len=in,prompt=t,output_len=out", "one of the two"),
        ("prompt_len=in", "needs output_len"),
        (f"{LENGTHS},arrival_s=t,arrival_ms=t", "several columns of arrivals"),
        ("", "needs prompt_len"),
    ],
)
def test_bad_columns(tmp_path: Path, columns: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        read(tmp_path, "t,in,out\n0,1,2\n", columns)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("x,1,2", "t is 'x'; expected a time: a number or a text"),
        ("nan,1,2", "t is 'nan'; expected a finite number"),
        ("-1,1,2", "t is '-1'; expected a finite number of at least 0"),
        (",1,2", "t is ''; expected a time"),
        ("2025-10-01 10:00:00,1,2", "t is '2025-10-01 10:00:00'; expected a number, as in the rows before"),
        ("0,1.5,2", "in is '1.5'; expected an integer"),
        ("0,1", "out is missing"),
    ],
)
def test_bad_cells(tmp_path: Path, row: str, complaint: str) -> None:
    with pytest.raises(InputError) as raised:
        read(tmp_path, f"t,in,out\n0,1,2\n{row}\n", f"{LENGTHS},arrival_s=t")
    assert f"line 3: {complaint}" in str(raised.value)


def test_times_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 3: t is '5'; expected a time such as .*, as in the rows before"):
        read(tmp_path, "t,in,out\n2025-10-01 10:00:00,1,2\n5,1,2\n", f"{LENGTHS},arrival_s=t")


def test_columns_and_format_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in,out\n1,2\n")
    with pytest.raises(InputError, match="--columns and --trace_format exclude each other"):
        read_trace(tmp_path / "file", options=ReadOptions(columns=LENGTHS, trace_format="azure"))


def test_the_command_line_takes_columns_and_standard_input(tmp_path: Path) -> None:
    arguments = [
        "run",
        "-",
        "--columns",
        LENGTHS,
        "--device",
        "sim:h100-sxm",
        "--model",
        "llama-3.1-8b",
        "--output",
        str(tmp_path / "run"),
        "--quiet",
    ]
    result = CliRunner().invoke(main, arguments, input="in,out\n50,6\n70,8\n")
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "run" / "requests.jsonl").read_text().splitlines()) == 2
    described = json.loads((tmp_path / "run" / "run.json").read_text())["trace"]
    assert (described["name"], described["source"], described["requests"]) == ("stdin", "-", 2)


def test_fields_of_nested_objects(tmp_path: Path) -> None:
    lines = [
        {"at": 5.5, "usage": {"input": 5, "output": {"text": 6}}, "usage.cached": 1},
        {"at": 6, "usage": {"input": 7, "output": {"text": 8}}},
    ]
    content = "\n".join(map(json.dumps, lines))
    trace = read(tmp_path, content, "prompt_len=usage.input,output_len=usage.output.text,arrival_s=at")
    assert [(one.arrival_s, one.prompt_len, one.output_len) for one in trace] == [(5.5, 5, 6), (6.0, 7, 8)]
    with pytest.raises(InputError, match=r"line 2: usage\.cached is missing"):
        read(tmp_path, content, "prompt_len=usage.input,output_len=usage.cached")
    with pytest.raises(InputError, match=r"--columns names the column 'use\.input'; the file has at, usage"):
        read(tmp_path, content, "prompt_len=use.input,output_len=usage.output.text")


def test_a_key_with_a_dot_is_the_column(tmp_path: Path) -> None:
    trace = read(tmp_path, '{"usage.in": 5, "usage": {"in": 6, "out": 7}}', "prompt_len=usage.in,output_len=usage.out")
    assert [(one.prompt_len, one.output_len) for one in trace] == [(5, 7)]
