"""Text that goes on from a prompt, token by token, with whatever memory a model keeps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from .network import LanguageNetwork
from .settings import Speaking
from .spelling import Spelling


class _Pipe:
    """What transformers hands tokens to as they come; another thread reads them. Its first are the prompt's.

    It is also what transformers asks whether to stop: when nobody reads any more.
    """

    def __init__(self) -> None:
        self.tokens: queue.Queue[int | BaseException | None] = queue.Queue()
        self.left = threading.Event()  # whoever reads has gone
        self._prompt = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each text is over."""
        return torch.full((len(input_ids),), self.left.is_set(), device=input_ids.device)

    def put(self, value: Tensor) -> None:
        """Some tokens."""
        if not self._prompt:
            for token in value.flatten().tolist():
                self.tokens.put(token)
        self._prompt = False

    def end(self) -> None:
        """No more."""
        self.tokens.put(None)


def spoken(network: nn.Module, spelling: Spelling, prompt: str, options: Speaking) -> Iterator[str]:
    """Pieces of the text that goes on from a prompt, each as soon as it is known.

    Raises:
        ValueError: For a prompt of no tokens.
    """
    ids = spelling.encode([prompt])[0]
    if not ids:
        raise ValueError("prompt: expected some text to go on from, got none")
    return spelling.pieces(_tokens(cast(LanguageNetwork, network), spelling, ids, options))


def _tokens(network: LanguageNetwork, spelling: Spelling, ids: list[int], options: Speaking) -> Iterator[int]:
    from transformers import StoppingCriteriaList

    model: Any = network.model
    device = next(network.parameters()).device
    prompt = torch.tensor([[spelling.end, *ids]], device=device)
    pipe = _Pipe()
    given: dict[str, Any] = {"do_sample": options.temperature > 0}
    if options.temperature > 0:
        given |= {"temperature": options.temperature, "top_k": options.top_k or spelling.size}

    def work() -> None:
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
                torch.manual_seed(options.seed)
                model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=options.tokens,
                    eos_token_id=spelling.end,
                    pad_token_id=spelling.end,
                    streamer=pipe,
                    stopping_criteria=StoppingCriteriaList([pipe]),
                    **given,
                )
        except BaseException as error:  # to be raised where somebody reads
            pipe.tokens.put(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        while (token := pipe.tokens.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token
    finally:
        pipe.left.set()
        worker.join()
