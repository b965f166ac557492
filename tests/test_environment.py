"""The environment that `make` builds is whole, pinned and light where it has to be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import affinear

ROOT = Path(__file__).resolve().parents[1]


def load_script(name: str) -> ModuleType:
    """Import a file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_importing_affinear_imports_torch_and_nothing_else():
    probe = """
import sys, torch
before = set(sys.modules)
import affinear
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    printed = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert set(printed.split()) - sys.stdlib_module_names <= {"affinear", "torch"}


def test_torchvision_runs_its_compiled_operators():
    ops = importlib.import_module("torchvision.ops")
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.8], [5.0, 5.0, 6.0, 6.0]])
    assert ops.nms(boxes, torch.tensor([0.5, 0.9, 0.1]), iou_threshold=0.5).tolist() == [1, 2]


def test_timm_imports_and_knows_its_models():
    assert importlib.import_module("timm").is_model("deit_tiny_patch16_224")


def test_every_requirement_is_pinned():
    pins = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    required = {re.split(r"[^\w.-]", line)[0] for line in importlib.metadata.requires("affinear") or []}
    assert required <= pins
    assert {"torch", "torchvision"} <= pins  # together, or pip trades a CPU torch for a CUDA one


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_an_environment_that_is_a_link_is_ignored_by_git(tmp_path: Path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".venv").symlink_to(tmp_path / "elsewhere")
    told = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["??", ".gitignore"]


def test_version_is_the_same_everywhere():
    version = affinear.__version__
    assert importlib.metadata.version("affinear") == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_repairing_torchvision_again_changes_nothing():
    assert "nothing to do" in load_script("cpu_torchvision").main()


def test_repairing_torchvision_without_a_compiler_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    script = load_script("cpu_torchvision")
    monkeypatch.setattr(script, "folder_of", lambda module: ROOT)  # a torch without CUDA, by the look of its files
    monkeypatch.setattr(script, "import_error", lambda module: "operator torchvision::nms does not exist")
    monkeypatch.setattr(script.shutil, "which", lambda tool: None)
    with pytest.raises(RuntimeError, match="needs gcc and nm: install a C compiler"):
        script.main()
