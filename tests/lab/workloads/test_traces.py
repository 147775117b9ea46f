"""Traces in each of their forms, and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.errors import ConfigError
from octavo.lab.workloads import traces
from octavo.lab.workloads.traces import Trace, read_trace

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""
#: Of 2024: with an offset, not in order, and saved with a byte order mark and the line ends of Windows.
AZURE_2024 = """\
\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r
2024-05-10 00:00:00.509930+00:00,2162,5\r
2024-05-10 02:00:00.009930+02:00,2399,6\r
"""


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def columns(trace: Trace) -> tuple[list[float], list[int], list[int]]:
    return trace.at.tolist(), trace.inputs.tolist(), trace.outputs.tolist()


def test_the_public_azure_traces(tmp_path: Path) -> None:
    at, inputs, outputs = columns(read_trace(write(tmp_path, AZURE_2023)))
    assert at == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)
    assert (inputs, outputs) == ([374, 396, 879], [44, 109, 55])
    at, inputs, outputs = columns(read_trace(write(tmp_path, AZURE_2024)))
    assert at == pytest.approx([0, 0.5], abs=1e-5)
    assert (inputs, outputs) == ([2399, 2162], [6, 5])


@pytest.mark.parametrize(
    "header",
    ["arrival_time,input_tokens,output_tokens", "Arrival, Input_Len, Output_Len", "arrival,input_tokens,output_tokens"],
)
def test_columns_in_seconds(tmp_path: Path, header: str) -> None:
    trace = read_trace(write(tmp_path, f"\n{header}\n12.5,7,3\n\n11,8,4\n"))
    assert columns(trace) == ([0.0, 1.5], [8, 7], [4, 3])


def test_columns_in_any_order_among_others(tmp_path: Path) -> None:
    text = 'output_tokens,note,timestamp,input_tokens\n3,"a, b",1,9\n'
    assert columns(read_trace(write(tmp_path, text))) == ([0.0], [9], [3])


def test_lines_of_json(tmp_path: Path) -> None:
    lines = ['{"timestamp": 8, "input_len": 5, "output_len": 3}', '{"timestamp": 7, "prompt": "x y", "output_len": 1}']
    lines += ["", '{"timestamp": 9.5, "prompt": [4, 5], "output_len": 2}']
    trace = read_trace(write(tmp_path, "\n".join(lines), "trace.jsonl"))
    assert columns(trace) == ([0.0, 1.0, 2.5], [0, 5, 2], [1, 3, 2])
    assert trace.prompts == {0: "x y", 2: (4, 5)}


def test_the_first_lines_of_a_file(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, AZURE_2023 + "no request"), most=3)) == 3


@pytest.mark.parametrize(
    "line",
    ["soon,3,4", "1,0,4", "1,3,0", "1,3", "1,3,4.5", "inf,3,4", "1,3,99999999999", "2023-13-16 18:15:46,3,4"],
)
def test_a_wrong_line_of_csv_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, f"arrival_time,input_tokens,output_tokens\n\n1,2,3\n{line}\n")
    with pytest.raises(ConfigError, match="line 4: a request has a time"):
        read_trace(path)


@pytest.mark.parametrize(
    "line", ['{"timestamp": 1, "output_len": 3}', '{"prompt": "x", "output_len": 0}', '{"prompt": 3}', "no json", "[]"]
)
def test_a_wrong_line_of_json_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(write(tmp_path, '{"prompt": [1, 2], "output_len": 1}\n' + line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no request"),
        ("arrival_time,input_tokens,output_tokens\n", "holds no request"),
        ("a,b,c\n1,2,3\n", "line 1: needs a header"),
        ("1,2,3\n", "line 1: needs a header"),
    ],
)
def test_no_requests_and_no_header(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path, text))


def test_what_is_no_text_or_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")
    monkeypatch.setattr(traces, "MOST_LINES", 2)
    with pytest.raises(ConfigError, match="more than 2 requests"):
        read_trace(write(tmp_path, AZURE_2023))
    monkeypatch.setattr(traces, "MOST_CHARACTERS", 30)
    with pytest.raises(ConfigError, match="line 1: longer than 30"):
        read_trace(write(tmp_path, AZURE_2023))
