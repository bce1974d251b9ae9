#!/usr/bin/env python3
"""Apply steps of a rename table to this tree: tools/rename.py TABLE [STEP ...]

Works on tokens: code keeps its form, `ruff check --select I --fix` and `ruff format` then put it in
order.  Commit each step alone and prove it with tools/same_trees.py.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.renames import Table, is_kept, read_tables

_PROSE = {".md", ".yaml", ".yml", ".toml", ".sh", ".sbatch", ".cfg", ".html", ".cpp", ".cu", ".h"}
_BEFORE_DOCSTRING = {
    tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for table in read_tables(Path(sys.argv[1]), tuple(sys.argv[2:])):
        apply(table)


def apply(table: Table) -> None:
    files = _git("ls-files").splitlines()
    origins = origins_of(
        {name: ast.parse(Path(name).read_text()) for name in files if name.endswith(".py")}
    )
    texts = {}
    for name in files:
        path = Path(name)
        if is_kept(name) or not path.is_file() or path.is_symlink():
            continue
        if name.removesuffix("/__init__.py").replace("/", ".") in table.dropped:
            _git("rm", "-q", "-f", name)
            continue
        is_python = path.suffix == ".py" or _shebang(path)
        if not is_python and path.suffix not in _PROSE and not name.startswith(("tools/", ".ci/")):
            continue
        try:
            old = path.read_text()
        except UnicodeDecodeError:
            continue
        if is_python:
            new = rename_python(old, name, table, origins)
        else:
            new = table.prose(old, table.names)
            new = new if path.suffix == ".md" else table.literal(new)
        texts[name] = new
    for module, primary in table.joins.items():
        one, other = (name.replace(".", "/") + ".py" for name in (primary, module))
        texts[one] = join(texts[one], texts.pop(other), table.module(primary))
        _git("rm", "-q", "-f", other)
    changed = 0
    for name, new in texts.items():
        path = Path(name)
        if new != path.read_text():
            path.write_text(new)
            changed += 1
        target = table.path(name) if path.suffix == ".py" else name
        if target != name:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            _git("mv", name, target)
    print(f"[rename] {table.step}: {changed} files")


def join(one: str, other: str, module: str) -> str:
    """Two files as one: docstrings and imports together, then one body after the other."""
    first, second = _parts_of(one, module), _parts_of(other, module)
    taken = {_defined(text) for text in first[2]} - {""}
    body = list(first[2])
    for text in second[2]:
        if text in body:
            continue  # `log = logging.getLogger(__name__)`
        if _defined(text) in taken:
            raise SystemExit(f"{module}: {_defined(text)} stands in both files")
        body.append(text)
    head = f'"""{first[0]}\n\n{second[0]}\n"""\n\nfrom __future__ import annotations\n\n'
    return head + "".join(dict.fromkeys(first[1] + second[1])) + "\n\n" + "\n\n".join(body)


def _parts_of(source: str, module: str) -> tuple[str, list[str], list[str]]:
    """(docstring, imports, other statements with the comments before them)."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False) or ""
    imports: list[str] = []
    body: list[str] = []
    at = 0
    for node in tree.body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        text = "".join(lines[at : node.end_lineno])
        at = node.end_lineno or 0
        if isinstance(node, ast.ImportFrom | ast.Import):
            is_own = isinstance(node, ast.ImportFrom) and node.module in (module, "__future__")
            imports += [] if is_own else ["".join(lines[start:at])]
        elif not (isinstance(node, ast.Expr) and start < 3):
            body.append(text.strip("\n") + "\n")
    return doc.rstrip(), imports, body


def _defined(text: str) -> str:
    """The name that a statement gives to a function, a class or a value; empty: none."""
    node = ast.parse(text).body[0]
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return str(getattr(node, "name", ""))


def _shebang(path: Path) -> bool:
    return path.suffix == "" and path.read_bytes()[:40].startswith(b"#!/usr/bin/env python")


def origins_of(files: dict[str, ast.Module]) -> dict[str, dict[str, str]]:
    """By module: which module a name that it passes on comes from; {} for most."""
    found: dict[str, dict[str, str]] = {}
    for name, tree in files.items():
        module = name.removesuffix(".py").replace("/", ".")
        if not module.endswith(".__init__"):
            found.setdefault(module, {})
            continue
        names = found.setdefault(module.removesuffix(".__init__"), {})
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("moerl"):
                names |= {alias.asname or alias.name: node.module for alias in node.names}
    return found


