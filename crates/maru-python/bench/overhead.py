"""What a call costs from Python on a GPU, over a bare cuLaunchKernel timed in the same run; and how long a chunk
takes beside torch's per-layer indexing. Warm, asynchronous, torch tensors. Prints one JSON object.

    python crates/maru-python/bench/overhead.py [--calls 2000]

Allowed: 6 us a legacy call and 4 us an Engine.load with a prepared cache, over the bare launch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import maru_kv_ops as m
import torch
from maru_kv_ops import _native

LAYERS, BLOCKS, BS, NH, HS, T = 32, 512, 16, 8, 128, 256


def per_call_us(call, calls: int) -> dict:
    """Median and 90th percentile of single calls. The queue is drained now and then, outside the timing."""
    times = []
    for i in range(calls + 50):
        if i % 16 == 0:
            torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begun)
    times = sorted(times[50:])
    return {"p50": statistics.median(times) / 1000, "p90": times[int(len(times) * 0.9)] / 1000}


def gpu_ms(call, repeats: int = 20) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begun, over = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(repeats):
        call()
    over.record()
    torch.cuda.synchronize()
    return begun.elapsed_time(over) / repeats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    calls = parser.parse_args().calls
    device = torch.device("cuda:0")
    tensors = [torch.randn((2, BLOCKS, BS, NH, HS), device=device).to(torch.bfloat16) for _ in range(LAYERS)]
    cache = m.PagedCache(tensors, block_size=BS, num_kv_heads=NH, head_size=HS)
    engine = m.Engine({"maru_device": "cuda:0", "maru_backend": "native"})
    engine.register(cache)
    region = m.Region.anonymous(2 * cache.slab_bytes(T))
    region.register(device)
    ours = region.slab(0, cache.slab_bytes(T))
    pinned = torch.zeros(cache.slab_shape(T), dtype=torch.bfloat16).pin_memory()
    ptrs = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
    slots = torch.randperm(cache.num_slots, device=device)[:T]
    # Calls of one token are timed, so that the queue never fills and only the call is seen.
    one_slot = slots[:1].clone()
    one_pinned = torch.zeros(cache.slab_shape(1), dtype=torch.bfloat16).pin_memory()
    one_ours = region.slab(0, cache.slab_bytes(1))
    host_slots = slots.cpu()

    def legacy(slab, s):
        m.multi_layer_kv_transfer(slab, ptrs, s, device, cache.num_slots, 0, 1, BS, HS)

    one_layer = torch.zeros((2, 1, NH * HS), dtype=torch.bfloat16, device=device)
    stream = torch.cuda.current_stream().cuda_stream
    launches = sorted(_native._launch_ns(0, stream, calls))
    bare = launches[len(launches) // 2] / 1000
    results = {
        "legacy multi_layer": per_call_us(lambda: legacy(one_pinned, one_slot), calls),
        "legacy single_layer": per_call_us(lambda: m.single_layer_kv_transfer(one_layer, tensors[0], one_slot, 0, 1), calls),
        "Engine.load, slab": per_call_us(lambda: engine.load(cache, one_slot, one_ours, slab_tokens=1), calls),
        "Engine.load, tensor": per_call_us(lambda: engine.load(cache, one_slot, one_pinned), calls),
        "Engine.load, slab, stream given": per_call_us(
            lambda: engine.load(cache, one_slot, one_ours, slab_tokens=1, stream=stream), calls
        ),
        "torch index (one layer)": per_call_us(lambda: tensors[0].view(2, -1, NH * HS)[:, one_slot], calls),
    }
    for result in results.values():
        result["over_bare_launch"] = result["p50"] - bare
    m.synchronize()

    def torch_store():
        for layer, t in enumerate(tensors):
            pinned[:, layer].copy_(t.view(2, -1, NH * HS)[:, slots], non_blocking=True)

    def torch_load():
        for layer, t in enumerate(tensors):
            t.view(2, -1, NH * HS)[:, slots] = pinned[:, layer].to(device, non_blocking=True)

    def flat():
        staging.copy_(pinned, non_blocking=True)

    staging = torch.zeros_like(pinned, device=device)
    chunk_mb = cache.slab_bytes(T) / 1e6
    times = {
        "flat copy, host to device": gpu_ms(flat),
        "maru load (slots on device)": gpu_ms(lambda: engine.load(cache, slots, ours)),
        "maru load (slots on host)": gpu_ms(lambda: engine.load(cache, host_slots, ours)),
        "maru store": gpu_ms(lambda: engine.store(cache, slots, ours)),
        "torch load, layer by layer": gpu_ms(torch_load),
        "torch store, layer by layer": gpu_ms(torch_store),
    }
    try:
        import lmcache.c_ops as lmc

        enum = getattr(lmc, "EngineKVFormat", None) or lmc.GPUKVFormat
        form, h2d = enum.NL_X_TWO_NB_BS_NH_HS, lmc.TransferDirection.H2D
        times["lmcache load"] = gpu_ms(
            lambda: lmc.multi_layer_kv_transfer(pinned, ptrs, slots, device, cache.num_slots, h2d, form, BS)
        )
        lmcache = "compared"
    except Exception as error:  # noqa: BLE001
        lmcache = f"not compared: {type(error).__name__}: {error}"
    m.synchronize()
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "maru_kv_ops": m.__version__,
        "bare_launch_us": bare,
        "call_us": results,
        "chunk_mb": chunk_mb,
        "chunk_ms": times,
        "chunk_gbps": {name: chunk_mb / ms for name, ms in times.items()},
        "lmcache": lmcache,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
