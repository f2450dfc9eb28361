"""Torch tensors on a GPU. Skipped without torch or CUDA, with the reason; ``MARU_REQUIRE_GPU=1`` makes that a
failure. Every case asserts which mover moved it, where it can be asked."""

from __future__ import annotations

import os
import subprocess
import sys

import maru_kv_ops as m
import numpy as np
import pytest
import torch_gpu
from reference import D2H, H2D, ONE_PLANE, TOKEN_FORMATS, Cache

torch = torch_gpu.required()
DEVICE = torch.device("cuda:0")
T = 256
SHAPES = {
    "NH!=BS": dict(layers=3, blocks=40, block_size=16, heads=8, head_size=64),
    "NH==BS": dict(layers=2, blocks=40, block_size=16, heads=16, head_size=32),
    "one head": dict(layers=2, blocks=5, block_size=128, heads=1, head_size=128),
    "two blocks": dict(layers=2, blocks=2, block_size=256, heads=2, head_size=64),
    "odd rows": dict(layers=2, blocks=40, block_size=16, heads=1, head_size=46),
}


class TorchCache(Cache):
    """The reference's cache in torch tensors on the GPU; its formulas index whole rows at a time."""

    def upload(self):
        self.tensors = [torch.from_numpy(a.view(np.int16)).to(DEVICE) for a in self.arrays]
        self.ptrs = torch.tensor([t.data_ptr() for t in self.tensors], dtype=torch.int64, device=DEVICE)
        return self

    def indices(self, kv, layer, slots):
        slot, i = np.array(slots)[:, None], np.arange(self.row)[None, :]
        tensor, element = self.place(kv, layer, slot, i)
        return tensor, torch.from_numpy(np.broadcast_to(element, (len(slots), self.row)).copy()).to(DEVICE)

    def torch_gather(self, slots, skip=0, fill=0x1234):
        """By indices with torch; ``(slab, elements written)``."""
        slab = torch.full((self.planes, self.layers, len(slots), self.row), fill, dtype=torch.int16, device=DEVICE)
        kept = [t for t, s in enumerate(slots) if t >= skip and s != -1]
        count = 0
        for kv in range(self.planes):
            for layer in range(self.layers):
                tensor, element = self.indices(kv, layer, [slots[t] for t in kept])
                slab[kv, layer, kept] = self.tensors[tensor][element]
                count += element.numel()
        return slab, count

    def torch_scatter(self, slab, slots, skip=0):
        kept = [t for t, s in enumerate(slots) if t >= skip and s != -1]
        for kv in range(self.planes):
            for layer in range(self.layers):
                tensor, element = self.indices(kv, layer, [slots[t] for t in kept])
                self.tensors[tensor][element] = slab[kv, layer, kept].to(DEVICE)

    def call(self, slab, slots, direction, **more):
        if isinstance(slots, list):
            slots = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
        given = dict(key_value_ptrs=self.ptrs, slot_mapping=slots, paged_memory_device=DEVICE)
        m.multi_layer_kv_transfer(**self.legacy(slab, [], direction, **(given | more)))


def slots_of(cache, tokens=T, seed=0) -> list[int]:
    tokens = min(tokens, cache.slots)
    slots = np.random.default_rng(seed).permutation(cache.slots)[:tokens].tolist()
    slots[3] = -1
    return slots


def slab_like(cache, tokens, where, fill=0x1234):
    shape = (cache.planes, cache.layers, tokens, cache.row)
    if where == "device":
        return torch.full(shape, fill, dtype=torch.int16, device=DEVICE)
    return torch.full(shape, fill, dtype=torch.int16).pin_memory()


@pytest.mark.parametrize("where", ("pinned", "device"))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_multi_layer_equals_torch_indexing(fmt, shape, where):
    cache = TorchCache(fmt, **SHAPES[shape]).upload()
    slots = slots_of(cache)
    expected, count = cache.torch_gather(slots, skip=5)
    assert count == cache.expected_count(slots, 5)
    slab = slab_like(cache, len(slots), where)
    cache.call(slab, slots, D2H, skip_prefix_n_tokens=5)
    m.synchronize()
    assert torch.equal(slab.to(DEVICE), expected)
    # A load into other slots of another cache, compared whole, so that pads and other slots are seen.
    one, two = TorchCache(fmt, **SHAPES[shape]).upload(), TorchCache(fmt, **SHAPES[shape]).upload()
    for t in one.tensors + two.tensors:
        t.fill_(0x7777)
    back = slots_of(cache, seed=1)
    one.torch_scatter(expected, back, skip=7)
    two.call(slab, back, H2D, skip_prefix_n_tokens=7)
    m.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors))


