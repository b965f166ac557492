"""Train, evaluate and use networks: `train(Run(...))`, `evaluate`, `predict`, with the papers' recipes."""

from .engine import Result, Run, train
from .evaluate import ClassScore, Score, Trained, evaluate, load_trained
from .faults import Interrupted, NonFinite, OtherRun, RunError, SaveError
from .progress import Lines, Live, Progress
from .published import RECIPES, recipe_for
from .recipe import Recipe
from .records import EpochRecord

__all__ = [
    "RECIPES",
    "ClassScore",
    "EpochRecord",
    "Interrupted",
    "Lines",
    "Live",
    "NonFinite",
    "OtherRun",
    "Progress",
    "Recipe",
    "Result",
    "Run",
    "RunError",
    "SaveError",
    "Score",
    "Trained",
    "evaluate",
    "load_trained",
    "recipe_for",
    "train",
]
