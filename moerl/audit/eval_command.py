"""`moerl eval`: the evaluation of a run, of one model or of two on the same prompts.

Each model gets engines, scorers and a controller of its own (`moerl.launch.eval_root`), one model
after the other.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moerl.core.errors import ConfigError
from moerl.core.json_files import read_json
from moerl.launch.arguments import Overrides
from moerl.runtime.process_tree import guarded

_Z = statistics.NormalDist().inv_cdf(0.975)
_Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A YAML file, a name under configs/recipes, or a run."),
]
_Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="A model folder, an adapter of peft, a run (its newest weights), or one of its "
        "checkpoints; default: the model of the recipe, or the run.",
    ),
]
_Against = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Evaluate this model too, on the same prompts; base: the model that the recipe or "
        "run begins with.",
    ),
]
_Keep = Annotated[
    str, typer.Option(metavar="DIR", help="Keep logs and converted models in this new folder.")
]


def eval(
    recipe: _Recipe,
    overrides: Overrides = None,
    checkpoint: _Model = "",
    against: _Against = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
    keep: _Keep = "",
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
    from moerl.audit.eval_page import write_page

    if keep and Path(keep).exists():
        raise ConfigError("--keep", keep, "it exists; name a new folder")
    if not Path(page).resolve().parent.is_dir():
        raise ConfigError("--page", page, "its folder does not exist")
    asked = {"against": ("--against", against)} if against else {}
    asked["model"] = ("--checkpoint", checkpoint)
    settings = _settings(recipe, list(overrides or []), asked, keep)
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
    else:
        _print(found, written)


def _settings(
    recipe: str, settings: list[str], asked: Mapping[str, tuple[str, str]], keep: str
) -> list[str]:
    """With this machine's GPU; each model is checked.  asked: (option, model) by name."""
    from moerl.launch.eval_settings import evaluated, run_of
    from moerl.launch.own_gpu import use_own_gpu

    sentence = ""
    if run_of(recipe) is None:
        settings, sentence = use_own_gpu(recipe, settings)
    for option, model in asked.values():
        evaluated(recipe, settings, option, model, Path(keep or "eval"))
    if sentence:
        typer.echo(f"moerl: {sentence}", err=True)
    return settings


def _print(found: dict[str, Any], written: Path) -> None:
    from moerl.audit.eval_page import TITLES, differences, rows

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


# --- two models ----------------------------------------------------------------------------------
def paired(
    model: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Differences of mean rewards by task, and over all prompts under "".

    model, base: `prompts` of the findings.  A prompt without a reward under both is left out.
    """
    ours, theirs = ({(r["task"], r["index"]): r["rewards"] for r in rows} for rows in (model, base))
    found: dict[str, list[float]] = {"": []}
    for task, index in sorted(ours.keys() & theirs.keys()):
        key = task, index
        value = statistics.fmean(ours[key]) - statistics.fmean(theirs[key])
        for label in {"", task}:
            found.setdefault(label, []).append(value)
    return {label: difference(values) for label, values in found.items() if values}


def difference(values: Sequence[float]) -> dict[str, float]:
    """Mean over prompts, and from 4 prompts on its 95 % interval by Student's t."""
    count, mean = len(values), statistics.fmean(values)
    found = {"prompts": float(count), "mean": mean}
    if count < 4:
        return found
    reach = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return found | {"low": mean - reach, "high": mean + reach}


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t, to 0.2 % from 3 degrees of freedom on.

    Source: Fisher's expansion, Abramowitz and Stegun 26.7.5.
    """
    z, n = _Z, float(freedom)
    first = (z**3 + z) / (4 * n)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    return z + first + second + third + fourth
