"""One token after the other with the states in place, so that on a GPU a whole step is one graph to replay."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .cache import AffinearCache, Past, StateLayer
from .causal_lm import AffinearForCausalLM
from .places import Places, tables


class Stepper:
    """Steps of one token for every sequence of a cache, each the same kernels over the same memory.

    A step is captured as a CUDA graph when the first is taken, which takes the host out of it: transformers' own loop
    starts hundreds of kernels for each token. Without a GPU the same steps are taken plainly.

    Args:
        model: In evaluation mode, with linear layers alone.
        cache: What came before, of any batch. From here on the steps change it in place.

    Raises:
        ValueError: If the model has softmax layers, whose keys grow, or the cache is empty.

    Example:
        >>> import torch
        >>> from affinear.models.language import AffinearCache, AffinearForCausalLM, Stepper, preset, read
        >>> model = AffinearForCausalLM(preset("small", vocab_size=100, num_hidden_layers=1)).eval()
        >>> cache = AffinearCache(model.config)
        >>> logits = read(model, torch.randint(100, (3, 20)), cache)
        >>> step = Stepper(model, cache)
        >>> for _ in range(5):
        ...     logits = step(logits.argmax(-1))
        >>> cache.get_seq_length()
        25
    """

    def __init__(self, model: AffinearForCausalLM, cache: AffinearCache) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(f"model: {reason}")
        if not cache.get_seq_length():
            raise ValueError("cache: expected one that has seen a prompt, got an empty one; call read with it first")
        cache.check_fits(model.config)
        self.model, self.cache = model, cache
        self.layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
        for layer in self.layers:
            layer.memory = _own(layer.memory, model.device)
        state = self.layers[0].memory.state
        assert state is not None
        self.token = torch.zeros(state.count.shape[0], 1, dtype=torch.long, device=model.device)
        self.position = torch.tensor([cache.get_seq_length()], device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits = torch.empty(0)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """Logits (B, V) of what comes after tokens (B,). They are written over by the next step."""
        self.token.copy_(token[:, None])
        if self.token.is_cuda and self.graph is None:
            self._capture()
        if self.graph is None:
            self.logits = self._advance()
        else:
            self.graph.replay()
        for layer in self.layers:
            layer.memory = replace(layer.memory, seen=layer.memory.seen + 1)
        return self.logits

    def _advance(self) -> Tensor:
        """One step; the states are what they were, as objects, with the token in them."""
        config = self.model.config
        rotary = None
        if config.rope_theta is not None:
            rotary = tables(self.position, config.head_width, config.rope_theta)
        places = Places(rotary, None, None, None, seen=0)
        before = [layer.memory for layer in self.layers]
        x: Tensor = self.model.model.embed_tokens(self.token)
        for layer in self.model.model.layers:
            x = layer(x, places, past_key_values=self.cache)
        for layer, kept in zip(self.layers, before, strict=True):
            _write(kept, layer.memory)
            layer.memory = kept
        self.position += 1
        return self.model.lm_head(self.model.model.norm(x))[:, -1]

    def _capture(self) -> None:
        """Record a step. Trying it beforehand changes the states, which are then put back."""
        copies = [layer.memory.map(torch.clone) for layer in self.layers]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        self.position -= 2
        for layer, copy in zip(self.layers, copies, strict=True):
            _write(layer.memory, copy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.logits = self._advance()
        self.graph = graph


def why_not(model: AffinearForCausalLM) -> str | None:
    """Why a model cannot be stepped in place; None where it can."""
    if any(not layer.self_attn.linear for layer in model.model.layers):  # pyright: ignore
        return "expected linear layers alone, got softmax, whose keys grow with every token; call generate"
    return None


def _own(memory: Past, device: torch.device) -> Past:
    """A copy that nobody else writes to, without what merging rounded off, which kernels do not carry."""
    state = memory.state
    plain = replace(memory, state=None if state is None else replace(state, rest=None))
    return plain.map(lambda x: x.to(device).clone(memory_format=torch.contiguous_format))


def _write(kept: Past, new: Past) -> None:
    """Put the numbers of one memory into the tensors of another."""
    assert new.state is not None
    found: list[Tensor] = []
    replace(new, state=replace(new.state, rest=None)).map(lambda x: found.append(x) or x)
    rest = iter(found)
    kept.map(lambda x: x.copy_(next(rest)))
