"""Transfers layer by layer with torch on a GPU: a load beside the forward pass, a store behind it, and how early the
first layer is there. Skipped as `test_gpu` is."""

from __future__ import annotations

import maru_kv_ops as m
import pytest
import torch_gpu

torch = torch_gpu.required()
DEVICE = torch.device("cuda:0")
LAYERS, BS, NH, HS = 32, 16, 8, 128
STRATEGIES = ("direct", "staged", "auto")


def engine_of(strategy="auto", tokens=256):
    return m.Engine(
        {"maru_device": "cuda:0", "maru_backend": "native", "maru_strategy": strategy, "maru_kv_chunk_tokens": tokens}
    )


def cache_of(blocks=256):
    tensors = [torch.randn((2, blocks, BS, NH, HS), device=DEVICE).to(torch.bfloat16) for _ in range(LAYERS)]
    return tensors, m.PagedCache(tensors, block_size=BS, num_kv_heads=NH, head_size=HS)


def rows(tensor):
    return tensor.view(2, -1, NH * HS)


def index_slab(tensors, slots):
    return torch.stack([rows(t)[:, slots] for t in tensors], dim=1)


def equal(a, b) -> bool:
    return torch.equal(a.to(DEVICE).view(torch.int16), b.to(DEVICE).view(torch.int16))


def slab_for(cache, tokens):
    return torch.zeros(cache.slab_shape(tokens), dtype=torch.bfloat16).pin_memory()


def slots_for(cache, tokens):
    """In host memory: a list on the device may say to leave tokens out, and such stores are not staged."""
    return torch.randperm(cache.num_slots)[:tokens]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_forward_pass_follows_a_load(strategy):
    """Loaded on a side stream; the compute stream waits for one layer after the other and reads what is there."""
    source, cache = cache_of()
    target, loaded = cache_of()
    engine, tokens = engine_of(strategy), 256
    slots = slots_for(cache, tokens)
    slab = slab_for(cache, tokens)
    engine.store(cache, slots, slab).wait()
    engine.load(loaded, slots, slab).wait()
    side, compute, here = torch.cuda.Stream(), torch.cuda.Stream(), slots.to(DEVICE)
    for default in (False, True):
        for t in target:
            t.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            transfer = engine.load(loaded, slots, slab, by_layer=True)
        seen = []
        with torch.cuda.stream(compute):
            for layer in range(LAYERS):
                if default:
                    transfer.order_before_layer(layer)  # the current stream
                else:
                    transfer.order_before(compute, layer)
                seen.append(rows(target[layer])[:, here])
        compute.synchronize()
        assert equal(torch.stack(seen, dim=1), slab)
        transfer.wait()
        assert transfer.backend == "native" and (strategy == "auto" or transfer.strategy == strategy)
        assert all(transfer.layer_done(layer) for layer in range(LAYERS))
    assert equal(slab, index_slab(source, here))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_store_follows_the_forward_pass(strategy):
    """Each layer is stored once its event is over, which is recorded after the layer's K and V are written."""
    tensors, cache = cache_of()
    engine, tokens = engine_of(strategy), 256
    slots = slots_for(cache, tokens)
    slab = slab_for(cache, tokens)
    engine.store(cache, slots, slab).wait()
    side, compute = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    slab.zero_()
    events = []
    with torch.cuda.stream(compute):
        for layer, t in enumerate(tensors):
            torch.cuda._sleep(2_000_000)
            t.fill_(float(layer + 1))
            events.append(torch.cuda.Event())
            events[-1].record()
    transfer = engine.store(cache, slots, slab, after=events, stream=side)
    assert not transfer.done()
    del events
    transfer.wait_layer(0)
    assert (slab[:, 0] == 1.0).all()
    transfer.wait()
    for layer in range(LAYERS):
        assert (slab[:, layer] == float(layer + 1)).all(), layer
    assert transfer.backend == "native" and (strategy == "auto" or transfer.strategy == strategy)


def test_an_event_that_torch_has_not_made():
    _tensors, cache = cache_of(32)
    slots, slab = slots_for(cache, 256), slab_for(cache, 256)
    with pytest.raises(ValueError, match=r"after\[1\] .*never recorded"):
        engine_of().store(cache, slots, slab, after=[None, torch.cuda.Event()])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("direction", ("load", "store"))
def test_the_first_layer_is_there_well_before_the_last(direction, strategy):
    """256 MiB in 32 layers: the first is there within a quarter of the time that the last one takes."""
    tokens = 2048
    _tensors, cache = cache_of()
    assert cache.slab_bytes(tokens) >= 256_000_000
    engine = engine_of(strategy, tokens)
    slots = slots_for(cache, tokens)
    slab = slab_for(cache, tokens)
    move = getattr(engine, direction)
    move(cache, slots, slab, by_layer=True).wait()
    stream, watch = torch.cuda.Stream(), torch.cuda.Stream()
    ratios = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with torch.cuda.stream(stream):
            begun.record()
            transfer = move(cache, slots, slab, by_layer=True)
        with torch.cuda.stream(watch):
            transfer.order_before_layer(0)
            first.record()
            transfer.order_before_layer(LAYERS - 1)
            last.record()
        transfer.wait()
        torch.cuda.synchronize()
        ratios.append(begun.elapsed_time(first) / begun.elapsed_time(last))
    ratios.sort()
    assert ratios[2] <= 0.25, ratios
