"""The page of speech: word errors by mechanism, and an hour of audio in one piece."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages.arms import NONE, Row, Values, by_arm, doubts, held, page, read
from pages.words import shown, table

ARMS = ("softmax_relative", "softmax", "mala", "linear", "nala", "inline", NONE, "mala_causal")
LINEAR = ("mala", "linear", "nala", "inline")
HOUR = 60.0  # minutes
DEAF, MUMBLING = 95.0, 70.0  # percent of words; whoever errs more often has not learnt to hear, or has hardly
WER_BAR = 1.0  # points that MALA may be behind softmax with relative positions


def speech(found: Path) -> tuple[str, dict[str, Any]]:
    """The page of speech, and the JSON beside it."""
    cells = [{**told, **told["cell"]} for file in sorted((found / "cells").glob("*.json")) if (told := read(file))]
    hour, stream = read(found / "speech_hour.json"), read(found / "stream.json")
    wer = by_arm(cells, ARMS, lambda cell: 100 * cell["wer"])
    cannot = [
        _limits(cells),
        *_deaf(wer),
        *(doubts(wer, ARMS, lower=True, unit="points") if wer else ["No network was trained yet."]),
        *([] if hour else ["An hour of audio in one piece was not measured yet."]),
    ]
    words = [told for file in sorted((found / "words").glob("*.json")) if (told := read(file))]
    parts = [_table(cells, wer), *_learnt(cells, wer), *_words(words), *_bars(cells, wer)] if wer else []
    parts += [_fresh(stream)] if stream else []
    parts += [_hour(hour)] if hour else []
    told = f"--only {','.join(wer)} --steps {cells[0]['plan']['steps']} " if cells else ""
    commands = [
        f"PYTHONPATH=src python evidence/speech.py --data packed --out speech {told}--minutes 9",
        *(["PYTHONPATH=src python evidence/speech.py --data packed --out speech --part words"] if words else []),
        "PYTHONPATH=src python evidence/speech.py --data packed --out speech --part stream",
        "PYTHONPATH=src python benchmarks/speech_hour.py --out speech/speech_hour.json",
    ]
    kept = {
        "cells": cells,
        **({"words": words} if words else {}),
        **({"stream": stream} if stream else {}),
        **({"hour": hour} if hour else {}),
    }
    return page("Speech: words that are heard wrong, by mechanism", cannot, parts, commands), kept


def _limits(cells: Sequence[Row]) -> str:
    """What was learnt from by what, and that this is no LibriSpeech."""
    said = "The recordings are of actors in a game, many of them with processed voices"
    if cells:
        shape, (learnt, strangers, known) = cells[0]["shape"], cells[0]["hours"]
        said += (
            f", {learnt:.1f} hours of them to learn from, {cells[0]['epochs']:.0f} times; {strangers:.1f} hours of "
            f"five others and {known:.1f} of lines that were not learnt are held out; the networks have "
            f"{shape['depth']} blocks of {shape['dim']} channels"
        )
    return f"{said}: no WER here is to be read beside one of LibriSpeech's."


def _deaf(wer: Values) -> list[str]:
    """Which arms have not learnt to hear."""
    means = {arm: statistics.mean(values) for arm, values in wer.items()}
    deaf = [arm for arm, mean in means.items() if mean >= DEAF]
    mumbling = [arm for arm, mean in means.items() if MUMBLING <= mean < DEAF]
    found: list[str] = []
    if deaf:
        found.append(
            f"{', '.join(deaf)} have not learnt to hear in so few steps: their texts are empty or a letter here and "
            "there. Of such WERs, and of their order, nothing follows; the loss tells who is how far."
        )
    if mumbling:
        found.append(
            f"{', '.join(mumbling)} have hardly learnt to hear: they write letters that sound alike, and "
            f"{min(means[arm] for arm in mumbling):.0f} words of a hundred or more are wrong. Neither a distance "
            "of WERs nor a bar that is met or missed at this stage says what networks do that hear; CER and the loss "
            "tell who is how far."
        )
    return found


def _table(cells: Sequence[Row], wer: Values) -> str:
    rows: list[list[str]] = []
    for arm in wer:
        mine = [cell for cell in cells if cell["arm"] == arm]
        edits = [shown([100 * cell[name] for cell in mine]) for name in ("wer", "cer")]
        edits += [shown([100 * cell["known"][name] for cell in mine]) for name in ("wer", "cer")]
        steps = "/".join(sorted({str(cell["plan"]["steps"]) for cell in mine}))
        loss = shown([cell["losses"][-1] for cell in mine], ".2f")
        rows.append([arm, str(len(mine)), *edits, loss, f"{mine[0]['parameters'] / 1e6:.2f} M", steps])
    first, known = cells[0], cells[0]["known"]
    about = (
        f"WER and CER in percent on {first['recordings']:,} recordings ({first['words']:,} words) of speakers that "
        f"were never heard, and on {known['recordings']:,} ({known['words']:,} words) of those that were, averaged "
        "weights after the last step, the likeliest piece of every token; the loss is that of training, of a letter, "
        "in the last stretch of steps, on the same recordings in all arms."
    )
    head = ("attention", "seeds", "WER", "CER", "WER, known speakers", "CER, known", "loss", "parameters", "steps")
    return f"{about}\n\n{table(head, rows)}"


def _learnt(cells: Sequence[Row], wer: Values) -> list[str]:
    """Whether there were too few steps, or too little to learn from: losses of what was learnt and what was not."""
    if not all("again" in cell for cell in cells):
        return []
    rows: list[list[str]] = []
    for arm in wer:
        mine = [cell for cell in cells if cell["arm"] == arm]
        parts = [[cell["again"] for cell in mine], [cell["known"] for cell in mine], mine]
        losses = [shown([one["loss"] for one in part], ".2f") for part in parts]
        rows.append([arm, *losses, shown([100 * one["wer"] for one in parts[0]])])
    stages = "; ".join(
        f"{stage['steps']:,} steps over the {stage['hours']:.1f} hours whose lines are short enough, "
        f"{stage['times']:.0f} times"
        for stage in cells[0]["stages"]
    )
    about = (
        f"The loss of a letter without masks, and WER on what was learnt. Where what was learnt is no better than the "
        f"rest, more steps help; where it is far better, more recordings would. There were {stages}."
    )
    head = ("attention", "loss, learnt", "loss, known speakers", "loss, never heard", "WER, learnt")
    return [f"{about}\n\n{table(head, rows)}"]


def _words(words: Sequence[Row]) -> list[str]:
    """Errors where n-grams help."""
    if not words:
        return []
    rows: list[list[str]] = []
    for arm in [arm for arm in ARMS if arm in {one["cell"]["arm"] for one in words}]:
        mine = [one for one in words if one["cell"]["arm"] == arm]
        rows.append([arm, str(len(mine)), *(shown([100 * part["wer"] for part in parts]) for parts in _both(mine))])
    first = words[0]
    about = (
        f"WER with n-grams of {first['order']} words, counted in what was learnt, {first['beam']} texts kept in "
        f"the search, by the library's own settings in all arms. Of the words of speakers that were never heard "
        f"{100 * first['unknown']:.1f} % are not among those learnt, and {100 * first['known']['unknown']:.1f} % of "
        "the others'."
    )
    return [f"{about}\n\n{table(('attention', 'seeds', 'WER', 'WER, known speakers'), rows)}"]


def _both(some: Sequence[Row]) -> list[list[Row]]:
    """Of speakers that were never heard, and of those that were."""
    return [list(some), [one["known"] for one in some]]


def _bars(cells: Sequence[Row], wer: Values) -> list[str]:
    found: list[str] = []
    if "mala" in wer and "softmax_relative" in wer:
        behind = statistics.mean(wer["mala"]) - statistics.mean(wer["softmax_relative"])
        said = f"**Bar: MALA within {WER_BAR} of softmax with relative positions, or better.** "
        if statistics.mean(wer["softmax_relative"]) >= DEAF:
            said += "Nothing is shown: neither has learnt to hear."
        else:
            said += f"It is {abs(behind):.1f} points {'behind' if behind > 0 else 'ahead'}: "
            by = f" by {behind - WER_BAR:.1f}" if behind > WER_BAR else ""
            said += f"the bar {held(behind <= WER_BAR)}{by and f', missed{by}'}."
            if min(len(wer["mala"]), len(wer["softmax_relative"])) == 1:
                said += " One seed of an arm shows neither for good."
        found.append(said)
    streams = [cell["stream"] for cell in cells if "stream" in cell]
    if streams:
        same, tokens = (sum(stream[name] for stream in streams) for name in ("same_tokens", "tokens"))
        found.append(
            f"**Bar: the stream says what the whole says, token for token.** {same:,} of {tokens:,} tokens are the "
            "same."
        )
    return found


def _fresh(stream: Row) -> str:
    """Streams of networks with fresh weights."""
    counts = ("recordings", "tokens", "same_tokens", "pieces")
    rows = [[row["mechanism"], *(f"{row[name]:,}" for name in counts)] for row in stream["rows"]]
    same = all(row["same_tokens"] == row["tokens"] for row in stream["rows"])
    head = ("attention", "recordings", "tokens", "the same", "kinds of tokens")
    about = (
        "Causal networks with fresh weights over recordings of the held-out speakers, in pieces and whole, "
        f"{stream['machine']['device']}."
    )
    bar = f"**Bar: the stream says what the whole says, token for token.** It {held(same)}."
    return f"{about}\n\n{table(head, rows)}\n\n{bar}"


def _hour(hour: Row) -> str:
    rows = [[row["model"], row["arm"], f"{row['minutes']:g}", *_measured(row)] for row in hour["rows"]]
    about = f"The encoder in one piece, forward alone, {hour['machine']['device']}."
    head = ("network", "attention", "minutes of audio", "seconds", "GiB")
    return f"{about}\n\n{table(head, rows)}\n\n{_hour_bar(hour['rows'])}"


def _hour_bar(rows: Sequence[Row]) -> str:
    """Whether an hour fits by every linear mechanism, and what it takes beside SDPA."""
    whole = [row for row in rows if row["minutes"] == HOUR and row["arm"] in LINEAR]
    fits = bool(whole) and all("seconds" in row for row in whole)
    said = f"**Bar: linear mechanisms take an hour in one piece.** It {held(fits)}."
    for model in dict.fromkeys(row["model"] for row in whole):
        sdpa = {row["minutes"]: row for row in rows if (row["model"], row["arm"]) == (model, "softmax")}
        ours = [row for row in rows if row["model"] == model and row["arm"] in LINEAR and "seconds" in row]
        base = sdpa.get(HOUR, {})
        times = [base["seconds"] / row["seconds"] for row in ours if row["minutes"] == HOUR and "seconds" in base]
        if times:
            memory = [row["gib"] for row in ours if row["minutes"] == HOUR]
            said += (
                f" With {model} they are {min(times):.1f} to {max(times):.1f} times as fast as SDPA, with "
                f"{min(memory):.2f} to {max(memory):.2f} GiB beside its {base['gib']:.2f}."
            )
        behind = [
            f"{row['arm']} at {row['minutes']:g} minutes"
            for row in ours
            if row["seconds"] >= sdpa.get(row["minutes"], {}).get("seconds", math.inf)
        ]
        said += f" Not faster than SDPA: {', '.join(behind)}." if behind else ""
    return said


def _measured(row: Row) -> list[str]:
    if "seconds" in row:
        return [f"{row['seconds']:.3f}", f"{row['gib']:.2f}" if row.get("gib") else ""]
    if "would_need_gib" in row:
        return ["not tried", f"{row['would_need_gib']:,.0f} of scores alone"]
    return ["does not fit", ""]
