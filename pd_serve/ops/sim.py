"""`pd-serve sim`: what a config would do under a workload, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pd_serve.config_file import load_config
from pd_serve.errors import ConfigError
from pd_serve.ops.sim_tables import show
from pd_serve.sim.clock import Streams
from pd_serve.sim.cluster import Cluster
from pd_serve.sim.options import make_spec, read_options
from pd_serve.sim.outcome import Served
from pd_serve.sim.plot import plot
from pd_serve.sim.report import Report, report
from pd_serve.sim.spec import Spec
from pd_serve.sim.workloads import times
from pd_serve.sim.workloads.agent import agent
from pd_serve.sim.workloads.arrival import Arrival
from pd_serve.sim.workloads.single import batch, rag, shared_prefix_chat
from pd_serve.sim.workloads.trace import read_records, read_trace, write_trace

GENERATED = 1000
"""Requests of a generator when nobody says how many."""
Workload = Callable[[Iterator[float], Streams], Iterator[Arrival]]
WORKLOADS: dict[str, Workload] = {"chat": shared_prefix_chat, "rag": rag, "batch": batch, "agent": agent}
ARRIVALS: dict[str, Callable[[float, Streams], Iterator[float]]] = {
    "poisson": lambda rate, streams: times.poisson(rate, streams.get("arrivals")),
    "gamma": lambda rate, streams: times.gamma(rate, streams.get("arrivals")),
    "modulated": lambda rate, streams: times.modulated(rate, streams.get("arrivals")),
    "day": times.day,
}


@dataclass(frozen=True)
class Load:
    """Where the requests come from: a trace, a log of live records, or a generator."""

    trace: Path | None = None
    """A file in the format of Mooncake's traces."""
    records: Path | None = None
    """A file of live records, one JSON object a line."""
    workload: str = "chat"
    arrivals: str = "poisson"
    rate: float = 1.0
    """Requests a second (of `agent`, sessions; of `day`, at its peak)."""
    requests: int | None = None
    """At most so many. None: all of a trace or log, 1,000 of a generator."""
    seed: int = 0

    def read(self) -> Iterator[Arrival]:
        """The arrivals, one at a time.

        Raises:
            ConfigError: a name or a file is wrong.
        """
        if self.trace is not None and self.records is not None:
            raise ConfigError("give a trace or records, not both")
        if self.trace is not None:
            return islice(_rows(self.trace), self.requests)
        if self.records is not None:
            return islice(read_records(_lines(self.records)), self.requests)
        if self.workload not in WORKLOADS or self.arrivals not in ARRIVALS:
            raise ConfigError(f"workloads are {', '.join(WORKLOADS)}; arrivals are {', '.join(ARRIVALS)}")
        streams = Streams(self.seed)
        return islice(WORKLOADS[self.workload](ARRIVALS[self.arrivals](self.rate, streams), streams), self.total)

    @property
    def total(self) -> int | None:
        """How many there will be, when that is known without reading them all."""
        return self.requests or (GENERATED if self.trace is None and self.records is None else None)


@dataclass(frozen=True)
class Outputs:
    """What to write beside the tables."""

    report: Path | None = None
    """The whole report as JSON."""
    requests: Path | None = None
    """One JSON object a request."""
    plot: Path | None = None
    trace: Path | None = None
    """The workload itself, so that others can run it."""
    over_time: bool = False
    """Show a table by time."""


def overrides(settings: Iterable[str]) -> dict[str, Any]:
    """Single options as a command line gives them: `name=value`, dots for what lies inside, values in YAML.

    Raises:
        ConfigError: one has no `=`, or its value is not YAML.
    """
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting}: must be name=value")
        try:
            found[name] = msgspec.yaml.decode(value)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{setting}: {error}") from error
    return found


@dataclass(frozen=True)
class Settings:
    """The simulator's options: a YAML file, and single ones on top."""

    file: Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)


def sim(config: str, load: Load, settings: Settings, outputs: Outputs, out: Console) -> Report:
    """Run it and show what came of it.

    Raises:
        ConfigError: the config, an option, the profile or the trace is wrong.
    """
    text = b"".join(_lines(settings.file)).decode() if settings.file is not None else ""
    options = read_options(text, settings.overrides, str(settings.file or "options"))
    spec = make_spec(load_config(config), options)
    if outputs.trace is not None:
        with outputs.trace.open("w", encoding="utf-8") as file:
            file.writelines(write_trace(load.read()))
    result = _run(spec, load.read(), load.total, outputs.requests, out)
    show(result, out, outputs.over_time)
    if outputs.report is not None:
        outputs.report.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if outputs.plot is not None:
        plot(result, outputs.plot)
    return result


def _run(spec: Spec, arrivals: Iterable[Arrival], total: int | None, log: Path | None, out: Console) -> Report:
    lines = log.open("wb") if log is not None else None

    def write(served: Served) -> None:
        if lines is not None:
            lines.write(msgspec.json.encode(served) + b"\n")

    cluster = Cluster(spec, arrivals, write)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=out, transient=True) as progress:
            task = progress.add_task("simulating", total=total)
            while not cluster.over:
                cluster.run(until=cluster.clock.now + 1.0)
                progress.update(
                    task, completed=cluster.ended, description=f"at {cluster.clock.now:,.0f} s of virtual time"
                )
    finally:
        if lines is not None:
            lines.close()
    return report(cluster)


def _rows(path: Path) -> Iterator[Arrival]:
    try:
        yield from read_trace(_lines(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