@pytest.mark.parametrize("fmt", (2, 7, 3, 10, 11))
def test_padded_pages(fmt):
    cache = TorchCache(fmt, **SHAPES["NH!=BS"], pad=64).upload()
    slots = slots_of(cache)
    expected, _ = cache.torch_gather(slots)
    slab = slab_like(cache, len(slots), "pinned")
    cache.call(slab, slots, D2H)
    m.synchronize()
    assert torch.equal(slab.to(DEVICE), expected)


@pytest.mark.parametrize("fmt", TOKEN_FORMATS)
def test_blocks_equal_torch_indexing(fmt):
    shape = SHAPES["NH!=BS"]
    cache = TorchCache(fmt, **shape, block_op=True).upload()
    blocks = [int(b) for b in np.random.default_rng(2).permutation(shape["blocks"])[:32]]
    slots = [b * 16 + o for b in blocks for o in range(16)]
    desc = m.PageBufferShapeDesc(
        cache.planes, cache.layers, shape["blocks"], 16, 1 if fmt in (3, 5) else 8, cache.head_size if fmt not in (12, 13) else cache.content, 2
    )
    slabs = [slab_like(cache, 256, "pinned", 0), slab_like(cache, 256, "device", 0)]
    ids = torch.tensor(blocks, dtype=torch.int64, device=DEVICE)
    addresses = [s.data_ptr() for s in slabs]
    m.multi_layer_block_kv_transfer(cache.ptrs, addresses, ids, DEVICE, D2H, desc, 256, fmt, 0)
    m.synchronize()
    for k, slab in enumerate(slabs):
        assert torch.equal(slab.to(DEVICE), cache.torch_gather(slots[256 * k : 256 * (k + 1)])[0])
    target = TorchCache(fmt, **shape, block_op=True).upload()
    wanted = TorchCache(fmt, **shape, block_op=True).upload()
    for k in range(2):
        wanted.torch_scatter(slabs[k], slots[256 * k : 256 * (k + 1)][::1], 0)
    for t in target.tensors:
        t.zero_()
    for t in wanted.tensors:
        t.zero_()
    for k in range(2):
        wanted.torch_scatter(slabs[k], slots[256 * k : 256 * (k + 1)])
    m.multi_layer_block_kv_transfer(target.ptrs, addresses, ids, DEVICE, H2D, desc, 256, fmt, 0)
    m.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(target.tensors, wanted.tensors))


@pytest.mark.parametrize("token_major", (False, True))
@pytest.mark.parametrize("nh,bs", ((8, 16), (16, 16), (1, 16)))
@pytest.mark.parametrize("fmt", (1, 2, 6, 7))
def test_single_layer_in_both_forms(fmt, nh, bs, token_major):
    nb, hs = 40, 64
    content = torch.randint(-(2**15), 2**15, (2, nb, bs, nh, hs), dtype=torch.int16, device=DEVICE)
    logical = content if fmt in (1, 6) else content.transpose(0, 1)
    memory = logical.transpose(2, 3).contiguous() if fmt in (6, 7) else logical.contiguous()
    forms = [memory, memory.transpose(2, 3)]
    slots = torch.randperm(nb * bs, device=DEVICE)[:200]
    expected = content.reshape(2, nb * bs, nh * hs)[:, slots]
    for tensor in forms:
        shape = (200, 2, nh * hs) if token_major else (2, 200, nh * hs)
        slab = torch.zeros(shape, dtype=torch.int16, device=DEVICE)
        m.single_layer_kv_transfer(slab, tensor, slots, D2H, fmt, token_major)
        m.synchronize()
        assert torch.equal(slab.transpose(0, 1) if token_major else slab, expected)
        empty = torch.zeros_like(memory)
        view = empty if tensor is memory else empty.transpose(2, 3)
        m.single_layer_kv_transfer(slab, view, slots, H2D, fmt, token_major)
        m.synchronize()
        wanted = torch.zeros_like(content)
        wanted.view(2, nb * bs, nh * hs)[:, slots] = expected
        wanted = wanted if fmt in (1, 6) else wanted.transpose(0, 1)
        assert torch.equal(empty, wanted.transpose(2, 3) if fmt in (6, 7) else wanted)


