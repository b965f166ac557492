"""Loaders: each image follows from its draw alone, in one process or several, and accelerate can cut batches up."""

import pickle
import random
from collections.abc import Iterable
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader

from affinear.tasks.classify import data
from affinear.tasks.classify.samples import TrainSamples
from affinear.tasks.images.labelled.images import in_memory
from affinear.train.draws import Draw

TIMM = data.Augment("timm", "rand-m9-mstd0.5-inc1", reprob=0.5, vflip=0.2)
SIMPLE = data.Augment("simple", pad=2)
NONE = data.Augment("none")


def some_images(seed: int, count: int = 50, size: tuple[int, int] = (12, 10), channels: int = 3) -> data.Images:
    numbers = np.random.default_rng(seed)
    pixels = numbers.integers(0, 256, (count + 21, channels, *size), np.uint8)
    labels = np.arange(count + 21)  # so that a label tells which image it is
    names = tuple(map(str, labels))
    return in_memory("noise", (pixels[:count], labels[:count]), (pixels[count:], labels[count:]), names)


def batching(augment: data.Augment = NONE, size: tuple[int, int] = (12, 10), **given: Any) -> data.Batching:
    return data.Batching(8, size, augment=augment, **given)


def gathered(loader: Iterable[Any]) -> tuple[Tensor, Tensor]:
    images, targets = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(targets)


def same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("augment", [NONE, SIMPLE, TIMM], ids=lambda augment: augment.kind)
@pytest.mark.parametrize("size", [(12, 10), (16, 20)])
def test_an_image_follows_from_its_draw_alone(seed: int, augment: data.Augment, size: tuple[int, int]):
    images = some_images(seed)
    samples = TrainSamples(images.train, batching(augment, size), data.Skipped().tally("train", images.train))
    draws = [Draw(index % 50, seed + index) for index in range(60)]
    whole = samples.__getitems__(draws)
    order = np.random.default_rng(seed).permutation(60)
    assert same(samples.__getitems__([draws[place] for place in order]), (whole[0][order], whole[1][order]))
    alone, label = samples[draws[33]]
    assert torch.equal(alone, whole[0][33])
    assert label == whole[1][33] == 33
    dtype = torch.float32 if augment.reprob else torch.uint8  # what is erased is filled with numbers
    assert (whole[0].dtype, whole[1].dtype, whole[0].shape) == (dtype, torch.int64, (60, 3, *size))


@pytest.mark.parametrize("augment", [SIMPLE, TIMM], ids=lambda augment: augment.kind)
def test_two_workers_give_what_one_process_gives(seed: int, augment: data.Augment):
    images = some_images(seed)
    loaders = [data.train_loader(images, batching(augment, workers=workers), data.Skipped()) for workers in (0, 2)]
    for epoch in (0, 3):
        for loader in loaders:
            loader.batch_sampler.set_epoch(epoch)  # pyright: ignore
        assert same(gathered(loaders[0]), gathered(loaders[1]))


def test_epochs_and_seeds_differ_and_come_again(seed: int):
    images = some_images(seed)
    first = data.train_loader(images, batching(SIMPLE), data.Skipped())
    second = data.train_loader(images, batching(SIMPLE), data.Skipped())
    other = data.train_loader(images, batching(SIMPLE, seed=6), data.Skipped())
    zero = gathered(first)
    assert same(zero, gathered(second))
    assert not same(zero, gathered(other))
    first.batch_sampler.set_epoch(1)  # pyright: ignore
    assert not same(zero, gathered(first))


def test_bytes_in_memory_and_images_that_are_decoded_give_the_same(seed: int):
    images = some_images(seed)

    class Decoded:
        def __len__(self) -> int:
            return len(images.train)

        def __getitem__(self, index: int) -> Any:
            return images.train[index]

        def path(self, index: int) -> str:
            return images.train.path(index)

    source = Decoded()
    slow = data.Images("slow", source, source, images.class_names, None, 3)
    for augment in (NONE, SIMPLE):
        fast = gathered(data.train_loader(images, batching(augment), data.Skipped()))
        assert same(fast, gathered(data.train_loader(slow, batching(augment), data.Skipped())))


def test_nothing_random_is_drawn_or_changed_outside(seed: int):
    def state() -> tuple[object, ...]:
        arrays: Any = np.random.get_state()
        return random.getstate(), arrays[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    images = some_images(seed)
    for augment in (SIMPLE, TIMM):
        gathered(data.train_loader(images, batching(augment), data.Skipped()))
    gathered(data.test_loader(images, batching(), data.Skipped()))
    assert state() == before
    torch.manual_seed(seed + 1)
    again = gathered(data.train_loader(images, batching(TIMM), data.Skipped()))
    random.seed(1)
    assert same(again, gathered(data.train_loader(images, batching(TIMM), data.Skipped())))


def test_every_training_image_but_those_of_a_last_batch_comes_once(seed: int):
    loader = data.train_loader(some_images(seed), batching(), data.Skipped())
    targets = gathered(loader)[1].tolist()
    assert len(loader) == 6
    assert len(targets) == len(set(targets)) == 48


def test_repeated_images_differ(seed: int):
    augment = data.Augment("simple", pad=4, repeats=3)
    images, targets = next(iter(data.train_loader(some_images(seed), batching(augment), data.Skipped())))
    assert targets[0] == targets[1] == targets[2] != targets[3]
    assert not torch.equal(images[0], images[1]) or not torch.equal(images[1], images[2])


def test_a_batch_larger_than_the_set_is_named(seed: int):
    with pytest.raises(
        ValueError, match="noise has 7 training images, which do not fill a batch of 8; choose 7 or less"
    ):
        data.train_loader(some_images(seed, count=7), batching(), data.Skipped())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [(12, 10), (6, 8)])
