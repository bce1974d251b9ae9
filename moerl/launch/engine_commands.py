"""`moerl engines list | add | remove`: the engines of a running run, through its control API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moerl.launch.nodes.control_api import request
from moerl.runtime.run_dir import RunDir, find_run

engines = typer.Typer(no_args_is_help=True, help="Engines of a running run: list, add, remove.")
_RUN = typer.Argument(metavar="RUN", help="Name or folder of a run; it must be running.")


@engines.command("list")
def engines_list(run: Annotated[str, _RUN]) -> None:
    """Print each engine's size (tp), state, weight version, and number of groups in generation.

    Example:

      moerl engines list mine
    """
    rows = _asked(run, do="list")
    typer.echo(f"{'engine':>6} {'tp':>3}  {'state':<10}{'version':<10}{'requests':>9}")
    for row in rows:
        typer.echo(
            f"{row['engine']:>6} {row['tp']:>3}  {row['state']:<10}{row['version']:<10}"
            f"{row['requests']:>9}"
        )


@engines.command("add")
def engines_add(
    run: Annotated[str, _RUN],
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel ranks; 0 = engine.tp.")] = 0,
) -> None:
    """Start one more engine; it gets requests once it has the newest weights.

    On a cluster it takes a free slot: tools/launch/engine_node.sh RUN_DIR --slots N adds a node
    with N of them.

    Example:

      moerl engines add mine
    """
    number = _asked(run, do="add", tp=tp)
    typer.echo(f"engine {number} is being started; moerl engines list {run} shows it")


@engines.command("remove")
def engines_remove(
    run: Annotated[str, _RUN],
    engine: Annotated[
        int, typer.Argument(metavar="ENGINE", min=0, help="Its number, as `list` prints it.")
    ],
) -> None:
    """Remove an engine: its running requests are interrupted and continue on other engines.

    The last working engine cannot be removed.

    Example:

      moerl engines remove mine 1
    """
    state = _asked(run, do="remove", engine=engine)
    typer.echo(f"engine {engine} is {state}; moerl engines list {run} shows the others")


def _asked(run: str, **question: Any) -> Any:
    return request(RunDir(find_run(run, "RUN")), 60.0, **question)