def vllm_cache(layout="hnd", layers=4, nb=64, bs=16, nh=8, hs=128, dtype=torch.bfloat16):
    shape = (2, nb, bs, nh, hs)
    make = lambda: torch.randn(shape, device=DEVICE).to(dtype)  # noqa: E731
    if layout == "hnd":
        make = lambda: torch.randn((2, nb, nh, bs, hs), device=DEVICE).to(dtype).transpose(2, 3)  # noqa: E731
    tensors = [make() for _ in range(layers)]
    return tensors, m.PagedCache(tensors, block_size=bs, num_kv_heads=nh, head_size=hs)


def index_slab(tensors, slots):
    flat = [t.reshape(2, -1, t.shape[3] * t.shape[4])[:, slots] for t in tensors]
    return torch.stack(flat, dim=1)


@pytest.mark.parametrize("layout", ("nhd", "hnd"))
@pytest.mark.parametrize("backend", ("auto", "native", "fallback"))
def test_objects_equal_torch_indexing(layout, backend):
    tensors, cache = vllm_cache(layout)
    engine = m.Engine({"maru_device": "cuda:0", "maru_backend": backend})
    slots = torch.randperm(cache.num_slots, device=DEVICE)[:T]
    given = slots if backend != "fallback" else slots.cpu()
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    transfer = engine.store(cache, given, slab)
    transfer.wait()
    assert transfer.backend == ("fallback" if backend == "fallback" else "native")
    assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))
    other, target = vllm_cache(layout)
    loads = engine.load(target, given, slab, by_layer=True)
    for layer in range(4):
        loads.wait_layer(layer)
        assert torch.equal(index_slab(other, slots)[:, layer].view(torch.int16), index_slab(tensors, slots)[:, layer].view(torch.int16))
    loads.wait()


def test_a_region_registered_with_the_device():
    tensors, cache = vllm_cache()
    engine = m.Engine({"maru_device": "cuda:0", "maru_backend": "native"})
    region = m.Region.anonymous(cache.slab_bytes(T) * 2)
    assert region.register(DEVICE)
    slots = torch.randperm(cache.num_slots, device=DEVICE)[:T]
    slab = region.slab(cache.slab_bytes(T), cache.slab_bytes(T))
    engine.store(cache, slots, slab).wait()
    seen = torch.from_dlpack(slab).view(torch.bfloat16).view(cache.slab_shape(T))
    assert torch.equal(seen.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))
    # The same bytes by the old call, whose tensor lies in the region.
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    seen.zero_()
    m.multi_layer_kv_transfer(seen, ptrs, slots, DEVICE, cache.num_slots, 1, 6, 16, 128)
    m.synchronize()
    assert torch.equal(seen.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))


@pytest.mark.parametrize("call", ("legacy", "object"))
def test_work_is_ordered_on_the_current_stream(call):
    """A slow kernel, then a write, then the store: the store sees the write; and a load comes before what follows."""
    tensors, cache = vllm_cache("nhd", layers=2)
    engine = m.Engine({"maru_device": "cuda:0"})
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    slots = torch.arange(T, device=DEVICE)
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()

    def move(direction):
        if call == "legacy":
            m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, cache.num_slots, direction, 1, 16, 128)
        else:
            (engine.store if direction == D2H else engine.load)(cache, slots, slab)

    move(D2H)  # warm: pointers read, cache registered
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for t in tensors:
            t.fill_(3.0)
        move(D2H)
        assert not stream.query(), "the call waited for the stream"
        for t in tensors:
            t.fill_(5.0)
    stream.synchronize()
    m.synchronize()
    assert (slab == 3.0).all()
    # Load: a slow reader of the old content on the same stream is not overtaken.
    slab.fill_(7.0)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        old = tensors[0].clone()
        move(H2D)
        new = tensors[0].clone()
    stream.synchronize()
    m.synchronize()
    assert (old == 5.0).all()
    assert (new.view(2, -1, 1024)[:, :T] == 7.0).all()


