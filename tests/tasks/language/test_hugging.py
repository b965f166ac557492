"""A trained network as a folder of transformers': the same tokens, and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language.hugging import save_pretrained, tokenizer_of
from affinear.tasks.language.network import made
from affinear.tasks.language.spelling import Spelling, learnt
from affinear.train import Recipe
from affinear.train.task import Job, Trained

from .test_questions import TASK

TEXTS = (
    "the cat sat on the mat",
    "  two  spaces\n\tand more ",
    "über 東京 “so”",
    "a <|end|> in a text",
    "",
    " .,!? n't 's",
)


def trained(spelling: Spelling, model: str = "affinear_tiny") -> Trained[Any, Any]:
    facts = {"tokenizer": spelling.text, "vocabulary": spelling.size, "end": spelling.end}
    network = made(model, {"num_hidden_layers": 1, "hidden_size": 64}, facts, MOST_NUMBERS).eval()
    return Trained(TASK, Job(model, {}, Recipe(), TASK.settings(context=64), facts), network)


@pytest.mark.parametrize("model", ["affinear_tiny", "llama_tiny"])
@pytest.mark.parametrize("kind", ["bytes", "learnt"])
def test_transformers_reads_what_was_trained(tmp_path: Path, kind: str, model: str):
    spelling = Spelling("bytes") if kind == "bytes" else learnt(iter(TEXTS * 3), 300)
    run = trained(spelling, model)
    folder = save_pretrained(run, tmp_path / "folder")
    words: Any = hf.AutoTokenizer.from_pretrained(folder)
    for text, ids in zip(TEXTS, spelling.encode(TEXTS), strict=True):
        assert words(text)["input_ids"] == [spelling.end, *ids]
        assert words.encode(text, add_special_tokens=False) == ids
        assert words.decode(ids) == text
    assert (words.bos_token_id, words.eos_token_id, words.pad_token_id) == (spelling.end,) * 3
    again: Any = hf.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([words(TEXTS[0])["input_ids"]])
    network: Any = run.network
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, network.model(tokens).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(ValueError, match="expected a new folder, got one that exists"):
        save_pretrained(run, folder)


def test_numbers_are_no_text(tmp_path: Path):
    with pytest.raises(ValueError, match="tokenizer: expected one of texts, got numbers"):
        save_pretrained(trained(Spelling("numbers:40")), tmp_path / "folder")
    with pytest.raises(ValueError, match="numbers"):
        tokenizer_of(Spelling("numbers:40"))
    assert not list(tmp_path.iterdir())
