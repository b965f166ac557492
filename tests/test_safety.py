"""A file of weights, a run folder or an image that somebody else made is read; nothing that it brings is run."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save

import affinear
from affinear import linearizing
from affinear.models.making import make
from affinear.tasks import load_trained
from affinear.tasks.classify import TASK, ClassifySettings
from affinear.tasks.images.reading import CorruptImage
from affinear.train import Recipe, Setup

MODEL = "inline_deit_tiny"
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4}
ROOT = Path(__file__).parent


class Bomb:
    """Runs a command wherever it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.call, (self.command.split(),)


def weights(folder: Path, **changes: Any) -> Path:
    """A file of weights as training writes it, but for what is changed in what it says about itself."""
    told = {"num_classes": 2, "img_size": (8, 8), **SMALL}
    tensors = make(MODEL, told).state_dict()
    shown = ClassifySettings(image_size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=1.0)
    setup = json.loads(Setup(TASK, Recipe(), shown).to_json())
    about = {
        "model": MODEL,
        "model_args": SMALL,
        "facts": {"class_names": ["cat", "dog"], "channels": 3},
        **setup,
        **changes,
    }
    path = folder / "weights.safetensors"
    path.write_bytes(save(tensors, {"format": "pt", "about": json.dumps(about)}))
    return path


def bomb_in(path: Path, mark: Path) -> Path:
    """A file that makes `mark` when it is unpickled.

    Its first object makes torch's careful reader raise a TypeError, after which timm tries again without care.
    """
    tripwire = b"ccollections\nOrderedDict\n)RNb0"
    path.write_bytes(b"\x80\x02" + tripwire + pickle.dumps(Bomb(f"touch {mark}"), 2)[2:])
    return path


def attacks(folder: Path) -> dict[str, dict[str, Any]]:
    """What a file may say about itself in the hope that reading it runs a command, or writes a file."""
    bomb = bomb_in(folder / "bomb.pth", folder / "run")
    trap = folder / "model"
    trap.mkdir()
    bomb_in(trap / "pytorch_model.bin", folder / "run")
    config = {"architecture": MODEL, "num_classes": 2, "pretrained_cfg": {"file": str(bomb)}, "model_args": SMALL}
    (trap / "config.json").write_text(json.dumps(config))
    address = {"url": bomb.as_uri(), "hf_hub_id": None, "num_classes": 2}
    cache = {"cache_dir": str(folder / "written")}
    return {
        "a pickle to load afterwards": {"model_args": {**SMALL, "checkpoint_path": str(bomb)}},
        "a configuration with an address": {
            "model_args": {**SMALL, "pretrained": True, "pretrained_cfg": address, **cache}
        },
        "an address laid over the configuration": {
            "model_args": {**SMALL, "pretrained": True, "pretrained_cfg_overlay": address, **cache}
        },
        "a loader of its own": {
            "model": "vit_tiny_patch16_224",
            "model_args": {
                "pretrained": True,
                "pretrained_cfg_overlay": {**address, "custom_load": True},
                **cache,
            },
        },
        "a folder of timm's": {"model": f"local-dir:{trap}", "model_args": {"pretrained": True}},
        "a place on a hub": {"model": "hf-hub:somebody/something", "model_args": {"pretrained": True}},
    }