def test_two_streams_do_not_wait_for_each_other():
    tensors, cache = vllm_cache("nhd", layers=2)
    engine = m.Engine({"maru_device": "cuda:0"})
    slots = torch.arange(T, device=DEVICE)
    slabs = [torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory() for _ in range(2)]
    engine.store(cache, slots, slabs[0]).wait()
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1_000_000_000)
        first = engine.store(cache, slots, slabs[0])
    with torch.cuda.stream(fast):
        second = engine.store(cache, slots, slabs[1])
    second.wait()
    assert not first.done()
    first.wait()
    assert torch.equal(slabs[0].view(torch.int16), slabs[1].view(torch.int16))
    # Joined on the device, not the host.
    with torch.cuda.stream(slow):
        torch.cuda._sleep(200_000_000)
        third = engine.load(cache, slots, torch.full_like(slabs[0], 9.0).pin_memory())
    third.order_before(fast)
    with torch.cuda.stream(fast):
        copy = tensors[0].clone()
    fast.synchronize()
    assert (copy.view(2, -1, 1024)[:, :T] == 9.0).all()


def test_a_captured_graph_reads_its_slots_anew():
    tensors, cache = vllm_cache("hnd", layers=2)
    engine = m.Engine({"maru_device": "cuda:0"})
    slots = torch.arange(T, device=DEVICE)
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    engine.store(cache, slots, slab).wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transfer = engine.store(cache, slots, slab)
    assert transfer.captured
    for seed in range(3):
        torch.manual_seed(seed)
        slots.copy_(torch.randperm(cache.num_slots, device=DEVICE)[:T])
        slab.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))


def test_legacy_calls_are_captured():
    tensors, cache = vllm_cache("nhd", layers=2)
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    slots = torch.arange(T, device=DEVICE)
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    call = lambda: m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, cache.num_slots, 1, 1, 16, 128)  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    slab.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))


def test_pointer_lists_of_inference_mode_and_written_in_place():
    with torch.inference_mode():
        tensors, cache = vllm_cache("nhd", layers=2)
        ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
        slots = torch.arange(T, device=DEVICE)
        slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
        m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, cache.num_slots, 1, 1, 16, 128)
        m.synchronize()
        assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab(tensors, slots).view(torch.int16))
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    for order in ((0, 1), (1, 0)):
        ptrs.copy_(torch.tensor([tensors[i].data_ptr() for i in order], dtype=torch.int64))
        m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, cache.num_slots, 1, 1, 16, 128)
        m.synchronize()
        assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab([tensors[i] for i in order], slots).view(torch.int16))


def test_a_bad_slot_on_the_device_is_told():
    tensors, cache = vllm_cache("nhd", layers=2)
    before = [t.clone() for t in tensors]
    slots = torch.arange(T, device=DEVICE)
    slots[17] = 2**40 + 17
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    transfer = m.Engine({"maru_device": "cuda:0"}).load(cache, slots, slab)
    with pytest.raises(IndexError, match="token 17"):
        transfer.wait()
    for t, b in zip(tensors, before):
        assert torch.equal(t.view(2, -1, 1024)[:, 17].view(torch.int16), b.view(2, -1, 1024)[:, 17].view(torch.int16))
    torch.ones(8, device=DEVICE).sum().item()


def test_tensors_may_go_while_the_device_is_busy():
    tensors, cache = vllm_cache("nhd", layers=2)
    engine = m.Engine({"maru_device": "cuda:0"})
    expected = index_slab(tensors, torch.arange(T, device=DEVICE))
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    engine.store(cache, torch.arange(T, device=DEVICE), slab).wait()
    torch.cuda.synchronize()
    slab.zero_()
    torch.cuda._sleep(200_000_000)
    slots = torch.arange(T, device=DEVICE)
    engine.store(cache, slots, slab)
    del slots, cache
    for _ in range(8):
        torch.full((T,), 2**40, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    m.synchronize()
    assert torch.equal(slab.to(DEVICE).view(torch.int16), expected.view(torch.int16))


def test_pageable_memory_goes_through_the_fallback(caplog):
    tensors, cache = vllm_cache("hnd", layers=2)
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    slots = torch.randperm(cache.num_slots)[:T]
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16)
    with caplog.at_level("WARNING", logger="maru_kv_ops"):
        for _ in range(3):
            m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, cache.num_slots, 1, 6, 16, 128)
            m.synchronize()
    assert torch.equal(slab.to(DEVICE).view(torch.int16), index_slab(tensors, slots.to(DEVICE)).view(torch.int16))
    assert sum("not registered" in r.getMessage() for r in caplog.records) == 1


