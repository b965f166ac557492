"""`affinear predict`: what trained weights answer."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import TRAINING, changes_of, listen, require, sentence, stop, told_in_a_sentence
from .plugins import Plugins, load_plugins

NOTHING = "(nothing)"  # came of a stream
DRAWING = "generate"  # the task that is asked for classes


def predict(
    weights: Annotated[Path, typer.Option(help="Folder of a run, or a file of weights.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Files or folders of images, of recordings, or whatever the task answers."),
    ] = None,
    task: Annotated[str | None, typer.Option(help="The task, for weights that do not tell; else classify.")] = None,
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for what is drawn or written, where a task does.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="classify: how many guesses for each image.")] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="generate: a class to draw, by number or name; again for more.")
    ] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of training.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any option of the task's: field=value; may be given again.")
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="speech, language: print words as they come, in memory of one size.")
    ] = False,
    plugin: Plugins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Answer with trained weights: what images show, with the likeliest classes first, or what else the task does.

    What cannot be read gets a line that says so; the others are answered, and the exit code is 1. Files that are in the
    folder already and differ are left, and a free name such as street-2.png is taken, unless --force.
    """
    require("train", *TRAINING)
    import json

    from affinear import tasks
    from affinear.train import spelling
    from affinear.train.devices import device

    found: list[Any] = []
    written: set[Path] = set()
    failed = False
    with told_in_a_sentence("what was answered before stays"):
        load_plugins(plugin)
        trained = tasks.load_trained(weights, model, task=task)
        if image_size is not None:
            sized = changes_of(trained.task, None, image_size=image_size)
            trained = tasks.load_trained(weights, model, task=task, **sized)
        trained.network.to(device())
        given = [*(setting or []), *([] if top is None else [f"top={top}"])]
        options = trained.task.options().changed(**spelling.parse(given, trained.task.options))
        named = sources or []
        asked = [*(named if trained.task.prompted else _files_of(named, trained.task.endings)), *(classes or [])]
        if classes and trained.task.name != DRAWING:
            raise ValueError(f"--class: --task {trained.task.name} draws no classes; name files or folders")
        if not asked:
            raise ValueError("sources: expected something to answer: files, folders, or --class for a generator")
        listen()
        if stream:
            if as_json or output is not None:
                other = "--json" if as_json else "--output"
                raise ValueError(
                    f"{other}: --stream prints words as they come, and nothing else; leave one of them out"
                )
            whole = [_follow(trained, source, options) for source in asked]
            sys.exit(0 if all(whole) else 1)
        for answer in trained.task.predict(trained, asked, options):
            failed |= answer.error is not None
            said = answer.text if answer.error is None else answer.error.removeprefix(f"{answer.source}: ")
            found.append({"source": answer.source, **(answer.content or {"error": answer.error and said})})
            if not as_json:
                print(f"{answer.source}: {said}")
            drawn = Path() if output is None and trained.task.draws else output
            kept = _kept(answer.files, drawn, force, written)
            written.update(kept)
            if kept and "files" in found[-1]:
                found[-1]["files"] = [path.name for path in kept]
            for path in kept:
                print(f"  {path}", file=sys.stderr)
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    if failed:
        sys.exit(1)


def _follow(trained: Any, source: str, options: Any) -> bool:
    """Print what comes, as it comes, or why nothing does; whether it came to its end."""
    words = trained.task.follow(trained, source, options)
    print(f"{source}:", end="", flush=True)
    silent = True
    try:
        for word in words:
            print(f"{trained.task.between}{word}", end="", flush=True)
            silent = False
        print(f"{trained.task.between}{NOTHING}" if silent else "", end="")
    except (ValueError, OSError) as error:
        print(f" {sentence(error).removeprefix(f'{source}: ')}", end="")
        return False
    finally:
        print()
    return True


def _files_of(sources: list[str], endings: Collection[str]) -> list[str]:
    """The sources, with all files of a folder in its place; a folder without any stays, so that it is told.

    Args:
        sources: Files and folders.
        endings: Of the files that are meant; none for images.
    """
    from affinear.tasks.images.finding import files_ending
    from affinear.tasks.images.reading import suffixes

    found: list[str] = []
    for source in sources:
        files = files_ending(Path(source), endings or suffixes()) if Path(source).is_dir() else []
        found += sorted(file.path for file in files) or [source]
    return found


def _kept(files: Any, output: Path | None, force: bool, written: set[Path]) -> list[Path]:
    """Where the files of an answer were written; what this command has `written` is not replaced even by force."""
    if output is None or not files:
        return []
    from affinear.lens.files import place

    try:
        output.mkdir(parents=True, exist_ok=True)
        wanted = {output / Path(name).name: content for name, content in files.items()}
        return [place(content, path, force=force and path not in written).path for path, content in wanted.items()]
    except OSError as error:
        stop(f"What was drawn could not be saved to {output}: {error.strerror or error}.")
