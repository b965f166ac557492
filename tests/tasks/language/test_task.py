"""Language as a task: what it settles, keeps, scores by position, says and refuses."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator

from affinear import tasks
from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language import generating
from affinear.tasks.language.network import made
from affinear.tasks.language.scoring import Sums
from affinear.tasks.language.settings import Speaking
from affinear.tasks.language.spelling import Spelling, learnt
from affinear.train import Recipe
from affinear.train.task import Job, Setup, Trained

TASK = tasks.find("language")
FACTS = {"tokenizer": "bytes", "vocabulary": 257, "end": 256}


def job(data: Any, model: str = "affinear_tiny", **changes: Any) -> Job[Any]:
    setup = Setup(TASK, Recipe(batch_size=2), TASK.settings()).changed(**changes)
    return TASK.settle(Job(model, {}, setup.recipe, setup.settings), data)


def test_a_tokenizer_is_learnt_once_and_goes_with_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AFFINEAR_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("\n".join(f"line {number} of some text" for number in range(30)), encoding="utf-8")
    changes: dict[str, Any] = {"documents": "line", "held_out": 3, "vocabulary": 280}
    data = TASK.open(str(tmp_path / "a.txt"), TASK.settings(**changes))
    settled = job(data, **changes)
    assert settled.facts["vocabulary"] == 280
    assert settled.settings.context == 1024
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    assert (
        Spelling(kept.read_text(encoding="utf-8")).text
        == settled.facts["tokenizer"]
        == job(data, **changes).facts["tokenizer"]
    )
    TASK.check_job(settled)
    work = TASK.work(job(data, **changes, context=8), data, torch.device("cpu"))
    batch = next(iter(work.train_loader()))
    assert (batch.tokens.shape, work.per_step) == ((2, 8), 16.0)
    with pytest.raises(ValueError, match="does not fill one row of 1024 tokens; set context to less"):
        TASK.work(settled, data, torch.device("cpu")).train_loader()


def test_what_is_judged_is_told_as_what_it_is():
    sums = Sums(8, torch.device("cpu"))
    losses, fresh = torch.ones(2, 8), torch.zeros(2, 8, dtype=torch.bool)
    sums.add(losses, torch.ones(2, 8), torch.ones(2, 8, dtype=torch.long), fresh)
    score = sums.score(Accelerator(), rows=2)
    assert (score.count, score.counted) == (2, "rows")
    assert [(part.count, part.counted) for part in score.parts] == [(16, "tokens")]


@pytest.mark.parametrize("change", [{"tokenizer": 3}, {"tokenizer": "{}"}, {"vocabulary": 10**9}, {"end": 0}])
def test_facts_out_of_a_file_are_checked(change: dict[str, Any]):
    with pytest.raises(ValueError, match=r"tokenizer|vocabulary"):
        TASK.check_job(Job("affinear_tiny", {}, Recipe(), TASK.settings(context=8), {**FACTS, **change}))


def test_tokens_of_another_vocabulary_are_refused():
    trained = Trained(TASK, Job("affinear_tiny", {}, Recipe(), TASK.settings(context=8), FACTS), torch.nn.Identity())
    puzzles = TASK.open("recall:length=16,pairs=2,symbols=64", TASK.settings())
    with pytest.raises(
        ValueError, match=r"spelled by another tokenizer, of 64 tokens, than the network's, of 257; give"
    ):
        TASK.check_data(trained, puzzles)


def test_a_puzzle_has_its_own_length_and_recipe():
    puzzles = TASK.open("copy:length=16,symbols=9,train=8,test=4", TASK.settings())
    settled = job(puzzles)
    assert (settled.settings.context, settled.facts["vocabulary"], settled.facts["tokenizer"]) == (16, 10, "numbers:10")
    assert TASK.trial("affinear_tiny", puzzles).recipe == TASK.recipes["recall"].recipe
    with pytest.raises(ValueError, match="context: expected 16, the length of copy"):
        job(puzzles, context=32)


def test_mechanisms_are_compared_in_ours_alone():
    assert set(TASK.variants("affinear_tiny")) >= {"softmax", "mala", "mala_released"}
    assert TASK.variants("llama_tiny") == {"own": {}}
    with pytest.raises(ValueError, match="expected 'own', as llama_tiny has no mechanism to choose, got 'mala'"):
        TASK.variant("llama_tiny", "mala")


def test_perplexity_is_told_by_what_came_before():
    sums = Sums(100, torch.device("cpu"))
    losses, targets = torch.rand(2, 100), torch.randint(0, 9, (2, 100))
    targets[1, 90:] = -100
    fresh = torch.zeros(2, 100, dtype=torch.bool)
    fresh[0, 40] = True
    sums.add(losses, targets == 3, targets, fresh)
    score = sums.score(Accelerator(cpu=True), 2)
    assert [part.name for part in score.parts] == ["tokens 0 to 31", "tokens 32 to 63", "tokens 64 to 127"]
    assert [part.count for part in score.parts] == [96, 68, 26]
    asked = losses[targets != -100]
    assert score["perplexity"] == pytest.approx(math.exp(asked.double().mean()), rel=1e-6)
    early = torch.cat((losses[0, :32], losses[0, 40:72], losses[1, :32])).double().mean()
    assert score.parts[0].numbers["perplexity"] == pytest.approx(math.exp(early), rel=1e-6)


@pytest.mark.parametrize("name", ["affinear_tiny", "llama_tiny", "mamba2_tiny"])
def test_what_is_said_greedily_is_the_likeliest_token_after_the_whole_text(name: str):
    spelling = Spelling("numbers:40")
    network = made(name, {"num_hidden_layers": 1}, {"vocabulary": 40, "end": 0}, MOST_NUMBERS).eval()
    said = "".join(generating.spoken(network, spelling, "3 5 7", Speaking(tokens=5, temperature=0.0, top_k=None)))
    ids = [0, 3, 5, 7]
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(network.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 0:
                break
    assert said.split() == [str(token) for token in ids[4:] if token]


def test_nothing_is_said_when_nobody_listens():
    network = made("affinear_tiny", {"num_hidden_layers": 1}, {"vocabulary": 40, "end": 39}, MOST_NUMBERS).eval()
    threads = threading.active_count()
    spoken = generating.spoken(network, Spelling("numbers:40"), "3 5", Speaking(tokens=10**9))
    assert [next(spoken) for _ in range(3)]
    assert threading.active_count() == threads + 1
    cast("Generator[str]", spoken).close()
    assert threading.active_count() == threads


def test_sampling_follows_its_seed_and_leaves_the_global_one_alone():
    spelling = learnt(iter(["some words to learn from", "and some more words"]), 270)
    network = made(
        "affinear_tiny", {"num_hidden_layers": 1}, {"vocabulary": 270, "end": spelling.end}, MOST_NUMBERS
    ).eval()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    texts = [
        "".join(generating.spoken(network, spelling, "some", Speaking(tokens=12, seed=seed))) for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(ValueError, match="prompt: expected some text to go on from, got none"):
        generating.spoken(network, spelling, "", Speaking())
    with pytest.raises(ValueError, match="prompt: expected numbers from 0 to 39, got 'word'"):
        generating.spoken(network, Spelling("numbers:40"), "3 word", Speaking())
