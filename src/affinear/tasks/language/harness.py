"""A trained network as lm-eval knows models, where that package is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from ...train.task import Trained
from .generating import spoken
from .likelihood import likelihoods
from .settings import Speaking
from .spelling import Spelling


def harness_model(trained: Trained[Any, Any]) -> Any:
    """An `lm_eval.api.model.LM` around a trained network: `lm_eval.simple_evaluate(model=...)` takes it.

    Args:
        trained: What `affinear.tasks.load_trained` gives, on the device where it shall compute.

    Raises:
        ValueError: If lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed: pip install lm-eval; `affinear eval --data piqa:FILE` needs it not")
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
                options = Speaking(tokens=int(asked.get("max_gen_toks", 256)), temperature=0.0)
                said = "".join(spoken(trained.network, spelling, context, options))
                for stop in asked.get("until") or ():
                    said = said.partition(stop)[0]
                answers.append(said)
            return answers

    with torch.no_grad():
        return Harness()
