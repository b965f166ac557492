"""A trained network as a folder of transformers': weights, configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...train.task import Trained
from ..appearing import appearing
from .spelling import BYTES, END, Spelling, need


def save_pretrained(trained: Trained[Any, Any], folder: str | Path) -> Path:
    """Write a trained network as transformers does: `AutoModelForCausalLM` and `AutoTokenizer` then read it.

    The tokenizer begins every text with the token that ends one, as training did. Whoever reads a network of ours has
    to import `affinear.models.language` first.

    Args:
        trained: What `affinear.tasks.load_trained` gives, of `--task language`.
        folder: A new one. It appears whole or not at all.

    Raises:
        ValueError: If the folder is there already, or the network knows no text (puzzles).
    """
    folder = Path(folder)
    with appearing(folder) as beside:
        words = tokenizer_of(Spelling(trained.job.facts["tokenizer"]))
        network: Any = trained.network
        network.model.save_pretrained(beside)
        words.save_pretrained(beside)
    return folder


def tokenizer_of(spelling: Spelling) -> Any:
    """A tokenizer of transformers' that spells as a network was taught.

    Example:
        >>> from affinear.tasks.language.hugging import tokenizer_of
        >>> from affinear.tasks.language.spelling import Spelling
        >>> tokenizer_of(Spelling("bytes"))("Hi")["input_ids"]
        [256, 72, 105]
    """
    need()
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    kit: Any = tokenizers
    if spelling.text == BYTES:
        words = kit.Tokenizer(kit.models.BPE({sign: byte for byte, sign in enumerate(_signs())}, []))
        words.pre_tokenizer = kit.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words.decoder = kit.decoders.ByteLevel()
        words.add_special_tokens([END])
    elif spelling.plain:
        raise ValueError("tokenizer: expected one of texts, got numbers, which puzzles are made of")
    else:
        words = kit.Tokenizer.from_str(spelling.text)
        words.no_padding()
        words.no_truncation()
    end = words.id_to_token(spelling.end)
    words.post_processor = kit.processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A {end} $B", special_tokens=[(end, spelling.end)]
    )
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token=end, eos_token=end, pad_token=end, padding_side="left",
        split_special_tokens=True, clean_up_tokenization_spaces=False, model_input_names=names,
    )  # fmt: skip


def _signs() -> list[str]:
    """How byte-level tokenizers write each byte: as the sign of that number if it can be seen, or one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + unseen.index(byte)) for byte in range(256)]