def rename_python(source: str, name: str, table: Table, origins: dict[str, dict[str, str]]) -> str:
    """One file with imports, identifiers, strings and comments of the new names."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tree = ast.parse(source)
    own = dict(table.own(module))
    bound: dict[str, str] = {}  # names of this file that an import gives another name
    aliases: dict[str, str] = {}  # local name of a module -> that module
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _ours(node.module):
            for alias in node.names:
                new = symbol(node.module or "", alias.name, table, origins)[1]
                local = alias.asname or alias.name
                if f"{node.module}.{alias.name}" in origins:
                    aliases[local] = f"{node.module}.{alias.name}"
                if alias.asname is None and new != alias.name:
                    bound[alias.name] = new
        elif isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and _ours(a.name)}
    spans = {
        node.lineno: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and _is_ours(node)
    }
    skip = {
        line for node in spans.values() for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    replaced = _tokens(source, skip, own, bound, aliases, table)
    # Imports were made anew line by line; all other lines come from the token pass.
    result: list[str] = []
    for number, line in enumerate(replaced, start=1):
        if number in spans:
            node = spans[number]
            indent = " " * node.col_offset
            whole = "".join(lines[number - 1 : node.end_lineno])
            comment = "".join(f"  {one.rstrip()}" for one in re.findall(r"#.*", whole)[:1])
            texts = _imports(node, table, origins)
            result += [f"{indent}{text}{comment}\n" for text in texts]
        elif number not in skip:
            result.append(line)
    return "".join(result)


def _ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in ("moerl", "tests")


def _is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return _ours(node.module)
    return any(_ours(alias.name) for alias in node.names)


def symbol(
    module: str, name: str, table: Table, origins: dict[str, dict[str, str]]
) -> tuple[str, str]:
    """(new module to import from, new name) of `from module import name`."""
    if f"{module}.{name}" in origins:  # a module
        new = table.module(f"{module}.{name}")
        return new.rpartition(".")[0], new.rpartition(".")[2]
    origin = origins.get(module, {}).get(name, module)
    new_name = table.own(origin).get(name, name)
    home, passed_on = table.module(origin), table.module(module)
    if origin != module and home.startswith(passed_on + "."):
        home = passed_on  # still passed on by its package
    return home, new_name


def _imports(
    node: ast.Import | ast.ImportFrom, table: Table, origins: dict[str, dict[str, str]]
) -> list[str]:
    if isinstance(node, ast.Import):
        names = [table.module(a.name) + (f" as {a.asname}" if a.asname else "") for a in node.names]
        return [f"import {', '.join(names)}"]
    homes: dict[str, list[str]] = {}
    for alias in node.names:
        home, new = symbol(node.module or "", alias.name, table, origins)
        homes.setdefault(home, []).append(new + (f" as {alias.asname}" if alias.asname else ""))
    return [f"from {home} import {', '.join(names)}" for home, names in homes.items()]


def _tokens(
    source: str,
    skip: set[int],
    own: dict[str, str],
    bound: dict[str, str],
    aliases: dict[str, str],
    table: Table,
) -> list[str]:
    """The lines of the file with every token renamed; a token may hold several lines."""
    lines = source.splitlines(keepends=True)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for idx, token in enumerate(tokens):
        if token.start[0] in skip:
            continue
        new = token.string
        if token.type == tokenize.NAME:
            before = tokens[idx - 1].string if idx else ""
            if before == ".":
                chain = f"{tokens[idx - 2].string}.{new}"
                new = table.chains.get(chain, own.get(new, new))
                head = aliases.get(tokens[idx - 2].string) if idx > 1 else None
                if head is not None and (idx < 3 or tokens[idx - 3].string != "."):
                    new = table.own(head).get(token.string, token.string)
            else:
                new = bound.get(new, own.get(new, new))
            if new != token.string and _is_flag(tokens, idx):
                new = token.string
        elif token.type == tokenize.STRING:
            is_prose = tokens[idx - 1].type in _BEFORE_DOCSTRING and token.string[-3:] == '"""'
            new = _string(token.string, own, bound, table, is_prose=is_prose)
            if [one.string for one in tokens[max(idx - 2, 0) : idx]] == ["parametrize", "("]:
                new = table.code(token.string, own | bound)
        elif token.type == tokenize.COMMENT:
            new = table.prose(token.string, own)
        if new != token.string:
            edits.append((token.start, token.end, new))
    for (row, col), (end_row, end_col), new in reversed(edits):
        if row == end_row:
            line = lines[row - 1]
            lines[row - 1] = line[:col] + new + line[end_col:]
        else:
            text = lines[row - 1][:col] + new + lines[end_row - 1][end_col:]
            parts = text.splitlines(keepends=True)
            count = end_row - row + 1
            # keep one entry per old line, so that numbers stay those of the old file
            parts = parts[: count - 1] + ["".join(parts[count - 1 :])]
            parts += [""] * (count - len(parts))
            lines[row - 1 : end_row] = parts
    return lines


def is_flag_keyword(node: ast.keyword) -> bool:
    """`frozen=True` of a dataclass or a msgspec struct."""
    return node.arg == "frozen" and isinstance(node.value, ast.Constant)


def _is_flag(tokens: list[tokenize.TokenInfo], idx: int) -> bool:
    """`frozen=True` of a dataclass or a msgspec struct."""
    return tokens[idx].string == "frozen" and [t.string for t in tokens[idx + 1 : idx + 3]] in (
        ["=", "True"],
        ["=", "False"],
    )


def _string(
    text: str, own: dict[str, str], bound: dict[str, str], table: Table, *, is_prose: bool
) -> str:
    if is_prose:
        return table.prose(text, own)
    prefix = re.match(r"[A-Za-z]*", text)
    if "f" not in (prefix.group().lower() if prefix else ""):
        quote = re.match(r"[A-Za-z]*('''|\"\"\"|'|\")", text)
        mark = quote.group(1) if quote else '"'
        head, value = text[: len(quote.group()) if quote else 1], ""
        value = text[len(head) : -len(mark)]
        return head + table.string(value, own | bound) + mark
    parts = re.split(r"(\{\{|\}\}|\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})", text)
    return "".join(
        table.code(part, own | bound)
        if part.startswith("{") and part != "{{"
        else table.literal(table.prose(part, own))
        for part in parts
    )


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
