"""Text comes as it is made, whole letters only, and a state can be put into a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.models.language import AffinearCache, AffinearForCausalLM, Stepper, read, stream
from affinear.models.language.cache import StateLayer
from affinear.models.language.streaming import stream_tokens

from .conftest import VOCABULARY, made


class Bytes:
    """A tokenizer of bytes: letters of several tokens."""

    def __len__(self) -> int:
        return 256

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


class Parrot:
    """In the model's place: it says a text, a token at a time."""

    def __init__(self, text: str) -> None:
        self.model, self.text = made(vocab_size=256), iter(text.encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.model(*args, **kwargs)
        out.logits = torch.nn.functional.one_hot(torch.tensor([[next(self.text)]]), 256).float()
        return out


def test_letters_of_several_tokens_come_whole():
    text = "Größe: ∑ 你好 ok"
    pieces = list(stream(Parrot(text), Bytes(), "x", max_new_tokens=len(text.encode())))  # pyright: ignore
    assert pieces == list(text)


def test_a_cache_holds_on_to_nothing_of_the_text_it_was_made_of():
    model = made(conv_size=3)
    cache = AffinearCache(model.config)
    for tokens in (300, 1, 200):
        read(model, torch.randint(1, VOCABULARY, (1, tokens)), cache, piece=1000)
        for layer in cache.layers:
            assert isinstance(layer, StateLayer)
            held: list[torch.Tensor] = []
            layer.memory.map(lambda x, held=held: held.append(x) or x)
            assert all(x.untyped_storage().nbytes() <= 2 * x.nbytes for x in held)


def test_it_streams_what_generate_says_and_goes_on_from_a_cache():
    model, tokens = made(softmax_every=2, conv_size=3).double(), torch.randint(1, VOCABULARY, (1, 11))
    said = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 11:].tolist()
    assert [int(x) for x in stream_tokens(model, tokens, max_new_tokens=8)] == said
    cache = AffinearCache(model.config)
    read(model, tokens[:, :6], cache, piece=4)
    assert [int(x) for x in stream_tokens(model, tokens[:, 6:], cache=cache, max_new_tokens=8)] == said


def test_chance_is_the_callers():
    model, tokens = made(), torch.randint(1, VOCABULARY, (1, 5))

    def said(seed: int, **way: Any) -> list[int]:
        chance = torch.Generator().manual_seed(seed)
        return [int(x) for x in stream_tokens(model, tokens, max_new_tokens=8, generator=chance, **way)]

    hot = 1e3  # all tokens are alike: some fresh models would say the same one again and again, whatever the chance
    assert said(1, temperature=hot) == said(1, temperature=hot) != said(2, temperature=hot)
    assert said(1, temperature=5.0, top_k=1) == said(2)


def test_it_stops_where_the_model_ends_its_text():
    model, tokens = made(), torch.randint(1, VOCABULARY, (1, 5))
    first = next(iter(stream_tokens(model, tokens, max_new_tokens=1)))
    model.generation_config.eos_token_id = int(first)  # pyright: ignore[reportOptionalMemberAccess]
    assert len(list(stream_tokens(model, tokens, max_new_tokens=9))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_holds_what_the_cache_does(model: AffinearForCausalLM, tmp_path: Path, dtype: torch.dtype):
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    model.to(dtype)  # pyright: ignore
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        cache = model(tokens[:, :9], attention_mask=mask[:, :9]).past_key_values
        path = cache.save(tmp_path / "text.safetensors", model)
        loaded = AffinearCache.load(path, model)
        after, again = (model(tokens[:, 9:], past_key_values=x).logits for x in (cache, loaded))
    assert loaded.get_seq_length() == 12
    assert torch.equal(after, again)
    assert [x.name for x in tmp_path.iterdir()] == ["text.safetensors"]


def test_the_file_of_a_long_text_is_no_larger(tmp_path: Path):
    model, sizes = made(conv_size=4), set[int]()
    for length in (10, 700):
        cache = AffinearCache(model.config)
        read(model, torch.randint(VOCABULARY, (1, length)), cache, piece=300)
        sizes.add(cache.save(tmp_path / f"{length}.safetensors", model).stat().st_size)
    assert max(sizes) - min(sizes) < 16  # the header says how many tokens


@pytest.mark.parametrize("changes", [{}, {"mechanism": "nala", "conv_size": 3, "rope_theta": None}], ids=["", "parts"])
def test_steps_in_place_are_steps(changes: dict[str, Any]):
    model, tokens = made(**changes).double(), torch.randint(1, VOCABULARY, (3, 12))
    whole = model(tokens, use_cache=False).logits
    cache = AffinearCache(model.config)
    logits = read(model, tokens[:, :7], cache)
    step = Stepper(model, cache)
    kept = [layer.memory.state.covariance for layer in step.layers]  # pyright: ignore[reportOptionalMemberAccess]
    for i in range(7, 12):
        torch.testing.assert_close(logits, whole[:, i - 1], rtol=1e-9, atol=1e-9)
        logits = step(tokens[:, i]).clone()
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-9, atol=1e-9)
    assert all(a is b.memory.state.covariance for a, b in zip(kept, step.layers, strict=True))  # pyright: ignore
    torch.testing.assert_close(
        read(model, tokens[:, :1], cache), model(torch.cat((tokens, tokens[:, :1]), 1)).logits[:, -1]
    )


