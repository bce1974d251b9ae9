"""The tables of docs/architecture.md as tests read them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.helpers.path_trace import Passed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
HEADINGS = {"token": "Files that a token passes", "weight": "Files that a weight passes"}
AGENT = "Files that an agent's token passes"
HOPS = "Hops of a publish's control message"
PACKAGES = "Which package may import which"
_CODEC = "core/serialization.py"  # called by hops on both ends of a socket, hands nothing on


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the tables below a heading of the second level, without their own headings."""
    (section,) = re.findall(rf"(?ms)^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page)
    cells = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
    table = [[cell.strip() for cell in row] for row in cells]
    rules = {n for n, row in enumerate(table) if set("".join(row)) == {"-"}}
    return [row for n, row in enumerate(table) if n not in rules and n + 1 not in rules]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def listed_files(page: str, kind: str) -> list[str]:
    return [names(row[0])[0].removeprefix("moerl/") for row in rows(page, HEADINGS[kind])]


def listed_hops(page: str) -> list[tuple[str, str]]:
    """(file, class) in the order of the page."""
    table = rows(page, HOPS)
    return [(names(row[1])[0].removeprefix("moerl/"), names(row[0])[0]) for row in table]


def agent_files(page: str) -> tuple[set[str], set[str]]:
    """Files that only an agent's token passes, and files of the other one that it does not pass."""
    (section,) = re.findall(rf"(?ms)^## {re.escape(AGENT)}\n(.*?)(?=^## |\Z)", page)
    text = "\n".join(line for line in section.splitlines() if line[:1] != "|")
    own = {names(row[0])[0].removeprefix("moerl/") for row in rows(page, AGENT)}
    return own, {*re.findall(r"`moerl/([^`]+\.py)`", text)}


def hops_of(seen: Iterable[Passed]) -> list[tuple[str, str]]:
    """(file, class) in the order in which they first had a message of a session."""
    found = [(p.file, p.function) for p in seen if p.kind == "control" and p.file != _CODEC]
    classes = [(file, name.partition(".")[0]) for file, name in found if "." in name]
    files = {file for file, _ in classes}
    classes += [
        one for one in found if one[0] not in files
    ]  # functions of files without such classes
    return list(dict.fromkeys(classes))


def differences(page: str, seen: Collection[Passed]) -> list[str]:
    """One sentence for each thing in which the page and a run are not the same."""
    found: list[str] = []
    for kind in HEADINGS:
        listed, traced = listed_files(page, kind), {one.file for one in seen if one.kind == kind}
        found += [f"{file} is listed twice" for file in {f for f in listed if listed.count(f) > 1}]
        found += [f"a {kind} passes {file}: not in the page" for file in traced - {*listed}]
        found += [f"no {kind} passes {file}: in the page" for file in {*listed} - traced]
    if (listed_order := listed_hops(page)) != (order := hops_of(seen)):
        found.append(f"the hops of control are {order}, the page has {listed_order}")
    return sorted(found)


def without_agents(page: str) -> str:
    """The page without the files of an agent's token, which a run without agents does not pass."""
    return re.sub(rf"(?ms)^## {re.escape(AGENT)}\n.*?(?=^## |\Z)", "", page)


def agent_differences(page: str, seen: Collection[Passed]) -> list[str]:
    """The same of the token of an agent and its table."""
    own, without = agent_files(page)
    listed = ({*listed_files(page, "token")} - without) | own
    traced = {one.file for one in seen if one.kind == "token"}
    found = [f"an agent's token passes {file}: not in the page" for file in traced - listed]
    found += [f"no agent's token passes {file}: in the page" for file in listed - traced]
    return sorted(found)
