"""Command-line arguments that several commands share, for typer."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that replace those of the recipe, such as run.steps=20; all of them, with "
        "units and defaults, are in moerl/config/schema.py.",
    ),
]
RECIPE = typer.Argument(metavar="RECIPE", help="A YAML file, or a name under configs/recipes.")
Recipe = Annotated[str, RECIPE]
RunName = Annotated[
    str, typer.Option(metavar="NAME", help="Name of the run: its folder below run.root.")
]