@pytest.mark.parametrize("attack", range(6))
def test_what_weights_say_about_themselves_never_runs_code(attack: int, tmp_path: Path):
    _, changes = list(attacks(tmp_path).items())[attack]
    path = weights(tmp_path, **changes)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"takes no '|model: expected the name of a network|model_args: "):
        load_trained(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_weights_without_the_attack_are_read(tmp_path: Path):
    assert load_trained(weights(tmp_path)).job.facts["class_names"] == ["cat", "dog"]


def guarded(work: str, *given: Path) -> None:
    """Run Python in another process, with a guard that forbids all that reading a file has no need of."""
    code = "import sys\nfrom pathlib import Path\nfrom guarded import Guard\nguard = Guard()\n" + textwrap.dedent(work)
    path = os.pathsep.join([str(ROOT / "fuzz"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code + "\nassert not guard.crossed, guard.crossed", *map(str, given)],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("work", ["import os; os.system('true')", "import socket; socket.socket()"])
def test_the_guard_itself_forbids(work: str):
    with pytest.raises(AssertionError, match="Crossed"):
        guarded(f"with guard.forbidding():\n    {work}")


def test_reading_weights_runs_and_opens_nothing_else(tmp_path: Path):
    files: list[Path] = []
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        files.append(weights(folder, **list(attacks(folder).values())[number]))
    good = weights(tmp_path)
    bomb = bomb_in(tmp_path / "bomb.pth", tmp_path / "run")
    torch.save({"model": {"x": torch.zeros(2)}, "args": Bomb("true")}, tmp_path / "zipped.pth")
    guarded(
        """
        from affinear.models.checkpoints import convert, read
        from affinear.tasks import load_trained
        from affinear.tasks.classify.predict import predict
        from PIL import Image

        *bad, bomb, zipped, good = map(Path, sys.argv[1:])
        load_trained(good)  # what is imported on the way may do as it likes
        image = good.with_name("image.png")
        Image.new("RGB", (9, 7)).save(image)
        with guard.forbidding():
            (answer,) = predict(load_trained(good), [image])
            assert answer.error is None
            (answer,) = predict(load_trained(good), [bomb])
            assert answer.error
            for path in bad + [bomb, zipped]:
                for use in (load_trained, read, lambda path: convert(path, "mavit_tiny")):
                    try:
                        use(path)
                    except ValueError:
                        pass
        """,
        *files,
        bomb,
        tmp_path / "zipped.pth",
        good,
    )
    assert not list(tmp_path.rglob("run"))


def test_reading_a_linearized_network_runs_and_opens_nothing_else(tmp_path: Path, guard: Any):
    teacher = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    student, _ = affinear.linearize(teacher, "mala", gain=True)
    good, _ = linearizing.save(student, tmp_path / "good.safetensors", model_args={"depth": 1, "img_size": 32})
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(good.read_bytes())
    told = json.loads(good.with_suffix(".json").read_text())
    told["model_args"]["checkpoint_path"] = str(bomb_in(tmp_path / "bomb.pth", tmp_path / "run"))
    bad.with_suffix(".json").write_text(json.dumps(told))
    with guard.forbidding():
        linearizing.load(good)
        with pytest.raises(ValueError, match="model_args: checkpoint_path: expected a name"):
            linearizing.load(bad)
    assert not (tmp_path / "run").exists()


def from_file(path: str) -> Any:
    """A module of the tests that is no package's."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def guard() -> Any:
    """A guard of this very process, which forbids where it is told to and only listens elsewhere."""
    return from_file("fuzz/guarded.py").Guard()


def test_reading_photos_with_boxes_masks_and_maps_runs_and_opens_nothing_else(tmp_path: Path, guard: Any):
    from affinear.tasks.detect.opening import open_coco
    from affinear.tasks.segment.opening import open_scenes

    coco = from_file("tasks/detect/conftest.py").make_coco(tmp_path / "coco", train=3, test=3)
    scenes = from_file("tasks/segment/scenes.py").write(tmp_path / "scenes", (3, 3))

    def look() -> list[int]:
        found = open_coco(str(coco))
        maps = open_scenes(str(scenes), zero_is_class=False, test_split=None, memory=False)
        return [read_all(half) for half in (found.train, found.test, maps.train, maps.test)]

    look()  # what is imported on the way may do as it likes
    with guard.forbidding():
        assert look() == [3, 3, 3, 3]
    bomb_in(coco / "val/2.png", tmp_path / "run")
    bomb_in(scenes / "images/validation/scene2.jpg", tmp_path / "run")
    with guard.forbidding():
        with pytest.raises(ValueError, match="cannot be read as an image"):
            open_coco(str(coco))
        maps = open_scenes(str(scenes), zero_is_class=False, test_split=None, memory=False)
        assert [read_all(half) for half in (maps.train, maps.test)] == [3, 2]
    assert not (tmp_path / "run").exists()


def read_all(half: Any) -> int:
    """How many samples could be read."""
    number = 0
    for i in range(len(half)):
        try:
            half[i]
        except CorruptImage:
            continue
        number += 1
    return number


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_reading_a_hugging_face_data_set_runs_nothing_and_writes_into_its_cache_alone(
    kind: str, tmp_path: Path, guard: Any, monkeypatch: pytest.MonkeyPatch
):
    datasets = pytest.importorskip("datasets")
    from affinear.tasks.classify import data

    hugging = from_file("tasks/images/labelled/test_hugging.py")
    cache, folder = tmp_path / "cache", tmp_path / "pets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    datasets.disable_progress_bars()
    splits = {"train": hugging.table(4), "test": hugging.table(3)}
    if kind == "parquet":
        hugging.parquet(folder, **splits)
    else:
        datasets.DatasetDict(splits).save_to_disk(folder)
    code = f"import os\nos.system('touch {tmp_path / 'run'}')\n"
    (folder / "loader.py").write_text(code)
    bomb_in(folder / "dataset.pkl", tmp_path / "run")

    def look() -> tuple[int, int]:
        images = data.open_data(f"hfds/{folder}")
        return read_all(images.train), read_all(images.test)

    look()
    shutil.rmtree(cache, ignore_errors=True)
    with guard.forbidding(str(cache)):
        assert look() == (4, 3)
    (folder / "pets.py").write_text(code)  # by its name, a loader of this very data set
    refused = pytest.raises(ValueError, match=r"hfds/.*: datasets cannot read it \(Dataset scripts are no longer")
    with guard.forbidding(str(cache)), refused:
        look()
    assert not (tmp_path / "run").exists()


def test_from_pretrained_of_a_linearized_network_runs_and_opens_nothing_else(tmp_path: Path, guard: Any):
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    teacher = hf.BertModel(hf.BertConfig(vocab_size=20, **sizes))
    student, _ = affinear.linearize(teacher, "mala")
    student.save_pretrained(tmp_path / "student")
    folder = tmp_path / "student"
    hf.BertModel.from_pretrained(folder)
    # Code beside the weights, named in the configuration, and an older file of weights that is a pickle.
    (folder / "modeling.py").write_text(f"import os\nos.system('touch {tmp_path / 'run'}')\nclass Bert: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling.Bert", "AutoConfig": "modeling.Bert"}
    (folder / "config.json").write_text(json.dumps(config))
    bomb_in(folder / "pytorch_model.bin", tmp_path / "run")
    with guard.forbidding():
        again = hf.BertModel.from_pretrained(folder)
    assert again.state_dict().keys() == student.state_dict().keys()
    assert not (tmp_path / "run").exists()


def test_reading_a_teachers_folder_runs_and_opens_nothing_else(tmp_path: Path, guard: Any):
    hf = pytest.importorskip("transformers")
    from affinear.tasks.distil import causal

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    folder = tmp_path / "teacher"
    hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=20, **sizes)).save_pretrained(folder)
    causal.teacher_of(folder, torch.float32)  # what is imported on the way may do as it likes
    bomb = bomb_in(folder / "pytorch_model.bin", tmp_path / "run")
    shutil.copy(bomb, folder / "adapter_model.bin")
    (folder / "modeling.py").write_text(f"import os\nos.system('touch {tmp_path / 'run'}')\nclass Llama: pass\n")
    good = json.loads((folder / "config.json").read_text())
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Llama"}, "transformers_weights": "adapter_model.bin"}
    (folder / "config.json").write_text(json.dumps({**good, **code}))
    with guard.forbidding():
        causal.source_of(str(folder))
        causal.teacher_of(folder, torch.float32)
    seen = {"architecture": "resnet18", "model_args": {"checkpoint_path": str(bomb)}}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3n", "vision_config": seen}))
    with guard.forbidding(), pytest.raises(ValueError, match="vision_config: expected the part that gemma3n has"):
        causal.teacher_of(folder, torch.float32)
    (folder / "model.safetensors").rename(folder / "decoy.safetensors")
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(good))
    with guard.forbidding(), pytest.raises(ValueError, match="expected names of safetensors in its folder"):
        causal.teacher_of(folder, torch.float32)
    assert not (tmp_path / "run").exists()
