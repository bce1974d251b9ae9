"""`moerl engines list | add | remove`: engines of a run that goes on, over its control API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moerl.launch.nodes.control_api import request
from moerl.run_dir import RunDir, find_run

engines = typer.Typer(
    no_args_is_help=True, help="Engines of a run that goes on: list them, add one, let one go."
)
_RUN = typer.Argument(metavar="RUN", help="A run's name, or its folder; it must be going on.")


@engines.command("list")
def engines_list(run: Annotated[str, _RUN]) -> None:
    """Each engine's size (tp), state, version of its weights, and groups in generation.

    Example:

      moerl engines list mine
    """
    rows = _asked(run, do="list")
    typer.echo(f"{'engine':>6} {'tp':>3}  {'state':<10}{'version':<10}{'groups':>6}")
    for row in rows:
        typer.echo(
            f"{row['engine']:>6} {row['tp']:>3}  {row['state']:<10}{row['version']:<10}"
            f"{row['groups']:>6}"
        )


@engines.command("add")
def engines_add(
    run: Annotated[str, _RUN],
    tp: Annotated[int, typer.Option(min=0, help="Tensor-parallel ranks; 0 = engine.tp.")] = 0,
) -> None:
    """Start one more engine beside the others; it is brought to the newest weights, then works.

    On a cluster it goes where a slot is free: tools/launch/engine_node.sh RUN_DIR --slots N brings
    a node with N of them.

    Example:

      moerl engines add mine
    """
    number = _asked(run, do="add", tp=tp)
    typer.echo(f"engine {number} is being started; moerl engines list {run} shows it")


@engines.command("remove")
def engines_remove(
    run: Annotated[str, _RUN],
    engine: Annotated[
        int, typer.Argument(metavar="ENGINE", min=0, help="Its number, as `list` shows it.")
    ],
) -> None:
    """Let an engine go: it starts nothing any more, what runs on it goes on elsewhere.

    The last engine that works cannot go.

    Example:

      moerl engines remove mine 1
    """
    state = _asked(run, do="remove", engine=engine)
    typer.echo(f"engine {engine} is {state}; moerl engines list {run} shows those that stay")


def _asked(run: str, **question: Any) -> Any:
    return request(RunDir(find_run(run, "RUN")), 60.0, **question)
