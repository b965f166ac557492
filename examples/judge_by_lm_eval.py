"""Let lm-eval judge a language model by published files of its tests, with nothing fetched.

    python examples/judge_by_lm_eval.py runs/ours piqa:valid.jsonl winogrande:dev.jsonl
    python examples/judge_by_lm_eval.py FOLDER lambada:lambada_test.jsonl hellaswag:hellaswag_val.jsonl

The model is a run of `affinear train --task language`, or a folder that any model's save_pretrained wrote, with its
tokenizer. `pip install lm-eval` brings the package.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from affinear.tasks.language.harness import harness_model
from affinear.tasks.language.harness_tasks import harness_tasks


def main() -> None:
    """Read the command line, judge, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tests", nargs="+", help="lambada:FILE, piqa:FILE, hellaswag:FILE or winogrande:FILE")
    chosen = parser.parse_args()
    files = {test: path for test, _, path in (spec.partition(":") for spec in chosen.tests)}
    with tempfile.TemporaryDirectory() as folder:
        tasks = harness_tasks(files, folder)
        import lm_eval  # pyright: ignore

        found: Any = lm_eval.simple_evaluate(model=opened(chosen.model), tasks=tasks, num_fewshot=0)  # pyright: ignore
    for task, numbers in found["results"].items():
        for name, value in numbers.items():
            if isinstance(value, float):
                print(f"{task}  {name.partition(',')[0]}  {value:.4f}")


def opened(model: Path) -> Any:
    """The model as lm-eval knows them, on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (model / "config.json").is_file():
        from lm_eval.models.huggingface import HFLM  # pyright: ignore

        import affinear.models.language  # noqa: F401 # pyright: ignore # so that transformers knows our models

        return HFLM(pretrained=str(model), backend="causal", device=device)
    from affinear.tasks import load_trained

    trained = load_trained(model)
    trained.network.to(device)
    return harness_model(trained)


if __name__ == "__main__":
    main()
