"""The order of samples and the random state of data workers, without processes."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from concertina.core.errors import UnsupportedScript, UsageError
from concertina.runtime.data import (
    Feed,
    LaneDataset,
    LaneSeed,
    LoaderOptions,
    Task,
    batch_indices,
    get_lane_state,
    lane_state_from_plain,
    lane_state_to_plain,
    set_lane_state,
)
from concertina.runtime.rng import RandomState, seed_everything


class Squares(torch.utils.data.Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, float(torch.rand(()))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_virtual_worker_gets_the_batches_of_its_ddp_rank(drop_last: bool, shuffle: bool) -> None:
    data = list(range(23))
    options = LoaderOptions(batch_size=3, shuffle=shuffle, seed=5, drop_last=drop_last)
    feed = Feed(data, options, virtual=4)
    for epoch in (0, 1):
        feed.open(epoch, 0, (3, 2, 1, 0))
        for v in range(4):
            sampler = DistributedSampler(data, 4, v, shuffle=shuffle, seed=5, drop_last=drop_last)
            sampler.set_epoch(epoch)
            expected = [b.tolist() for b in DataLoader(data, batch_size=3, sampler=sampler, drop_last=drop_last)]
            got = [feed.take(v, b).tolist() for b in range(feed.batches_per_epoch)]
            assert got == expected


def test_batches_keep_or_drop_a_short_tail() -> None:
    assert batch_indices(range(5), 2, drop_last=False) == [(0, 1), (2, 3), (4,)]
    assert batch_indices(range(5), 2, drop_last=True) == [(0, 1), (2, 3)]
    assert batch_indices(range(4), 2, drop_last=True) == [(0, 1), (2, 3)]


def test_a_lane_goes_on_where_its_last_consumed_batch_left_it() -> None:
    """A batch that was made but never trained on is made again with the same random numbers."""
    maker = LaneDataset(Squares(), list, lanes_per_rank=2, init=None)
    first, state = maker[Task((0, 1), (1, 2), 77, LaneSeed())]
    lost, _ = maker[Task((0, 1), (3, 4), 77, None)]
    elsewhere = LaneDataset(Squares(), list, lanes_per_rank=2, init=None)
    again, _ = elsewhere[Task((0, 1), (3, 4), 77, lane_state_from_plain(lane_state_to_plain(state)))]
    assert again == lost
    assert again != first


def test_lanes_of_one_process_do_not_touch_each_other() -> None:
    alone = LaneDataset(Squares(), list, lanes_per_rank=1, init=None)
    wanted = [alone[Task((0, 0), (0,), 5, LaneSeed())][0], alone[Task((0, 0), (1,), 77, None)][0]]
    shared = LaneDataset(Squares(), list, lanes_per_rank=1, init=None)
    got = [shared[Task((0, 0), (0,), 5, LaneSeed())][0]]
    _ = shared[Task((1, 0), (7,), 6, LaneSeed())]
    got.append(shared[Task((0, 0), (1,), 77, None)][0])
    assert got == wanted


def test_a_worker_init_fn_that_gives_the_dataset_a_state_is_refused() -> None:
    data = Squares()
    maker = LaneDataset(data, list, lanes_per_rank=2, init=lambda worker: setattr(data, "rng", object()))
    with pytest.raises(UnsupportedScript, match=r"a state of its own \(rng\)"):
        _ = maker[Task((0, 1), (1,), 5, LaneSeed())]


def test_a_dataset_sees_the_data_worker_of_its_lane() -> None:
    class Asking(Squares):
        def __getitem__(self, i: int) -> tuple[int, float]:
            info = torch.utils.data.get_worker_info()
            return info.id, float(info.seed)

    maker = LaneDataset(Asking(), list, lanes_per_rank=2, init=None)
    _ = maker[Task((0, 0), (1,), 10, LaneSeed())]
    _ = maker[Task((1, 1), (1,), 20, LaneSeed())]
    again, _ = maker[Task((0, 0), (1,), 10, None)]
    set_data_worker_info_to_none()
    assert again == [(0, 10.0)]


def set_data_worker_info_to_none() -> None:
    torch.utils.data._utils.worker._worker_info = None


def test_a_lane_is_seeded_like_a_data_worker_process() -> None:
    torch.manual_seed(3)
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, collate_fn=list)
    wanted = next(iter(loader))
    torch.manual_seed(3)
    base_seed = int(torch.empty((), dtype=torch.int64).random_())
    got, _ = LaneDataset(Squares(), list, lanes_per_rank=1, init=None)[
        Task((0, 0), (0, 1, 2, 3), base_seed, LaneSeed())
    ]
    assert got == wanted


def test_random_states_survive_a_checkpoint() -> None:
    seed_everything(9)
    state, lane = RandomState.capture(), get_lane_state()

    def draw() -> tuple[Any, ...]:
        import random

        import numpy as np

        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()

    wanted = draw()
    RandomState.load(state.state()).restore()
    assert draw() == wanted
    set_lane_state(lane_state_from_plain(lane_state_to_plain(lane)))
    assert draw() == wanted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": None}, "batch_size=None"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"persistent_workers": True}, "needs num_workers"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        LoaderOptions(**options)


def test_a_tensor_is_no_dataset() -> None:
    with pytest.raises(UsageError, match="TensorDataset makes one"):
        Feed(torch.zeros(8), LoaderOptions(), virtual=2)
