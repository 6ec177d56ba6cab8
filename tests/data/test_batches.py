"""Micro-batches, their ids, and the order of training data."""

import random
from dataclasses import asdict

import numpy as np
import pytest
import torch

from pipecomp.data import DataPosition, ShardedSampler, TrainLoader, as_micro_batch, default_collate, eval_batches
from pipecomp.errors import DataError

DATA = [{"input_ids": [i, i + 1], "labels": [i, i]} for i in range(23)]
IDS_23 = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_sample_stays_with_its_replica_and_comes_once_an_epoch(replicas):
    seen: dict[int, set[int]] = {}
    for replica in range(replicas):
        sampler = ShardedSampler(23, 2, replicas=replicas, replica=replica, seed=5)
        assert sampler.per_epoch == 23 // replicas // 2
        for epoch in range(4):
            ids = [i for n in range(sampler.per_epoch) for i in sampler.batch(epoch * sampler.per_epoch + n)]
            assert len(set(ids)) == len(ids) == 2 * sampler.per_epoch
            for i in ids:
                seen.setdefault(i, set()).add(replica)
    assert all(len(owners) == 1 for owners in seen.values())


def test_order_follows_from_seed_and_epoch_alone_and_leaves_the_global_generator():
    before = torch.get_rng_state()
    a, b = ShardedSampler(23, 2, seed=1), ShardedSampler(23, 2, seed=1)
    late = b.batch(25)  # asked out of order
    assert [a.batch(n) for n in range(30)][25] == late
    assert a.batch(0) == b.batch(0)
    assert ShardedSampler(23, 2, seed=2).batch(0) != a.batch(0)
    assert a.batch(0) != a.batch(11)
    assert ShardedSampler(23, 2, seed=1 + 256).batch(0) != a.batch(0)
    assert ShardedSampler(23, 2, seed=1 + 2**32).batch(0) != a.batch(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_unshuffled_order():
    assert ShardedSampler(6, 2, shuffle=False).batch(4) == [2, 3]


def test_too_few_samples():
    with pytest.raises(DataError, match="3 samples are too few for 2 replica"):
        ShardedSampler(3, 2, replicas=2)


def test_loader_gives_ids_with_their_samples_and_knows_what_comes_next():
    loader = TrainLoader(DATA, ShardedSampler(23, 2, seed=1))
    batches = iter(loader)
    for _ in range(15):
        expected = loader.upcoming(0)
        after = loader.upcoming(1)
        batch = next(batches)
        assert list(batch.ids) == expected
        assert batch.inputs["input_ids"][:, 0].tolist() == expected
        assert loader.upcoming(0) == after
    resumed = TrainLoader(DATA, ShardedSampler(23, 2, seed=1))
    resumed.taken = 15
    assert next(iter(resumed)).ids == next(batches).ids


def test_a_dataset_may_say_which_samples_are_one():
    class Views(list):
        def sample_id(self, index: int) -> int:
            return 100 + index // 2

    views = Views(DATA)
    loader = TrainLoader(views, ShardedSampler(23, 2, seed=1))
    expected = loader.upcoming(0)
    batch = next(iter(loader))
    assert list(batch.ids) == expected == [views.sample_id(i) for i in batch.inputs["input_ids"][:, 0].tolist()]
    assert [i for b in eval_batches(views, 4) for i in b.ids] == list(map(views.sample_id, range(23)))


@pytest.mark.parametrize("of", [np.int64, torch.tensor])
def test_an_id_may_be_a_number_of_numpy_or_torch(of):
    """A store keeps a gradient under 2**63 more than its sample's id, which no such number can be."""

    class Named(list):
        def sample_id(self, index: int) -> object:
            return of(10 * index)

    loader = TrainLoader(Named(DATA), ShardedSampler(23, 2, seed=1))
    upcoming = loader.upcoming(0)
    for ids in (
        upcoming,
        next(iter(loader)).ids,
        as_micro_batch({"input_ids": IDS_23, "sample_ids": [of(1), of(2)]}).ids,
    ):
        assert {type(i) for i in ids} == {int}
    assert upcoming == [10 * i for i in ShardedSampler(23, 2, seed=1).batch(0)]


@pytest.mark.parametrize("wrong", ["s3", 1.5, torch.tensor(1.5)])
def test_an_id_that_is_no_whole_number_is_an_error(wrong):
    class Named(list):
        def sample_id(self, index: int) -> object:
            return wrong

    match = f"sample id .* is a {type(wrong).__name__}; expected a whole number"
    with pytest.raises(DataError, match=match):
        next(iter(TrainLoader(Named(DATA), ShardedSampler(23, 2))))
    with pytest.raises(DataError, match=match):
        as_micro_batch({"input_ids": IDS_23, "sample_ids": [0, wrong]})


def test_a_loader_that_begins_anew_leaves_the_global_generator():
    """A run that goes on makes another one, and must draw the same dropout masks."""
    before = torch.get_rng_state()
    next(iter(TrainLoader(DATA, ShardedSampler(23, 2))))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_data_and_collate_draw_follows_from_seed_and_number_alone():
    """The last stage's labels belong to the first one's inputs, whatever each has drawn before, as for dropout."""

    class Drawing(list):
        def __getitem__(self, index: int) -> dict[str, list[float]]:
            return {"input_ids": [random.random(), float(np.random.rand())]}

    def collate(samples: list) -> dict[str, torch.Tensor]:
        return default_collate(samples) | {"labels": torch.rand(2)}

    def drawn(number: int, *, seed: int = 0) -> list[float]:
        loader = TrainLoader(Drawing(DATA), ShardedSampler(23, 2), collate, seed=seed)
        loader.taken = number
        batches = [next(iter(loader)), *eval_batches(Drawing(DATA), 2, collate)[number : number + 1]]
        return [x for b in batches for x in (*b.inputs["input_ids"].flatten().tolist(), *b.labels.tolist())]

    first = drawn(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert drawn(3) == first
    assert len(set(first)) == 12
    assert not set(first) & set(drawn(4))
    assert len(set(first) & set(drawn(3, seed=1))) == 6, "an evaluation has no seed"


def test_batches_may_be_mappings_pairs_or_carry_their_ids():
    ids_BS = torch.ones(2, 3, dtype=torch.int64)
    labels = torch.zeros(2)
    from_pair = as_micro_batch((ids_BS, labels), [4, 5])
    assert from_pair.inputs.keys() == {"input_ids"}
    assert from_pair.labels is labels
    carried = as_micro_batch({"input_ids": ids_BS, "sample_ids": torch.tensor([2**40, 1]), "label": labels})
    assert carried.ids == (2**40, 1)
    assert carried.labels is labels
    assert as_micro_batch({"input_ids": ids_BS, "sample_ids": torch.tensor([2, 1])}, [4, 5]).ids == (4, 5)
    assert as_micro_batch({"input_ids": ids_BS}, number_from=7).ids == (7, 8)


@pytest.mark.parametrize(
    ("batch", "ids", "match"),
    [
        ({"input_ids": torch.ones(2, 3)}, None, "sample_ids"),
        ({"pixels": torch.ones(2, 3)}, [1, 2], "input_ids"),
        ({"input_ids": torch.ones(2, 3), "labels": [0, 1]}, [1, 2], "'labels' of a batch is a list; expected a tensor"),
        ({"input_ids": torch.ones(2, 3), "text": ["a", "b"]}, [1, 2], "'text' of a batch is a list; expected a tensor"),
        ({"input_ids": torch.ones(2, 3)}, [1], "2 samples has 1 ids"),
        ({"input_ids": torch.ones(1, 3)}, [-1], "out of range"),
        ({"input_ids": torch.ones(1, 3)}, [2**63], "out of range"),
        (torch.ones(2, 3), [1, 2], "mapping"),
    ],
)
def test_what_is_not_a_batch(batch, ids, match):
    with pytest.raises(DataError, match=match):
        as_micro_batch(batch, ids)


def test_unequal_lengths_ask_for_a_collate_fn():
    with pytest.raises(DataError, match="collate_fn"):
        default_collate([{"input_ids": [1, 2]}, {"input_ids": [1]}])


@pytest.mark.parametrize(
    "samples", [[{"text": "a"}], [{"text": None}], [{"text": [[1], [1, 2]]}], [{"text": 1}, {"label": 1}]]
)
def test_a_column_that_is_no_numbers_is_named(samples):
    with pytest.raises(DataError, match=r"'text' is not a number, .*: leave it out, or give a collate_fn \(\w+Error"):
        default_collate(samples)


def test_evaluation_takes_every_sample_once():
    batches = eval_batches(DATA, 4)
    assert [i for b in batches for i in b.ids] == list(range(23))
    assert len(batches[-1].ids) == 3


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replica_r_of_n_has_samples_r_and_every_nth_after_it(replicas):
    """The shares are the documented ones: a cached activation is found again under the same replica's number."""
    for replica in range(replicas):
        sampler = ShardedSampler(24, 2, replicas=replicas, replica=replica, shuffle=False)
        ids = [i for number in range(sampler.per_epoch) for i in sampler.batch(number)]
        assert ids == list(range(replica, 24, replicas))
        shuffled = ShardedSampler(24, 2, replicas=replicas, replica=replica, seed=3)
        assert sorted(i for number in range(shuffled.per_epoch) for i in shuffled.batch(number)) == ids


@pytest.mark.parametrize("data", [iter(DATA), {"train": DATA, "test": DATA}])
def test_data_without_samples_by_number_are_an_error(data):
    with pytest.raises(DataError, match=f"evaluation data is a {type(data).__name__}; expected a list or dataset"):
        eval_batches(data, 4)


def replicas_of(layout: tuple[int, int], *, samples: int = 97, **options: object) -> list[ShardedSampler]:
    """Make the samplers of all replicas. layout: replicas, samples of a micro-batch."""
    replicas, size = layout
    return [ShardedSampler(samples, size, replicas=replicas, replica=r, seed=4, **options) for r in range(replicas)]


def take(samplers: list[ShardedSampler], number: int, count: int) -> list[int]:
    """Return the samples of `count` micro-batches of every replica."""
    return [i for n in range(number, number + count) for sampler in samplers for i in sampler.batch(n)]


LAYOUTS = [(1, 4), (2, 2), (2, 3), (3, 2), (4, 4), (1, 1), (1, 4)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("start", range(len(LAYOUTS) - 2))
def test_every_sample_comes_once_an_epoch_whatever_layouts_follow_each_other(start, drop_last, shuffle):
    options = {"shuffle": shuffle, "drop_last": drop_last}
    one, two, three = LAYOUTS[start : start + 3]
    samplers = replicas_of(one, **options)
    number = samplers[0].per_epoch + 1  # inside the second epoch
    seen = take(samplers, samplers[0].per_epoch, 1)
    for layout in (two, two, three):
        position = DataPosition.of(asdict(samplers[0].position(number)))
        assert position.samples == len(seen)
        assert all(sampler.position(number) == position for sampler in samplers)
        samplers = replicas_of(layout, **options)
        (number,) = {sampler.seek(position) for sampler in samplers}
        seen += take(samplers, number, 1)
        number += 1
    per_epoch = samplers[0].per_epoch
    assert number // per_epoch == 1
    rest = take(samplers, number, 2 * per_epoch - number)
    assert sum(sampler.size(n) for sampler in samplers for n in range(number, 2 * per_epoch)) == len(rest)
    seen += rest
    if drop_last:  # except for those that fill no micro-batch of every replica
        assert len(set(seen)) == len(seen) > 97 - layout[0] * layout[1]
    else:  # replicas with a sample less repeat one
        assert set(seen) == set(range(97))
        assert len(seen) < 97 + sum(replicas for replicas, _ in (two, three))
    usual = replicas_of(layout, **options)
    assert take(samplers, 2 * per_epoch, per_epoch) == take(usual, 2 * per_epoch, per_epoch)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_goes_on_in_its_layout_keeps_its_order(replicas):
    unbroken = replicas_of((replicas, 4), samples=50)
    for number in (0, 3, unbroken[0].per_epoch, unbroken[0].per_epoch + 2):
        resumed = replicas_of((replicas, 4), samples=50)
        position = unbroken[0].position(number)
        assert not position.changed
        assert [sampler.seek(position) for sampler in resumed] == [number] * replicas
        assert take(resumed, number, 20) == take(unbroken, number, 20)


def test_samples_stay_with_their_replica_when_micro_batches_change():
    before, after = replicas_of((2, 4)), replicas_of((2, 3))
    position = before[0].position(1)
    for sampler, old in zip(after, before, strict=True):
        number = sampler.seek(position)
        rest = take([sampler], number, sampler.per_epoch - number)
        left = take([old], 1, 11)
        assert rest == left[: len(rest)]
        assert len(rest) > len(left) - 3
        assert sampler.position(number).changed


def test_a_layout_that_changes_between_epochs_changes_no_order():
    position = replicas_of((1, 4))[0].position(24)  # of 97 samples
    for sampler, usual in zip(replicas_of((2, 2)), replicas_of((2, 2)), strict=True):
        assert sampler.seek(position) == 24
        assert take([sampler], 24, 24) == take([usual], 24, 24)
