"""Two processes over gloo train what one process trains with the same batch, and one of them speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import affinear.models
from affinear.cli import build_app
from affinear.train.checkpoint import Position, load, save
from affinear.train.corrupt import Skipped
from affinear.train.state import load_into, share_buffers, snapshot

assert affinear.models

COMMAND = (
    "train inline_deit_tiny --data digits --recipe tiny --epochs 1 --batch-size 192 --image-size 8 --workers 0 "
    "--seed {seed} --model-arg depth=1 --model-arg embed_dim=16 --model-arg num_heads=2 --model-arg patch_size=2 "
    "--set drop_path=0 --set save_every=3 --output {output}"
)


SMALL: dict[str, Any] = {
    "depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4, "img_size": 8, "in_chans": 1, "num_classes": 3,
}  # fmt: skip


# Accelerate shards on GPUs alone. torch does on CPUs too, so that at least taking and putting back the state runs here.
def sharded_kit() -> Any:
    """All that is trained with, its weights shared out among the processes."""
    torch.manual_seed(0)
    network: Any = timm.create_model("inline_deit_tiny", **SMALL)
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    return Stub(
        accelerator=Stub(distributed_type=DistributedType.FSDP, scaler=None),
        called=network,
        network=network,
        optimizer=Stub(optimizer=torch.optim.AdamW(network.parameters(), lr=1e-2)),
        average=None,
        schedule=Stub(step_update=lambda step: None),
        work=Stub(skipped=Skipped()),
    )


def train_sharded(parts: Any, first: int, last: int) -> None:
    """Steps on images that every process draws for itself."""
    for step in range(first, last):
        torch.manual_seed(100 + step + 10 * dist.get_rank())
        parts.called(torch.randn(4, 1, 8, 8)).square().mean().backward()
        parts.optimizer.optimizer.step()
        parts.optimizer.optimizer.zero_grad()


def stop_and_go_on(folder: Path) -> dict[str, Any]:
    """Six steps, and three with three more after them: shapes of what is saved, and whether it ends the same."""
    dist.init_process_group("gloo")
    whole = sharded_kit()
    train_sharded(whole, 0, 3)
    taken = snapshot(whole, Position(3))
    if dist.get_rank() == 0:
        save(folder, taken)
    dist.barrier()
    train_sharded(whole, 3, 6)
    torn = sharded_kit()
    train_sharded(torn, load_into(torn, load(folder / "step-000000003")).step, 6)
    one, other = snapshot(whole, Position(6)).weights, snapshot(torn, Position(6)).weights
    dist.destroy_process_group()
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in one.items()},
        "same": all(torch.equal(one[name], other[name]) for name in one),
    }


def together(program: list[str]) -> str:
    """Run a program in two processes, as a user would, and return what they printed."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *program]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.exhaustive  # tests/tasks/test_contract.py says it of every task, in processes that are forked
def test_two_processes_train_what_one_does(tmp_path: Path, seed: int):
    alone = CliRunner().invoke(build_app(), COMMAND.format(seed=seed % 1000, output=tmp_path / "one").split())
    assert alone.exit_code == 0, alone.output
    told = together(["-m", "affinear.cli", *COMMAND.format(seed=seed % 1000, output=tmp_path / "two").split()])
    assert told.count("Best weights") == 1
    one, two = load_file(tmp_path / "one" / "last.safetensors"), load_file(tmp_path / "two" / "last.safetensors")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=2e-5)
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names == {path.name for path in (tmp_path / "one").iterdir()}
    lines = (tmp_path / "two" / "log.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == len((tmp_path / "one" / "log.jsonl").read_text().splitlines())


def test_sharded_weights_are_saved_whole_and_go_on(tmp_path: Path, in_ranks: Callable[..., list[Any]]):
    first, _ = in_ranks(2, lambda: stop_and_go_on(tmp_path))
    plain = timm.create_model("inline_deit_tiny", **SMALL).state_dict()
    assert first["shapes"] == {name: list(tensor.shape) for name, tensor in plain.items()}
    assert first["same"]


def statistics_of_two() -> list[list[float]]:
    """Running statistics of a batch norm that saw other numbers in each process: before they are shared, and after."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    norm = torch.nn.BatchNorm1d(3)
    norm(torch.randn(5 + dist.get_rank(), 3))
    told = [[x for buffer in norm.buffers() for x in buffer.flatten().tolist()]]
    share_buffers(norm)
    told.append([x for buffer in norm.buffers() for x in buffer.flatten().tolist()])
    dist.destroy_process_group()
    return told


def test_what_all_judge_has_the_running_statistics_of_the_first(in_ranks: Callable[..., list[Any]]):
    (before, after), (other_before, other_after) = in_ranks(2, statistics_of_two)
    assert before != other_before
    assert after == other_after == before
