"""A trained network as lm-eval knows models, where that package is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any, cast

from ...train.task import Trained
from .generating import spoken
from .likelihood import likelihoods
from .settings import Speaking
from .spelling import Spelling

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one thing, in that order
USUAL_LENGTH = 256


def harness_model(trained: Trained[Any, Any]) -> Any:
    """An `lm_eval.api.model.LM` around a trained network: `lm_eval.simple_evaluate(model=...)` takes it.

    Args:
        trained: What `affinear.tasks.load_trained` gives, on the device where it shall compute.

    Raises:
        ValueError: If lm-eval is not installed.
    """
    need()
    from lm_eval.api.model import LM  # pyright: ignore

    spelling = Spelling(trained.job.facts["tokenizer"])
    device = next(trained.network.parameters()).device

    class Harness(LM):  # pyright: ignore
        """What lm-eval asks of a model."""

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            """Of each pair of context and continuation: its logarithm, and whether it is what would be said."""
            pairs = [tuple(request.args) for request in requests]
            found = likelihoods(trained.network, spelling, pairs, device)
            return [(one.total, one.greedy) for one in found]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            """Of whole texts: a network without a longest text reads each at once."""
            pairs = [("", str(request.args[0])) for request in requests]
            return [one.total for one in likelihoods(trained.network, spelling, pairs, device)]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            """What is said after each context, up to the first of some texts."""
            answers: list[str] = []
            for request in requests:
                context, asked = request.args
                options, stops = speaking(asked)
                said = ""
                with closing(cast(Any, spoken(trained.network, spelling, context, options))) as pieces:
                    for piece in pieces:
                        said += piece
                        if any(stop in said for stop in stops):
                            break
                for stop in stops:
                    said = said.partition(stop)[0]
                answers.append(said)
            return answers

    return Harness()


def speaking(asked: Mapping[str, Any]) -> tuple[Speaking, list[str]]:
    """How to go on, and up to which texts, as lm-eval's tasks say it.

    Examples:
        >>> speaking({"until": "Question:", "max_new_tokens": 5})
        (Speaking(tokens=5, temperature=0.0, top_k=None, seed=0), ['Question:'])
    """
    length = next((asked[name] for name in LENGTHS if asked.get(name) is not None), USUAL_LENGTH)
    told = asked.get("temperature")
    heat = float(told) if told is not None else 1.0 if asked.get("do_sample") else 0.0
    if asked.get("do_sample") is False:
        heat = 0.0
    until: Any = asked.get("until") or ()
    stops = [until] if isinstance(until, str) else [str(stop) for stop in until if stop]
    return Speaking(tokens=int(length), temperature=heat, top_k=asked.get("top_k") or None), stops


def need() -> None:
    """Raise ValueError where the package is missing."""
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed: pip install lm-eval; `affinear eval --data piqa:FILE` needs it not")