def test_wrong_devices_and_sizes_are_refused():
    tensors, cache = vllm_cache("nhd", layers=2)
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEVICE)
    slots = torch.arange(T, device=DEVICE)
    slab = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    with pytest.raises(TypeError, match="int32"):
        m.multi_layer_kv_transfer(slab, ptrs, slots.int(), DEVICE, cache.num_slots, 1, 1, 16, 128)
    with pytest.raises(ValueError, match="stride|contiguous"):
        m.multi_layer_kv_transfer(slab, ptrs, torch.arange(2 * T, device=DEVICE)[::2], DEVICE, cache.num_slots, 1, 1, 16, 128)
    with pytest.raises(ValueError, match="needs|share memory"):
        m.multi_layer_kv_transfer(slab, ptrs, slots, DEVICE, 2**30, 1, 1, 16, 128)
    host = torch.zeros(2, dtype=torch.int64) + 4096
    with pytest.raises(ValueError, match="no memory that cuda:0 knows|share memory"):
        m.multi_layer_kv_transfer(slab, host, slots, DEVICE, cache.num_slots, 1, 1, 16, 128)
    with pytest.raises(TypeError, match="f16.*bf16"):
        m.Engine({"maru_device": "cuda:0"}).store(cache, slots, slab.half().pin_memory())
    torch.ones(8, device=DEVICE).sum().item()


EXPANDABLE = """
import torch, maru_kv_ops as m
device = torch.device("cuda:0")
tensors = [torch.randn((2, 1024, 16, 8, 128), device=device).to(torch.bfloat16) for _ in range(2)]  # 64 MiB: over seams
ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
slots = torch.randperm(16384, device=device)[:4096]
flat = torch.stack([t.view(2, -1, 1024)[:, slots] for t in tensors], dim=1)
for slab in (torch.zeros_like(flat), torch.zeros(flat.shape, dtype=flat.dtype).pin_memory()):
    m.multi_layer_kv_transfer(slab, ptrs, slots, device, 16384, 1, 1, 16, 128)
    m.synchronize()
    assert torch.equal(slab.to(device).view(torch.int16), flat.view(torch.int16))
cache = m.PagedCache(tensors, block_size=16, num_kv_heads=8)
m.Engine({"maru_device": "cuda:0", "maru_backend": "native"}).load(cache, slots, flat, slab_tokens=4096).wait()
print("fine")
"""


@pytest.mark.parametrize("setting", ("expandable_segments:True", "expandable_segments:False"))
def test_allocations_of_many_driver_ranges(setting):
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_the_end_of_the_interpreter_with_transfers_in_flight():
    code = (
        "import torch, maru_kv_ops as m\n"
        "t = [torch.zeros((2, 64, 16, 8, 128), device='cuda:0') for _ in range(2)]\n"
        "c = m.PagedCache(t, block_size=16, num_kv_heads=8); e = m.Engine({'maru_device': 'cuda:0'})\n"
        "s = torch.zeros(c.slab_shape(256)).pin_memory(); slots = torch.arange(256, device='cuda:0')\n"
        "e.store(c, slots, s).wait(); torch.cuda._sleep(500_000_000)\n"
        "kept = [e.store(c, slots, s) for _ in range(4)]; e.store(c, slots, s)\n"
        "p = torch.tensor([x.data_ptr() for x in t], dtype=torch.int64, device='cuda:0')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_planes_of_the_reference_are_what_they_should_be():
    """The reference itself: formats with one plane and with two."""
    assert {f for f in TOKEN_FORMATS if TorchCache(f).planes == 1} == set(ONE_PLANE)