def test_all_test_images_come_in_order_as_evaluation_sees_them(seed: int, workers: int, size: tuple[int, int]):
    images, how = some_images(seed), batching(SIMPLE, size, workers=workers)
    pixels, targets = gathered(data.ready(data.test_loader(images, how, data.Skipped()), data.Normalize(how)))
    assert targets.tolist() == list(range(50, 71))
    expected = [data.as_tensor(images.test[index][0], how) for index in range(21)]
    assert torch.equal(pixels, torch.stack(expected))


def test_full_test_batches_are_filled_with_what_cross_entropy_leaves_out(seed: int):
    images = some_images(seed)
    short, full = (data.test_loader(images, batching(), data.Skipped(), full=full) for full in (False, True))
    assert [len(targets) for _, targets in short] == [8, 8, 5]
    assert [len(targets) for _, targets in full] == [8, 8, 8]
    pixels, targets = gathered(full)
    assert targets.tolist() == [*range(50, 71), *[data.NO_IMAGE] * 3]
    assert same((pixels[:21], targets[:21]), gathered(short))
    logits = torch.randn(24, 71)
    cross_entropy = torch.nn.functional.cross_entropy
    torch.testing.assert_close(cross_entropy(logits, targets), cross_entropy(logits[:21], targets[:21]))


def test_grey_images_for_a_network_of_colours_and_back(seed: int):
    grey = some_images(seed, channels=1)
    assert next(iter(data.train_loader(grey, batching(SIMPLE), data.Skipped())))[0].shape == (8, 3, 12, 10)
    how = batching(TIMM, channels=1, mean=(0.5,), std=(0.5,))
    assert next(iter(data.train_loader(some_images(seed), how, data.Skipped())))[0].shape == (8, 1, 12, 10)


@pytest.mark.parametrize("augment", [SIMPLE, TIMM], ids=lambda augment: augment.kind)
def test_what_loading_processes_get_can_be_sent_to_them(seed: int, augment: data.Augment):
    loader = data.train_loader(some_images(seed), batching(augment), data.Skipped())
    parts = (loader.collate_fn, loader.worker_init_fn, loader.dataset.fit, loader.dataset.transform)  # pyright: ignore
    assert pickle.loads(pickle.dumps(parts))


def prepared(loader: DataLoader[Any], process: int, processes: int) -> Any:
    return prepare_data_loader(loader, num_processes=processes, process_index=process, split_batches=True)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("skipped_batches", [0, 4])
def test_accelerate_cuts_batches_up_sets_epochs_and_goes_on_within_one(seed: int, processes: int, skipped_batches: int):
    images = some_images(seed)
    whole = data.train_loader(images, batching(SIMPLE), data.Skipped())
    parts = [
        prepared(data.train_loader(images, batching(SIMPLE), data.Skipped()), process, processes)
        for process in range(processes)
    ]
    for epoch in (2, 3, 0):
        whole.batch_sampler.set_epoch(epoch)  # pyright: ignore
        expected = list(whole)[skipped_batches:]
        found = list[list[tuple[Tensor, Tensor]]]()
        for part in parts:
            part.set_epoch(epoch)
            found.append(list(accelerate.skip_first_batches(part, skipped_batches) if skipped_batches else part))
        together = [gathered(batch) for batch in zip(*found, strict=True)]
        assert len(together) == len(expected) == 6 - skipped_batches
        assert all(same(one, other) for one, other in zip(together, expected, strict=True))


def test_accelerate_gives_every_process_as_many_full_test_batches(seed: int):
    images = some_images(seed)
    parts = [
        gathered(prepared(data.test_loader(images, batching(), data.Skipped(), full=True), process, 2))
        for process in range(2)
    ]
    assert [len(targets) for _, targets in parts] == [12, 12]
    seen = torch.cat([targets for _, targets in parts])
    assert sorted(seen[seen != data.NO_IMAGE].tolist()) == list(range(50, 71))


def test_an_accelerator_takes_a_loader_with_workers(seed: int):
    config = accelerate.DataLoaderConfiguration(split_batches=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    images = some_images(seed)
    loader: Any = accelerator.prepare(data.train_loader(images, batching(SIMPLE, workers=2), data.Skipped()))
    plain = data.train_loader(images, batching(SIMPLE), data.Skipped())
    for epoch in (1, 0):
        loader.set_epoch(epoch)
        plain.batch_sampler.set_epoch(epoch)  # pyright: ignore
        assert same(gathered(loader), gathered(plain))
    loader.set_epoch(0)
    rest = accelerator.skip_first_batches(loader, 4)
    assert same(gathered(rest), gathered(list(plain)[4:]))
