"""What can be trained, one folder each: data, networks, loss, metrics, published recipes.

`recipe_for` gives the recipe of a network, `affinear.train.train` trains by it, `load_trained` and `evaluate` use what
came out. Tasks are imported when they are asked for.
"""

from .registry import find, names
from .setups import read_setup, recipe_for
from .using import evaluate, load_trained

__all__ = ["evaluate", "find", "load_trained", "names", "read_setup", "recipe_for"]