def test_steps_in_place_need_a_state():
    with pytest.raises(ValueError, match="model: expected linear layers alone, got softmax"):
        Stepper(made(softmax_every=2), AffinearCache(made().config))
    with pytest.raises(ValueError, match="cache: expected one that has seen a prompt"):
        Stepper(made(), AffinearCache(made().config))


def other(model: AffinearForCausalLM) -> AffinearForCausalLM:
    return made()


def half(model: AffinearForCausalLM) -> AffinearForCausalLM:
    return model.bfloat16()


def wider(model: AffinearForCausalLM) -> AffinearForCausalLM:
    return made(head_dim=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other, "got one of a model with other weights"),
        (half, "got one in torch.float32 for a model in torch.bfloat16"),
        (wider, "got one of another shape"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, change: Callable[[AffinearForCausalLM], AffinearForCausalLM], words: str
):
    model = made()
    path = model(torch.ones(1, 3, dtype=torch.long)).past_key_values.save(tmp_path / "a.safetensors", model)
    with pytest.raises(ValueError, match=f"path: expected a cache of this model, {words}"):
        AffinearCache.load(path, change(model))


def test_a_file_is_refused_if_it_is_damaged_or_something_else(tmp_path: Path):
    model = made()
    path = model(torch.ones(1, 3, dtype=torch.long)).past_key_values.save(tmp_path / "a.safetensors", model)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="its checksum does not fit"):
        AffinearCache.load(path, model)
    path.write_bytes(raw[:100])
    with pytest.raises(ValueError, match=r"path: expected a file that AffinearCache\.save wrote"):
        AffinearCache.load(path, model)
    with pytest.raises(ValueError, match=r"path: expected a file that AffinearCache\.save wrote"):
        AffinearCache.load(tmp_path / "none.safetensors", model)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"\(it is a pt\)"):
        AffinearCache.load(tmp_path / "model" / "model.safetensors", model)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("0.covariance", lambda x: x[:, :1], r"0.covariance is \(1, 1, 8, 8\)"),
        ("0.count", lambda x: x.int(), "0.count is .* in torch.int32"),
        ("1.keys", lambda x: x[:, :, :2], r"1.keys is \(1, 2, 2, 8\)"),
        ("1.values", lambda x: x.double(), "1.values is .* in torch.float64"),
        ("0.recent", lambda x: x[..., :3], "0.recent is"),
        ("0.key_mean", None, "0.key_mean"),
        ("5.key_mean", lambda x: torch.zeros(1), "5.key_mean is of no layer"),
        ("0.count", lambda x: torch.zeros((), dtype=torch.int64), "nothing of the first layer"),
    ],
)
def test_a_file_that_somebody_forged_is_refused(tmp_path: Path, name: str, change: Any, words: str):
    from safetensors import safe_open

    from affinear.models.sealing import sealed

    model = made(softmax_every=2, conv_size=3)
    path = model(torch.ones(1, 3, dtype=torch.long)).past_key_values.save(tmp_path / "a.safetensors", model)
    with safe_open(path, "pt") as file:
        told = {key: value for key, value in file.metadata().items() if key != "sha256"}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors.get(name)).contiguous()
    path.write_bytes(sealed(tensors, told))
    with pytest.raises(ValueError, match=f"path: expected the tensors of a cache, got others.*{words}"):
        AffinearCache.load(path, model)


def test_what_cannot_be_saved_is_refused(tmp_path: Path):
    model = made()
    with pytest.raises(ValueError, match="cache: expected one that has seen a text"):
        AffinearCache(model.config).save(tmp_path / "a.safetensors", model)
    cache = model(torch.ones(1, 3, dtype=torch.long)).past_key_values
    cache.save(tmp_path / "a.safetensors", model)
    with pytest.raises(ValueError, match="path: expected a file that does not exist yet"):
        cache.save(tmp_path / "a.safetensors", model)


@pytest.mark.parametrize(
    ("prompt", "size", "words"),
    [
        ("", 256, "input_ids: expected a prompt of at least one token"),
        ("x", 255, "tokenizer: expected at most the 255"),
    ],
)
def test_bad_prompts_are_refused(prompt: str, size: int, words: str):
    with pytest.raises(ValueError, match=words):
        list(stream(made(vocab_size=size), Bytes(), prompt, max_new_tokens=1))
