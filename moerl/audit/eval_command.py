"""`moerl eval`: the evaluation of a run, of one model or of two on the same prompts.

Each model gets engines, scorers and a controller of its own (`moerl.launch.eval_root`), one model
after the other.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from moerl.audit.paired import paired
from moerl.core.errors import ConfigError
from moerl.core.json_files import read_json
from moerl.launch.arguments import Overrides
from moerl.runtime.process_tree import guarded


def eval(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A YAML file, a name under configs/recipes, or a run."
        ),
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="A model folder, an adapter of peft, a run (its newest weights), or one of its "
            "checkpoints; default: the model of the recipe, or the run.",
        ),
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Evaluate this model too, on the same prompts; base: the model that the recipe or "
            "run begins with.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    keep: Annotated[
        str, typer.Option(metavar="DIR", help="Keep logs and converted models in this new folder.")
    ] = "",
    page: Annotated[str, typer.Option(metavar="FILE", help="Path of the page.")] = "eval.html",
) -> None:
    """Evaluate a model with a recipe's evaluation.* settings: engines alone, nothing is trained.

    Prompts, sampling, scorers, agents and figures are those of a run's evaluations, so step 0, a
    finished run and its last row agree. With --against, the difference of the mean rewards has a
    95 % interval, by Student's t over the paired prompts. The exit status is 1 when an evaluation
    fails. docs/tuning.md explains the rest.

    Examples:

      moerl eval quickstart              (its own model: step 0)
      moerl eval mine --against base     (a run, and the model it began with)
      moerl eval quickstart model.path=/data/MODEL evaluation.prompts=256
      moerl eval quickstart --checkpoint runs/mine/hf --against runs/other --json
    """
    from moerl.audit.eval_page import TITLES, differences, rows, write_page
    from moerl.launch.eval_settings import evaluated, run_of
    from moerl.launch.own_gpu import use_own_gpu

    settings, sentence = list(overrides or []), ""
    if run_of(recipe) is None:
        settings, sentence = use_own_gpu(recipe, settings)
    if keep and Path(keep).exists():
        raise ConfigError("--keep", keep, "it exists; name a new folder")
    if not Path(page).resolve().parent.is_dir():
        raise ConfigError("--page", page, "its folder does not exist")
    asked = {"against": ("--against", against)} if against else {}
    asked["model"] = ("--checkpoint", checkpoint)
    for option, model in asked.values():
        evaluated(recipe, settings, option, model, Path(keep or "eval"))
    if sentence:
        typer.echo(f"moerl: {sentence}", err=True)
    request = {"recipe": recipe, "overrides": settings}
    models = {
        name: _evaluated(request | {"option": option, "model": model}, keep and f"{keep}/{name}")
        for name, (option, model) in asked.items()
    }
    found: dict[str, Any] = {"recipe": recipe, "settings": settings, "models": models}
    if against:
        found["difference"] = paired(models["model"]["prompts"], models["against"]["prompts"])
    written = write_page(Path(page), found)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for line in [TITLES, *rows(found)]:
        typer.echo(f"{line[0]:<8} {line[1]:<12}" + "".join(f"{cell:>11}" for cell in line[2:]))
    for sentence in [*differences(found), f"page: {written}"]:
        typer.echo(sentence)


def _evaluated(request: dict[str, Any], keep: str) -> dict[str, Any]:
    """The findings of one model.  Raises typer.Exit when it was not evaluated."""
    from moerl.launch.eval_settings import remove_engine_folders

    with tempfile.TemporaryDirectory(prefix="moerl-") as folder:
        out = Path(folder) / "found.json"
        files = {"out": str(out), "keep": str(Path(keep).resolve()) if keep else ""}
        code = guarded(request | files, module="moerl.launch.eval_root")
        remove_engine_folders()
        if code:
            raise typer.Exit(code)
        return read_json(out)
