"""The evidence page's table of figures, made of the files in docs/results; called by tools/results.

The table has the figures with an aim, and the last figure of a file without aims.  A file is the
output of `bench/*.py --json`, with command, machine and commit.  A figure that misses its aim needs
a reason there, in its field `why`; nothing else of a file is written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.figures import Result, read

ROOT = Path(__file__).resolve().parents[1]
PAGE, FOLDER = ROOT / "docs/evidence/performance.md", ROOT / "docs/results"
BEGIN, END = "<!-- made by tools/results -->", "<!-- end of tools/results -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page differs")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    try:
        after = with_table(before, table(load(FOLDER)))
    except ValueError as error:
        print(f"tools/results: {error}", file=sys.stderr)
        return 1
    if check and before != after:
        print(f"tools/results: {PAGE.name} is not what docs/results says; run tools/results")
        return 1
    if not check:
        PAGE.write_text(after, encoding="utf-8")
    return 0


def load(folder: Path) -> list[Result]:
    """Results of a folder.  Raises ValueError for a missed aim without a reason."""
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    for path, result in found.items():
        for figure in result.figures:
            if not figure.is_met and not figure.why:
                raise ValueError(f"{path.name}: {figure.what!r} misses its aim and has no `why`")
    return list(found.values())


def table(results: Iterable[Result]) -> str:
    """Lines of the table, each with its end; without results, a sentence that says so."""
    rows = list(_rows(results))
    lines = ["| what | figure |", "|---|---|", *rows] if rows else ["Not measured yet."]
    return "".join(f"{line}\n" for line in lines)


def _rows(results: Iterable[Result]) -> Iterator[str]:
    for result in results:
        yield f"| **`{result.command}`** | {result.machine} |"
        for figure in [f for f in result.figures if f.aim is not None] or result.figures[-1:]:
            yield f"| {figure.what} | {figure} |"


def with_table(text: str, rows: str) -> str:
    """The text with another table between the markers.  Raises ValueError without them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{PAGE.name} must have {BEGIN} and {END} once each")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{rows}{END}{tail}"


if __name__ == "__main__":
    raise SystemExit(main())
