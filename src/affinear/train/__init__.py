"""The engine: `train(Run(...))` trains whatever a task says, through kills, full disks and bad numbers.

What can be trained, with recipes, evaluation and answers, is in `affinear.tasks`.
"""

from .corrupt import TooManyCorrupt
from .engine import Result, Run, train
from .faults import Interrupted, NonFinite, OtherRun, RunError, SaveError
from .progress import Lines, Live, Outline, Progress
from .recipe import Recipe
from .records import Record
from .settings import Settings
from .task import Answer, Data, Job, Measure, Part, Score, Setup, Task, Trained, Work

__all__ = [
    "Answer",
    "Data",
    "Interrupted",
    "Job",
    "Lines",
    "Live",
    "Measure",
    "NonFinite",
    "OtherRun",
    "Outline",
    "Part",
    "Progress",
    "Recipe",
    "Record",
    "Result",
    "Run",
    "RunError",
    "SaveError",
    "Score",
    "Settings",
    "Setup",
    "Task",
    "TooManyCorrupt",
    "Trained",
    "Work",
    "train",
]
