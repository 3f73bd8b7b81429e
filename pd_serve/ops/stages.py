"""What a start shows: a line for each stage, with its time; live on a terminal, line by line elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_MARKS = {"waiting": "[dim]·[/]", "done": "[green]✓[/]", "failed": "[red]✗[/]"}


class _Stage:
    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "waiting"
        self.note = ""
        self.started = self.ended = 0.0
        self.spinner = Spinner("dots")

    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started


class Stages:
    """Stages in their order. Several may run at once.

    Args:
        names: of the stages; each is also how it is addressed.
    """

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self._stages = {name: _Stage(name) for name in names}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=False)
        self._began = time.monotonic()

    def begin(self, name: str, note: str = "") -> None:
        stage = self._stages[name]
        if stage.state == "waiting":
            stage.state, stage.started = "running", time.monotonic()
        stage.note = note

    def done(self, name: str, note: str = "") -> None:
        self._end(name, "done", note)

    def fail(self) -> None:
        """Mark what runs as failed."""
        for stage in self._stages.values():
            if stage.state == "running":
                self._end(stage.name, "failed", stage.note)

    def total(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def _end(self, name: str, state: str, note: str) -> None:
        stage = self._stages[name]
        if stage.state in {"done", "failed"}:
            return
        self.begin(name, note)
        stage.state, stage.ended = state, time.monotonic()
        if not self._console.is_terminal:
            words = {"done": "ready", "failed": "FAILED"}[state]
            self._console.print(f"{name}: {words} after {stage.seconds():.1f} s{f' ({note})' if note else ''}")

    def _table(self) -> Group | Table:
        table = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            mark = stage.spinner if stage.state == "running" else Text.from_markup(_MARKS[stage.state])
            seconds = f"{stage.seconds():.1f} s" if stage.state != "waiting" else ""
            table.add_row(mark, stage.name, Text(seconds, justify="right"), Text(stage.note, style="dim"))
        return table

    def __enter__(self) -> Stages:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail()
        if self._console.is_terminal:
            self._live.stop()
