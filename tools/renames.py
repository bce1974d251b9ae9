"""A table of renames, read from YAML, as functions from old to new: modules, identifiers, text.

`tools/rename.py` applies a table to a tree; `tools/same_trees.py` proves that nothing else changed.
Both use these functions, on tokens and on syntax trees.

    - step: weight_sync                     # one commit
      modules: {moerl.sync.line: moerl.weight_sync.sender}    # a package stands for all in it
      joins: {moerl.sync.line: moerl.sync.courier}            # appended to that file
      names: {CourierThread: SenderThread}  # this identifier, everywhere
      inside:                               # this one, in a module and where it is imported
        moerl.transport.door: {Door: TokenServer}
      chains: {frozen.ranks: placement}     # `ranks` where it follows `frozen.`
      values: {own: separate}               # this whole string
      text: {trainer gang: trainer}         # whole words of strings, comments and pages
      literals: {frozen: ref_models}        # the same, in no docstring, comment or page
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml

_DOTTED = re.compile(r"(?<![\w./])(?:moerl|tests)(?:\.\w+)+")
_SLASHED = re.compile(r"(?<![\w.-])(?:moerl|tests)(?:/\w+)+(?:\.py)?(?![\w])")
_WORD = re.compile(r"(\.?)\b([A-Za-z_]\w*)")
_TICKED = re.compile(r"(`+)([^`]+)\1")


@dataclass(frozen=True, slots=True)
class Table:
    """One step of the renaming."""

    step: str
    modules: dict[str, str] = field(default_factory=dict)  # a package stands for all inside it
    names: dict[str, str] = field(default_factory=dict)
    inside: dict[str, dict[str, str]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    literals: dict[str, str] = field(default_factory=dict)  # text of strings, not of docstrings
    chains: dict[str, str] = field(default_factory=dict)  # a.b: c renames b behind a
    values: dict[str, str] = field(default_factory=dict)  # whole strings
    joins: dict[str, str] = field(default_factory=dict)  # a module is appended to another one
    dropped: tuple[str, ...] = ()  # modules that end: empty `__init__` of packages that were joined

    def module(self, name: str) -> str:
        """The new name of a dotted module, or the same."""
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            new = self.modules.get(".".join(parts[:size]))
            if new is not None:
                return ".".join([new, *parts[size:]])
        return name

    def own(self, module: str) -> dict[str, str]:
        """Identifiers of a module: those of everywhere, and its own."""
        return self.names | self.inside.get(module, {})

    def path(self, path: str) -> str:
        """The new path of a Python file, relative to the root."""
        dotted = path.removesuffix(".py").replace("/", ".")
        if dotted.endswith(".__init__"):
            return self.module(dotted.removesuffix(".__init__")).replace(".", "/") + "/__init__.py"
        return self.module(dotted).replace(".", "/") + ".py"

    def is_home_of_joined(self, path: str) -> bool:
        """Whether a file, by its new path, was made of two; its statements changed their order."""
        return path in {self.module(one).replace(".", "/") + ".py" for one in self.joins.values()}

    def dotted(self, name: str) -> str:
        """`moerl.sync.line.Line.ask` as it is called now."""
        parts = name.split(".")
        for size in range(len(parts), 0, -1):
            old = ".".join(parts[:size])
            if (new := self.module(old)) != old or old in self.inside:
                own = self.own(old)
                return ".".join([new, *(own.get(part, part) for part in parts[size:])])
        return ".".join(parts[:1] + [self.names.get(part, part) for part in parts[1:]])

    def prose(self, text: str, own: dict[str, str]) -> str:
        """A string, a comment or a page: paths, identifiers in backticks, phrases."""
        text = _DOTTED.sub(lambda m: self.dotted(m.group()), text)
        text = _SLASHED.sub(lambda m: self._slashed(m.group()), text)
        text = _TICKED.sub(lambda m: m[1] + self.code(m[2], own) + m[1], text)
        for old, new in self.text.items():
            text = _phrase(old, new, text)
        return text

    def string(self, text: str, own: dict[str, str]) -> str:
        """The value of a string: one of `values`, an identifier by its name, or prose."""
        if text in self.values:
            return self.values[text]
        if text in own and (text[0].isupper() or text[0] == "_"):
            return own[text]
        if re.fullmatch(r"\w+(, ?\w+)+", text):  # the arguments of a parametrised test
            return self.code(text, own)
        return self.literal(self.prose(text, own))

    def literal(self, text: str) -> str:
        """What is no prose: strings of code, settings, scripts."""
        for old, new in self.literals.items():
            text = _phrase(old, new, text)
        return text

    def code(self, text: str, own: dict[str, str]) -> str:
        """Identifiers in a piece of code that is no file."""
        return _WORD.sub(lambda m: m[1] + own.get(m[2], m[2]), text)

    def _slashed(self, path: str) -> str:
        dotted = path.removesuffix(".py").replace("/", ".")
        new = self.module(dotted).replace(".", "/")
        return new + (".py" if path.endswith(".py") else "")


def _phrase(old: str, new: str, text: str) -> str:
    """Whole words, over line ends too; a capital stays one.  `~` before a phrase: to the letter."""
    if old.startswith("~"):
        return text.replace(old[1:], new)

    def put(match: re.Match[str]) -> str:
        found = match.group()
        gap = re.search(r"\s*\n\s*(?:# )?", found)
        made = new.replace(" ", gap.group(), 1) if gap else new
        is_capital = found[:1].isupper() and not new[:1].isupper()
        return made[:1].upper() + made[1:] if is_capital else made

    words = r"\s+(?:# )?".join(map(re.escape, old.split(" ")))
    whole = rf"(?<![\w/-]){words}(?!\w|=True|=False|/\w+\.py|-\w)"
    return re.sub(whole, put, text, flags=re.I if old.islower() else 0)


def is_kept(path: str) -> bool:
    """Whether a file keeps old names: the history, the tables and what reads them."""
    return (
        re.search(r"(^|/)(CHANGELOG\.md|decisions\.md|renamed?s?\.\w+|same_trees\.py)$", path)
        is not None
    )


def read_tables(path: Path, steps: tuple[str, ...] = ()) -> list[Table]:
    """The steps of a file in their order, or those named."""
    entries = yaml.safe_load(path.read_text())
    tables = [Table(**entry | {"dropped": tuple(entry.get("dropped", ()))}) for entry in entries]
    known = [table.step for table in tables]
    if unknown := sorted(set(steps) - set(known)):
        raise SystemExit(f"no step {', '.join(unknown)} in {path}; it has {', '.join(known)}")
    return [table for table in tables if not steps or table.step in steps]
