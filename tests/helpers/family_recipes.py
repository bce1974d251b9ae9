"""Recipes of tiny random models, one per family."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def recipe_of(family: str) -> str:
    """family: of `model.tiny`."""
    return str(RECIPES / f"tiny-{family.replace('_', '-')}.yaml")
