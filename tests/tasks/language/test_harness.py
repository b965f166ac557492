"""lm-eval is given models and tasks as it asks for them; with the package itself, where it is installed."""

from __future__ import annotations

import importlib
import json
import math
import random
import runpy
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from affinear import tasks
from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language.harness import harness_model, speaking
from affinear.tasks.language.harness_tasks import KNOWN, harness_tasks
from affinear.tasks.language.hugging import save_pretrained
from affinear.tasks.language.likelihood import likelihoods
from affinear.tasks.language.network import made
from affinear.tasks.language.questions import TESTS, read
from affinear.tasks.language.spelling import Spelling, learnt
from affinear.train import Recipe
from affinear.train.task import Job, Trained

from .test_questions import LINES, TASK, Favours, trained, written


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of lm-eval's name and layout, for where it is not installed."""
    package = tmp_path / "stand_in" / "lm_eval"
    for known in KNOWN.values():
        (package / "tasks" / known.file).parent.mkdir(parents=True, exist_ok=True)
        (package / "tasks" / known.file).write_text(f"task: {known.name}\n")
    (package / "api").mkdir()
    (package / "__init__.py").touch()
    (package / "api" / "model.py").write_text("class LM:\n    pass\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(package.parent))
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


def asked(*args: Any) -> SimpleNamespace:
    return SimpleNamespace(args=args)


def test_without_the_package_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setattr("affinear.tasks.language.harness.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="lm-eval is not installed: pip install lm-eval"):
        harness_model(trained(Favours("ab")))
    with pytest.raises(ValueError, match="lm-eval is not installed"):
        harness_tasks({}, tmp_path)


@pytest.mark.usefixtures("stand_in")
def test_lm_eval_is_given_what_it_asks_for():
    network = Favours("ab")
    model = harness_model(trained(network))
    share = float(network.scores.log_softmax(0)[ord("a")])
    count = random.randrange(1, 9)
    (total, greedy), (_, other) = model.loglikelihood([asked("context", "a" * count), asked("", "z")])
    assert total == pytest.approx(count * share, rel=1e-4)
    assert (greedy, other) == (True, False)
    assert model.loglikelihood_rolling([asked("aa")])[0] == pytest.approx(2 * share, rel=1e-4)


@pytest.mark.usefixtures("stand_in")
def test_what_is_said_ends_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch):
    heard: list[str] = []

    def spoken(network: Any, spelling: Any, prompt: str, options: Any) -> Any:
        for piece in ("Yes", ", it", " is.\nQ", "uestion: no", " more"):
            heard.append(piece)
            yield piece

    monkeypatch.setattr("affinear.tasks.language.harness.spoken", spoken)
    model = harness_model(trained(Favours("ab")))
    assert model.generate_until([asked("Is it?", {"until": ["Question:", "\n"]})]) == ["Yes, it is."]
    assert heard[-1] == " is.\nQ"  # nobody waits for what is cut off
    assert model.generate_until([asked("Is it?", {"until": " is"})]) == ["Yes, it"]
    assert model.generate_until([asked("Is it?", {"until": None})]) == ["Yes, it is.\nQuestion: no more"]


@pytest.mark.parametrize(
    ("told", "tokens", "temperature"),
    [
        ({}, 256, 0.0),
        ({"max_gen_toks": 7, "max_new_tokens": 9}, 7, 0.0),
        ({"max_tokens": 9, "do_sample": True}, 9, 1.0),
        ({"max_completion_tokens": 3, "temperature": 0.7}, 3, 0.7),
        ({"temperature": 0.7, "do_sample": False}, 256, 0.0),
    ],
)
def test_how_to_go_on_has_many_names(told: dict[str, Any], tokens: int, temperature: float):
    options, stops = speaking(told)
    assert (options.tokens, options.temperature, stops) == (tokens, temperature, [])


def test_published_files_become_tasks_with_lm_evals_definitions(tmp_path: Path, stand_in: Path):
    files = {test: Path(written(tmp_path, test).partition(":")[2]) for test in TESTS}
    lines = [{k: v for k, v in line.items() if k != "label"} for line in LINES["piqa"]]
    files["piqa"].write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    files["piqa"].with_name("piqa-labels.lst").write_text("1\n" * 10, encoding="utf-8")
    made_tasks = harness_tasks(files, tmp_path / "tasks")
    assert [Path(task).stem for task in made_tasks] == ["lambada_openai", "piqa", "hellaswag", "winogrande"]
    for (test, known), task in zip(KNOWN.items(), made_tasks, strict=True):
        told = json.loads(Path(task).read_text())
        assert told["include"] == str(stand_in / "tasks" / known.file)
        assert (told["task"], told["dataset_path"], told["dataset_name"]) == (known.name, "json", None)
        (half, place), *_ = told["dataset_kwargs"]["data_files"].items()
        assert half == ("test" if test == "lambada" else "validation")
        assert read(test, Path(place)).asked == read(test, files[test]).asked
    with pytest.raises(
        ValueError, match="files: expected tests out of lambada, piqa, hellaswag, winogrande, got 'arc'"
    ):
        harness_tasks({"arc": "x"}, tmp_path)
    (stand_in / "tasks" / KNOWN["piqa"].file).unlink()
    with pytest.raises(ValueError, match=r"expected tasks/piqa/piqa\.yaml in the package, got none"):
        harness_tasks({"piqa": files["piqa"]}, tmp_path)


def test_the_example_judges_any_model(
    tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    results = '{"results": {model: {"alias": "x", "acc,none": 0.5}}}'
    (stand_in / "__init__.py").write_text(f"def simple_evaluate(model, tasks, num_fewshot):\n    return {results}")
    (stand_in / "models").mkdir()
    (stand_in / "models" / "huggingface.py").write_text("def HFLM(pretrained, **given):\n    return pretrained")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    script = Path(__file__).resolve().parents[3] / "examples" / "judge_by_lm_eval.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "folder"), written(tmp_path, "piqa")])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == f"{tmp_path / 'folder'}  acc  0.5000\n"


WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "slept", "über", "naïve", "東京", "“so”")


def published(random: random.Random) -> dict[str, list[dict[str, Any]]]:
    """Lines with all that may go wrong: spaces, brackets, capitals, signs of several bytes."""

    def words(most: int) -> str:
        return " ".join(random.choice(WORDS) for _ in range(random.randint(1, most)))

    def one(*of: str) -> str:
        return random.choice(of)

    count = range(12)
    return {
        "lambada": [{"text": words(9) + one("", " .", ",", "  x", " \n y") + " " + one(*WORDS)} for _ in count]
        + [{"text": text} for text in ("word", "two  spaces", "a line\nbreak", "a space at the end ", "the [1]")],
        "piqa": [
            {
                "goal": words(5) + one("", "?", " ", "\n"),
                "sol1": one("", " ") + words(6) + one("", '\'s "x"'),
                "sol2": words(6),
                "label": random.randint(0, 1),
            }
            for _ in count
        ],
        "hellaswag": [
            {
                "activity_label": one("Baking", " Food and Entertaining"),
                "ctx_a": one("[header] How to bake [title] ", "", "A man [substeps]  ")
                + words(6)
                + one(".", " [step]", " "),
                "ctx_b": one("", "then She", "[step] and", "über Alles"),
                "endings": [words(6) + one("", ".", " [step] now.", "  [title] More") for _ in range(4)],
                "label": random.randint(0, 3),
            }
            for _ in count
        ],
        "winogrande": [
            {
                "sentence": words(5) + " _" + one(" ", "'s ", ", ", "  ") + words(5) + one(".", " ", ""),
                "option1": one(*WORDS),
                "option2": words(2),
                "answer": one("1", "2"),
            }
            for _ in count
        ],
    }


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed; the tests above do without it")
@pytest.mark.parametrize("kind", ["learnt", "bytes"])
def test_lm_eval_itself_gives_the_same_scores(tmp_path: Path, kind: str, seed: int):
    """Our own scores, our model in lm-eval, and a folder of transformers' in lm-eval."""
    lm_eval: Any = importlib.import_module("lm_eval")
    of_transformers: Any = importlib.import_module("lm_eval.models.huggingface").HFLM
    rng = random.Random(seed)
    files = {test: tmp_path / f"{test}.jsonl" for test in TESTS}
    for test, lines in published(rng).items():
        files[test].write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    texts = [" ".join(rng.choice(WORDS) for _ in range(50)) for _ in range(30)]
    spelling = Spelling("bytes") if kind == "bytes" else learnt(iter(texts), 350)
    facts = {"tokenizer": spelling.text, "vocabulary": spelling.size, "end": spelling.end}
    network = made("affinear_tiny", {"num_hidden_layers": 1, "conv_size": 3}, facts, MOST_NUMBERS).eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(2)
    ours = Trained(TASK, Job("affinear_tiny", {}, Recipe(), TASK.settings(context=64, test_batch=4), facts), network)
    folder = save_pretrained(ours, tmp_path / "folder")
    models = (
        harness_model(ours),
        of_transformers(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32", backend="causal"),
    )
    asked = harness_tasks(files, tmp_path / "tasks")
    for model in models:
        found = lm_eval.simple_evaluate(model=model, tasks=asked, log_samples=True, bootstrap_iters=0)
        for test, known in KNOWN.items():
            own = tasks.evaluate(ours, f"{test}:{files[test]}")
            theirs = {name.partition(",")[0]: value for name, value in found["results"][known.name].items()}
            assert theirs["acc"] == pytest.approx(own["accuracy"])
            if test == "lambada":
                assert math.log(theirs["perplexity"]) == pytest.approx(math.log(own["perplexity"]), abs=1e-4)
            elif test != "winogrande":
                assert theirs["acc_norm"] == pytest.approx(own["accuracy_normed"])
            samples = sorted(found["samples"][known.name], key=lambda sample: sample["doc_id"])
            for question, sample in zip(read(test, files[test]).asked, samples, strict=True):
                pairs = list(zip(question.contexts, question.answers, strict=True))
                assert [tuple(args) for args in sample["arguments"]] == pairs
                judged = likelihoods(network, spelling, pairs, torch.device("cpu"))
                for one, ((total, greedy),) in zip(judged, sample["resps"], strict=True):
                    assert float(total) == pytest.approx(one.total, abs=1e-4)
                    assert greedy == one.greedy
