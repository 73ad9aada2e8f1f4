"""Parts of the engine that can be looked at without training."""

import copy
import pickle

import pytest
import torch
from torch import nn

from concertina.runtime.buckets import BucketLayout, DdpOptions
from concertina.runtime.buffers import FlatBuffers
from concertina.runtime.determinism import may_mix_gpus
from concertina.runtime.digest import ParameterDigest, bit_pattern
from concertina.runtime.environment import differences
from concertina.runtime.model_hooks import InertHook, ModelHook


def test_the_first_layout_is_one_bucket_and_the_rebuilt_one_follows_the_ready_order() -> None:
    params = [torch.zeros(n) for n in (300_000, 10, 400_000, 20)]
    layout = BucketLayout.initial(params, DdpOptions())
    assert layout.buckets == [[0, 1, 2, 3]]
    assert layout.wants_ready_order
    layout.rebuild([3, 2, 1, 0])
    assert layout.buckets == [[3, 2], [1, 0]]
    assert not layout.wants_ready_order


def test_static_graph_rebuilds_a_step_later_and_find_unused_never() -> None:
    params = [torch.zeros(10)]
    static = BucketLayout.initial(params, DdpOptions(static_graph=True))
    assert not static.wants_ready_order
    static.synced_steps = 1
    assert static.wants_ready_order
    unused = BucketLayout.initial(params, DdpOptions(find_unused_parameters=True))
    assert not unused.wants_ready_order


def test_a_bucket_keeps_the_memory_order_of_its_parameters() -> None:
    weight = torch.arange(24.0).view(2, 3, 2, 2).to(memory_format=torch.channels_last)
    layout = BucketLayout.initial([weight], DdpOptions())
    flat = layout.new_flat(0)
    layout.views(0, flat)[0].copy_(weight)
    assert torch.equal(flat, weight.permute(0, 2, 3, 1).flatten())


def test_a_nonsensical_bucket_size_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb=-1"):
        DdpOptions(bucket_cap_mb=-1)


def test_buffers_live_in_flat_memory_and_stay_the_modules_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(3))
    mean = model[1].running_mean
    buffers = FlatBuffers(model)
    assert model[1].running_mean is mean
    saved = buffers.copy()
    model[1].running_mean.fill_(7)
    model[0].num_batches_tracked += 1
    changed = buffers.copy()
    buffers.load_from(saved)
    assert model[1].running_mean.tolist() == [0, 0, 0]
    buffers.load_from(changed)
    assert model[1].running_mean.tolist() == [7, 7, 7]
    assert int(model[0].num_batches_tracked) == 1
    assert set(buffers.by_name(saved)) == set(dict(model.named_buffers()))


def test_copies_and_pickles_of_a_model_lose_our_hooks() -> None:
    called: list[int] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(ModelHook(lambda *args: called.append(1)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.zeros(1, 2))
        assert isinstance(next(iter(other._forward_hooks.values())), InertHook)
    assert called == []
    model(torch.zeros(1, 2))
    assert called == [1]


def test_the_digest_sees_one_bit_anywhere_in_a_small_parameter() -> None:
    weight = torch.randn(100)
    digest = ParameterDigest(BucketLayout.initial([weight, torch.zeros(5)], DdpOptions()))
    before = digest.compute()
    weight[57] = torch.nextafter(weight[57], torch.tensor(9.0))
    assert digest.compute() != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_digest_is_the_sum_of_bit_patterns_by_bucket(dtype: torch.dtype) -> None:
    params = [torch.randn(7, dtype=dtype), torch.randn(3, 4, dtype=dtype)]
    found = ParameterDigest(BucketLayout.initial(params, DdpOptions())).compute()
    assert found == [int(torch.stack([bit_pattern(param).sum() for param in params]).sum())]  # sums may wrap round


def test_the_digest_sees_parameters_that_are_not_trained() -> None:
    frozen = [torch.randn(7), torch.zeros(3).expand(2, 3)]  # the second has no memory of its own for each element
    digest = ParameterDigest(BucketLayout.initial([torch.randn(5)], DdpOptions()), frozen)
    trained, before = digest.compute()
    frozen[0][3] += 1
    assert digest.compute()[0] == trained
    assert digest.compute()[1] != before


def test_differences_of_environments_are_sentences() -> None:
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == [
        "b is 2 here, 3 there",
        "c is absent here, 4 there",
    ]


def test_a_scan_says_whether_a_model_may_mix_gpu_types_and_why_not() -> None:
    assert may_mix_gpus(nn.Sequential(nn.ReLU(), nn.LayerNorm(4))).may_mix
    verdict = may_mix_gpus(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()))
    assert not verdict.may_mix
    assert "Conv2d (0)" in verdict.reason
