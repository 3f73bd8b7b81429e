"""`pd-serve sim`: files in, tables and files out."""

import msgspec
import pytest
from rich.console import Console

from pd_serve.errors import ConfigError
from pd_serve.ops.sim import ARRIVALS, WORKLOADS, Load, Outputs, Settings, overrides, sim
from pd_serve.sim.outcome import Served
from pd_serve.sim.report import Report

CONFIG = """
applications:
  - name: pd
    import_path: pd_serve.app:build
    args:
      model: {path: demo, max_model_len: 32768}
      prefill: {replicas: 2, num_gpus: 1, max_num_batched_tokens: 8192}
      decode: {replicas: 1, num_gpus: 1}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(CONFIG)
    return str(file)


def console():
    return Console(record=True, width=140)


def test_a_workload_is_simulated_and_written_down(config, tmp_path):
    outputs = Outputs(
        report=tmp_path / "report.json",
        requests=tmp_path / "requests.jsonl",
        plot=tmp_path / "run.png",
        trace=tmp_path / "trace.jsonl",
        over_time=True,
    )
    out = console()
    result = sim(config, Load(requests=60, rate=5.0), Settings(), outputs, out)
    text = out.export_text()
    assert "60 requests in" in text
    assert "60 ok" in text
    assert "TTFT" in text
    assert "ITL, decode" in text
    assert "KV in use, mean" in text
    assert "over time" in text
    assert result.outcomes == {"ok": 60}
    assert msgspec.json.decode(outputs.report.read_bytes(), type=Report) == result
    lines = outputs.requests.read_bytes().splitlines()
    assert len([msgspec.json.decode(line, type=Served) for line in lines]) == 60
    assert outputs.plot.read_bytes().startswith(b"\x89PNG")
    assert len(outputs.trace.read_text().splitlines()) == 60

    again = sim(config, Load(trace=outputs.trace), Settings(), Outputs(), console())
    assert again.ttft.count == 60
    assert again.ttft.mean == pytest.approx(result.ttft.mean, rel=0.01)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_every_workload_runs_with_every_kind_of_arrival(config, workload, arrivals):
    load = Load(workload=workload, arrivals=arrivals, requests=20, rate=2.0)
    assert sum(sim(config, load, Settings(), Outputs(), console()).outcomes.values()) == 20


def test_single_options_are_yaml_by_name():
    assert overrides(["seed=3", "slo.ttft_s=0.5", "profile=mine", "replicas={prefill: 2}"]) == {
        "seed": 3,
        "slo.ttft_s": 0.5,
        "profile": "mine",
        "replicas": {"prefill": 2},
    }
    for wrong in ("seed", "seed=["):
        with pytest.raises(ConfigError, match="seed"):
            overrides([wrong])


def test_options_come_from_a_file_and_from_single_ones(config, tmp_path):
    options = tmp_path / "options.yaml"
    options.write_text("replicas: {prefill: 1}\nseed: 5\n")
    settings = Settings(options, {"seed": 6})
    result = sim(config, Load(requests=10), settings, Outputs(), console())
    assert (result.seed, result.pools["prefill"].replicas) == (6, 1)


def test_records_of_a_live_system_are_replayed(config, tmp_path):
    records = tmp_path / "records.jsonl"
    line = '{"id": "%d", "arrived": %f, "prompt_tokens": 50, "output_tokens": 4, "max_tokens": 9, "outcome": "ok"}\n'
    records.write_text("".join(line % (number, 1e9 + number) for number in range(8)))
    result = sim(config, Load(records=records), Settings(), Outputs(), console())
    assert (result.outcomes, result.tpot.count) == ({"ok": 8}, 8)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load(workload="chess"), "workloads are chat"),
        (Load(arrivals="never"), "arrivals are poisson"),
        (Load(trace="missing.jsonl"), "No such file"),
        (Load(trace="x", records="y"), "not both"),
    ],
)
def test_mistakes_are_named(config, load, message, tmp_path):
    if load.trace:
        load = Load(trace=tmp_path / load.trace, records=load.records and tmp_path / load.records)
    with pytest.raises(ConfigError, match=message):
        sim(config, load, Settings(), Outputs(), console())


def test_a_missing_options_file_is_named(config, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        sim(config, Load(), Settings(tmp_path / "none.yaml"), Outputs(), console())


def test_a_broken_line_is_named_with_its_file(config, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl: line 2: .*input_length"):
        sim(config, Load(trace=trace), Settings(), Outputs(), console())
