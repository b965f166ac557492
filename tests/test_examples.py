"""The scripts of examples/ do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import affinear as af

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*command: str) -> str:
    """Run a program and return what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_shards_are_summarized_by_one_process_or_more(tmp_path: Path):
    key, value = torch.randn(2, 1, 60, 2, 4, dtype=torch.float64).unbind()
    for i, (start, stop) in enumerate([(0, 10), (10, 11), (11, 60)]):
        torch.save({"key": key[:, start:stop].clone(), "value": value[:, start:stop].clone()}, tmp_path / f"{i}.pt")
    script = str(EXAMPLES / "summarize_shards.py")
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(*together, script, str(tmp_path), "--output", str(tmp_path / "two.safetensors"))
    assert "3 shards, 60 tokens" in printed
    kept = sorted(tmp_path.glob("*.mala.safetensors"))
    assert len(kept) == 3
    kept[1].unlink()  # as if the run had been stopped there
    run(script, str(tmp_path), "--output", str(tmp_path / "one.safetensors"))
    for name in ("one", "two"):
        state = af.State.load(tmp_path / f"{name}.safetensors")
        torch.testing.assert_close(state.covariance, af.summarize(key, value).covariance)


@pytest.mark.exhaustive
def test_text_is_printed_as_it_comes_and_goes_on_from_a_file(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from affinear.models.language import AffinearForCausalLM, preset

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    AffinearForCausalLM(preset("small", vocab_size=20, num_hidden_layers=1)).save_pretrained(tmp_path)
    script, kept = str(EXAMPLES / "stream_text.py"), str(tmp_path / "kept.safetensors")
    printed = run(script, str(tmp_path), "w1 w2 w3", "--tokens", "6", "--keep", kept)
    assert len(printed.splitlines()[0].replace("w", " w").split()) == 9
    assert f"8 tokens in {kept}" in printed  # the last one was said, and not heard
    later = run(script, str(tmp_path), "w5", "--tokens", "2", "--after", kept, "--keep", kept + "2")
    assert f"10 tokens in {kept}2" in later
