"""LAMBADA, PIQA, HellaSwag and WinoGrande: published lines become the texts that lm-eval asks, and are judged so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor, nn

from affinear import tasks
from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language.likelihood import likelihoods, tokens_of
from affinear.tasks.language.network import IGNORED, made
from affinear.tasks.language.questions import read
from affinear.tasks.language.spelling import Spelling
from affinear.train import Recipe
from affinear.train.task import Job, Trained

TASK = tasks.find("language")
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "slept", "all", "day")
LINES: dict[str, list[dict[str, Any]]] = {
    "lambada": [{"text": f"He put the {word} on the table and looked at the {word}"} for word in WORDS],
    "piqa": [
        {"goal": f"clean a {w}", "sol1": f"wipe the {w}", "sol2": "eat it", "label": i % 2} for i, w in enumerate(WORDS)
    ],
    "hellaswag": [
        {
            "activity_label": "Baking",
            "ctx_a": f"[header] How to bake [title] Take the {word}.",
            "ctx_b": "then she",
            "endings": [f"{verb} it [substeps] now" for verb in ("eats", "bakes", "folds", "throws")],
            "label": str(i % 4),
        }
        for i, word in enumerate(WORDS)
    ],
    "winogrande": [
        {
            "sentence": f"The {w} did not fit into the bag, as the _ was too big.",
            "option1": w,
            "option2": "bag",
            "answer": "1",
        }
        for w in WORDS
    ],
}


def written(folder: Path, test: str) -> str:
    path = folder / f"{test}.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in LINES[test]) + "\n", encoding="utf-8")
    return f"{test}:{path}"


class Favours(nn.Module):
    """A network that finds some bytes likely, wherever they are, so that sums can be worked out by hand."""

    def __init__(self, likely: str) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(257), requires_grad=False)
        with torch.no_grad():
            self.scores[[ord(sign) for sign in likely]] = 2.0

    def forward(self, tokens: Tensor, targets: Tensor, fresh: Tensor | None, each: bool) -> tuple[Tensor, Tensor]:
        shares = self.scores.log_softmax(0)
        asked = targets != IGNORED
        losses = torch.where(asked, -shares[targets.clamp(min=0)], 0.0)
        return losses, targets == self.scores.argmax()


def trained(network: nn.Module) -> Trained[Any, Any]:
    facts = {"tokenizer": "bytes", "vocabulary": 257, "end": 256}
    return Trained(TASK, Job("affinear_tiny", {}, Recipe(), TASK.settings(context=64, test_batch=4), facts), network)


def test_published_lines_become_the_texts_that_are_asked(tmp_path: Path):
    asked = {test: read(test, Path(written(tmp_path, test).partition(":")[2])).asked for test in LINES}
    assert {test: len(found) for test, found in asked.items()} == dict.fromkeys(LINES, 10)
    assert asked["lambada"][1].contexts == ("He put the cat on the table and looked at the",)
    assert asked["lambada"][1].answers == (" cat",)
    assert asked["piqa"][1].contexts[0] == "Question: clean a cat\nAnswer:"
    assert (asked["piqa"][1].answers, asked["piqa"][1].right) == ((" wipe the cat", " eat it"), 1)
    assert asked["hellaswag"][2].contexts[0] == "Baking: How to bake. Take the sat. Then she"
    assert asked["hellaswag"][2].answers[0] == " eats it now"
    assert asked["hellaswag"][2].right == 2
    assert asked["winogrande"][1].contexts[1] == "The cat did not fit into the bag, as the bag"
    assert set(asked["winogrande"][1].answers) == {" was too big."}
    assert asked["winogrande"][1].right == 0


def test_answers_of_piqa_may_lie_in_a_file_of_their_own(tmp_path: Path):
    lines = [{k: v for k, v in line.items() if k != "label"} for line in LINES["piqa"]]
    (tmp_path / "valid.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "valid-labels.lst").write_text("1\n" * 10, encoding="utf-8")
    assert [one.right for one in read("piqa", tmp_path / "valid.jsonl").asked] == [1] * 10


@pytest.mark.parametrize(
    ("test", "line", "said"),
    [
        ("lambada", "{}", "line 1: expected a question of lambada, as published .no 'text'."),
        ("piqa", '{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', "expected a question of piqa"),
        ("hellaswag", "[]", "expected a question of hellaswag"),
        ("winogrande", json.dumps({"sentence": "none", "option1": "a", "option2": "b", "answer": "1"}), "winogrande"),
        (
            "winogrande",
            json.dumps({"sentence": "a _ b", "option1": "a", "option2": "b", "answer": "0"}),
            "expected a question of winogrande, as published .ValueError.",
        ),
        ("piqa", "", "expected questions of piqa, got none"),
    ],
)
def test_what_is_no_question_is_refused(tmp_path: Path, test: str, line: str, said: str):
    (tmp_path / "x.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read(test, tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="got no such"):
        read(test, tmp_path / "absent.jsonl")


@pytest.mark.parametrize("test", LINES)
def test_ten_lines_of_each_are_judged_as_the_definition_says(tmp_path: Path, test: str):
    network = Favours("aeiou wt")
    spec = written(tmp_path, test)
    score = tasks.evaluate(trained(network), spec)
    shares = network.scores.log_softmax(0)
    by_sum = by_length = 0
    totals: list[float] = []
    for question in read(test, Path(spec.partition(":")[2])).asked:
        sums = [sum(float(shares[byte]) for byte in answer.encode()) for answer in question.answers]
        lengths = [sum_ / (len(answer) - 1) for sum_, answer in zip(sums, question.answers, strict=True)]
        by_sum += sums.index(max(sums)) == question.right
        by_length += lengths.index(max(lengths)) == question.right
        totals.append(sums[question.right])
    assert score.count == 10
    if test == "lambada":
        assert score["accuracy"] == 0.0  # it never says a whole word
        assert score["perplexity"] == pytest.approx(math.exp(-sum(totals) / 10), rel=1e-4)
    elif test == "winogrande":  # its answers are the same text after other contexts, so there is nothing to divide by
        assert score.numbers == {"accuracy": by_sum / 10}
    else:
        assert (score["accuracy"], score["accuracy_normed"]) == (by_sum / 10, by_length / 10)


def test_likelihoods_are_sums_over_the_answer_alone_and_spaces_belong_to_it():
    network = made("affinear_tiny", {"num_hidden_layers": 1}, {"vocabulary": 257, "end": 256}, MOST_NUMBERS).eval()
    spelling = Spelling("bytes")
    pairs = [("ab ", "cd"), ("", "xyz"), ("one longer context", " and an answer")]
    found = likelihoods(network, spelling, pairs, torch.device("cpu"))
    for (context, answer), one in zip(pairs, found, strict=True):
        ids = torch.tensor([[256, *(context + answer).encode()]])
        logits = network.model(ids[:, :-1]).logits.detach().log_softmax(-1)[0]
        first = len(context.rstrip())
        expected = sum(float(logits[i, ids[0, i + 1]]) for i in range(first, ids.shape[1] - 1))
        assert one.total == pytest.approx(expected, rel=1e-4)
    assert tokens_of(spelling, "ab ", "cd") == ([256, *b"ab cd"], 3)
    cut = likelihoods(network, spelling, pairs[2:], torch.device("cpu"), longest=15)
    assert cut[0].total != pytest.approx(found[2].total, rel=1e-6)


def test_a_token_over_the_border_is_counted_as_lm_eval_does():
    """The context's own tokens, and then what the whole has beyond as many."""
    kit: Any = tokenizers
    words = kit.Tokenizer(
        kit.models.BPE({"<|end|>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, "aba": 5}, [("a", "b"), ("ab", "a")])
    )
    spelling = Spelling(words.to_str())
    assert spelling.encode(["a", "abc", "aba", "ab"]) == [[1], [3, 4], [5], [3]]
    assert tokens_of(spelling, "a", "bc") == ([0, 1, 4], 2)
    assert tokens_of(spelling, "ab", "c") == ([0, 3, 4], 2)
    assert tokens_of(spelling, "ab", "a") == ([0, 5], 1)  # lm-eval would give up here: nothing is left of the answer


def test_only_a_new_line_ends_a_line(tmp_path: Path):
    lines = [{"text": "one\u2028two\x85three"}, {"text": "four five"}]
    (tmp_path / "x.jsonl").write_text("\r\n".join(json.dumps(x, ensure_ascii=False) for x in lines), encoding="utf-8")
    assert [one.answers for one in read("lambada", tmp_path / "x.jsonl").asked] == [
        (" one\u2028two\x85three",),
        (" five",),
    ]


def test_questions_are_not_learnt_from(tmp_path: Path):
    data = TASK.open(written(tmp_path, "piqa"), TASK.settings())
    with pytest.raises(ValueError, match="is to be judged by alone; train on text and then use `affinear eval`"):
        TASK.settle(Job("affinear_tiny", {}, Recipe(), TASK.settings()), data)
