import json

import msgspec
import pytest

from pd_serve.errors import ConfigError
from pd_serve.path.record import Record
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.sim.workloads.trace import read_records, read_trace, write_trace

MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}
"""


def test_lines_of_mooncakes_own_trace_are_read():
    first, second = read_trace(MOONCAKE.splitlines())
    assert first == Arrival(at=0.0, prompt_tokens=6758, output_tokens=500, units=tuple(range(14)))
    assert (second.at, second.units) == (3.0, (0, 462))


def test_what_is_written_is_read_again():
    rows = [
        Arrival(at=0.0, prompt_tokens=513, output_tokens=1, units=(1, 2)),
        Arrival(
            at=1.2345,
            prompt_tokens=5,
            output_tokens=700,
            units=(3,),
            output_units=(4,),
            max_tokens=800,
            tenant="t",
            session="s",
            leaves_after_s=2.5,
        ),
    ]
    lines = list(write_trace(rows))
    assert list(read_trace(lines)) == rows
    assert json.loads(lines[0]) == {"timestamp": 0.0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]}


def test_a_trace_with_other_units_keeps_its_lengths_only():
    (row,) = read_trace(['{"timestamp": 1, "input_length": 40, "output_length": 2, "hash_ids": [1, 2, 3]}'], 16)
    assert (row.prompt_tokens, row.units) == (40, ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Input data was truncated"),
        ('{"timestamp": 1, "output_length": 2}', "line 2: .*input_length"),
        ('{"timestamp": 1, "input_length": "x"}', "line 2: Expected `int`"),
        ('{"timestamp": 1, "input_length": 0}', "line 2: lengths and times"),
        ('{"timestamp": -1, "input_length": 1}', "line 2: lengths and times"),
        ('{"timestamp": 0.5, "input_length": 1}', "line 2: timestamp 0.5 is before"),
    ],
)
def test_a_wrong_line_is_named(line, message):
    with pytest.raises(ConfigError, match=message):
        list(read_trace(['{"timestamp": 1, "input_length": 4, "output_length": 1}', line]))


def test_a_log_of_live_records_is_replayed():
    records = [
        Record(id="b", arrived=1012.5, tenant="t", prompt_tokens=40, max_tokens=64, n=1, outcome="ok", output_tokens=9),
        Record(id="a", arrived=1010.0, tenant="", prompt_tokens=30, max_tokens=16, n=1, outcome="shed"),
        Record(
            id="c", arrived=1013.0, tenant="", prompt_tokens=8, max_tokens=99, n=1, outcome="cancelled",
            output_tokens=3, finished_at=0.7,
        ),
    ]  # fmt: skip
    rows = read_records([msgspec.json.encode(record) for record in records])
    assert [(row.at, row.prompt_tokens, row.output_tokens, row.max_tokens) for row in rows] == [
        (0.0, 30, 1, 16), (2.5, 40, 9, 64), (3.0, 8, 3, 99),
    ]  # fmt: skip
    assert rows[1].tenant == "t"
    assert rows[2].leaves_after_s == 0.7
