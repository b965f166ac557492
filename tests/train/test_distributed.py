"""Two processes over gloo train what one process trains with the same batch, and one of them speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from affinear.cli import build_app

COMMAND = (
    "train inline_deit_tiny --data digits --recipe tiny --epochs 1 --batch-size 192 --image-size 8 --workers 0 "
    "--seed {seed} --model-arg depth=1 --model-arg embed_dim=16 --model-arg num_heads=2 --model-arg patch_size=2 "
    "--set drop_path=0 --set save_every=3 --output {output}"
)


# Accelerate shards on GPUs alone. torch does on CPUs too, so that at least taking and putting back the state runs here.
SHARDED = """
import sys
from pathlib import Path
from types import SimpleNamespace as Stub

import timm, torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.fsdp import fully_shard

import affinear.models
from affinear.train.checkpoint import Position, load, save
from affinear.train.corrupt import Skipped
from affinear.train.state import load_into, snapshot

SMALL = dict(depth=1, embed_dim=16, num_heads=2, patch_size=4, img_size=8, in_chans=1, num_classes=3)

def kit():
    torch.manual_seed(0)
    network = timm.create_model("inline_deit_tiny", **SMALL)
    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    optimizer = Stub(optimizer=torch.optim.AdamW(network.parameters(), lr=1e-2))
    accelerator = Stub(distributed_type=DistributedType.FSDP, scaler=None)
    schedule = Stub(step_update=lambda step: None)
    return Stub(accelerator=accelerator, called=network, network=network, optimizer=optimizer, average=None,
                schedule=schedule, work=Stub(skipped=Skipped()))

def train(parts, first, last):
    for step in range(first, last):
        torch.manual_seed(100 + step + 10 * dist.get_rank())
        parts.called(torch.randn(4, 1, 8, 8)).square().mean().backward()
        parts.optimizer.optimizer.step()
        parts.optimizer.optimizer.zero_grad()

dist.init_process_group("gloo")
whole = kit()
train(whole, 0, 3)
taken = snapshot(whole, Position(3))
if dist.get_rank() == 0:
    save(Path(sys.argv[1]), taken)
dist.barrier()
train(whole, 3, 6)
torn = kit()
train(torn, load_into(torn, load(Path(sys.argv[1], "step-000000003"))).step, 6)
one, other = snapshot(whole, Position(6)).weights, snapshot(torn, Position(6)).weights
if dist.get_rank() == 0:
    plain = timm.create_model("inline_deit_tiny", **SMALL).state_dict()
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in plain.items()}
    assert all(torch.equal(one[name], other[name]) for name in one)
    print("the same")
dist.destroy_process_group()
"""


def together(program: list[str]) -> str:
    """Run a program in two processes, as a user would, and return what they printed."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, *program]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


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


def test_sharded_weights_are_saved_whole_and_go_on(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(SHARDED)
    assert "the same" in together([str(program), str(tmp_path)])
