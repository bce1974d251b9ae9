"""Text of plans.  Planners return sentences and tables of data, which are printed here."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import table
from rich.console import Console

from moerl.config.schema import ParallelConfig

GB = 1e9  # bytes, as network cards and GPUs are sold
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table with a title.

    rows: cells; () is a line between rows.  left: the number of columns, from the first one, that
    hold names rather than numbers.  note: below the table.  tight: without space beside cells.
    """

    title: str
    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    left: int
    note: str = ""
    tight: bool = False

    def __str__(self) -> str:
        out, beside = io.StringIO(), 0 if self.tight else 1
        shown = table.Table(title=self.title, padding=(0, beside))
        for place, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if place < self.left else "right")
        for row in self.rows:
            if row:
                shown.add_row(*row)
            else:
                shown.add_section()
        Console(file=out, width=_WIDTH, force_terminal=False, color_system=None).print(shown)
        return out.getvalue() + self.note


def grid(rows: Iterable[Sequence[str]], *widths: int) -> list[str]:
    """Lines of rows without a frame.  widths: of the columns, of which the first holds names."""
    form = f"{{:<{widths[0]}}}" + "".join(f"{{:>{width}}}" for width in widths[1:])
    return [form.format(*row) for row in rows]


def gb(num_bytes: float) -> str:
    value = num_bytes / GB
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def of_room(device_gb: float) -> str:
    """End of a title; empty where the room is not known."""
    return f", GB of {device_gb:g}" if device_gb else ", GB"


def verdict(who: str, need: float, room_gb: float) -> str:
    """A line that marks a need above the room; estimates never refuse a start."""
    if not room_gb or need <= room_gb * GB:
        return ""
    return f"{who} DOES NOT FIT: {gb(need)} GB of {room_gb:.3g} GB\n"


def axes(parallel: ParallelConfig) -> str:
    names = ("tp", "pp", "cp", "dp", "ep", "etp")
    return " ".join(f"{name} {getattr(parallel, name)}" for name in names)


def numbers(values: Iterable[int]) -> str:
    """0-3 or 0,2,5; empty without any."""
    found = sorted(values)
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ",".join(map(str, found))


def span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
