"""Recipes of language models: the published one of about 340M parameters, one for few tokens, and one for puzzles."""

from __future__ import annotations

from ...train.recipe import Recipe
from .settings import LanguageSettings

USUAL, PUBLISHED, PUZZLE = "small", "published", "recall"

RECIPES: dict[str, tuple[Recipe, LanguageSettings]] = {
    # For tens of millions of tokens: 32,768 of them in a step, a cosine down to a tenth.
    USUAL: (
        Recipe(
            steps=5_000,
            batch_size=32,
            lr=1e-3,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            sched="cosine",
            warmup_steps=200,
            warmup_lr=0.0,
            min_lr=1e-4,
            clip_grad=1.0,
            eval_steps=1_000,
            compile=False,
            channels_last=False,
        ),
        LanguageSettings(),
    ),
    # That of GLA and DeltaNet at 340M: half a million tokens in a step, 15 billion in all, half a billion of warm-up.
    PUBLISHED: (
        Recipe(
            steps=30_720,
            batch_size=256,
            lr=3e-4,
            weight_decay=0.01,
            betas=(0.9, 0.95),
            sched="cosine",
            warmup_steps=1_024,
            warmup_lr=0.0,
            min_lr=3e-5,
            clip_grad=1.0,
            eval_steps=2_048,
            compile=False,
            channels_last=False,
        ),
        LanguageSettings(context=2_048, vocabulary=32_000),
    ),
    PUZZLE: (
        Recipe(
            steps=5_000,
            batch_size=64,
            lr=1e-3,
            weight_decay=0.1,
            sched="cosine",
            warmup_steps=200,
            warmup_lr=0.0,
            min_lr=1e-5,
            clip_grad=1.0,
            eval_steps=1_000,
            compile=False,
            channels_last=False,
        ),
        LanguageSettings(test_batch=64),
    ),
}
