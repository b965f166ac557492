"""Train, evaluate and use networks: `train(Run(...))`, `evaluate`, `predict`, with the papers' recipes."""

from ..tasks.classify.evaluate import ClassScore, Score, Trained, evaluate, load_trained
from ..tasks.classify.published import RECIPES, recipe_for
from .engine import Result, Run, train
from .faults import Interrupted, NonFinite, OtherRun, RunError, SaveError
from .progress import Lines, Live, Progress
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
