"""Print text as a language model thinks of it, for as long as you like, in constant memory.

    python examples/stream_text.py FOLDER "Once upon a time" --tokens 500
    python examples/stream_text.py FOLDER "And then" --after book.safetensors --keep later.safetensors

FOLDER is what save_pretrained wrote, model and tokenizer. --after goes on from a cache in a file, --keep writes one at
the end: both of one size, however long the text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer

from affinear.models.language import AffinearCache, AffinearForCausalLM, stream


def main() -> None:
    """Read the command line, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=200, help="when to stop at the latest")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 for the likeliest token")
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--after", type=Path, help="a cache to go on from")
    parser.add_argument("--keep", type=Path, help="where to write the cache at the end")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AffinearForCausalLM.from_pretrained(chosen.folder).eval().to(device)  # pyright: ignore
    tokenizer = AutoTokenizer.from_pretrained(chosen.folder)
    cache = AffinearCache.load(chosen.after, model) if chosen.after else AffinearCache(model.config)
    pieces = stream(
        model, tokenizer, chosen.prompt, cache=cache, max_new_tokens=chosen.tokens, temperature=chosen.temperature,
        top_k=chosen.top_k, generator=torch.Generator(device).manual_seed(chosen.seed),
    )  # fmt: skip
    print(chosen.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    if chosen.keep:
        print(f"{cache.get_seq_length()} tokens in {cache.save(chosen.keep, model)}")


if __name__ == "__main__":
    main()
