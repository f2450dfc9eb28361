"""What a call costs from Python on a GPU, over a bare cuLaunchKernel timed beside it; and how long a chunk takes beside
torch's per-layer indexing. Warm, asynchronous, torch tensors. Prints one JSON object.

    python crates/maru-python/bench/overhead.py [--calls 2000]

A cache as of Llama 3.1 8B: 32 layers, 8 heads of 128, bf16. Calls of 1, 16, 64 and 256 tokens, so that small ones go
directly and large ones are staged. In every round each call is made a few times in turn, next to as many bare launches;
a call's overhead is the median over the rounds of the difference of the two medians.

Allowed: 6 us a legacy call and 4 us an Engine.load with a prepared cache, over the bare launch.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Callable

import maru_kv_ops as m
import torch
from maru_kv_ops import _native

LAYERS, BLOCKS, BS, NH, HS, T = 32, 512, 16, 8, 128, 256
TOKENS = (1, 16, 64, 256)
STRATEGIES = ("direct", "staged", "auto")
LIMITS = {"legacy": 6.0, "load": 4.0}
# Calls of a round: few enough that no queue of the driver fills.
PER_ROUND = 8


@dataclass
class Case:
    """A call whose cost is looked for."""

    row: dict[str, Any]
    call: Callable[[], Any]
    times: list[float] = field(default_factory=list)
    over: list[float] = field(default_factory=list)

    def round(self, bare: float) -> None:
        times = []
        torch.cuda.synchronize()
        for _ in range(PER_ROUND):
            begun = time.perf_counter_ns()
            self.call()
            times.append((time.perf_counter_ns() - begun) / 1000)
        self.times += times
        self.over.append(median(times) - bare)

    def result(self) -> dict[str, Any]:
        times, over = sorted(self.times), median(self.over)
        found = {"p50": median(times), "p90": times[int(len(times) * 0.9)], "over_bare_launch": over}
        limit = LIMITS.get(self.row.get("kind", ""))
        return self.row | found | ({} if limit is None else {"allowed": limit, "within": over <= limit})


def measure(cases: list[Case], calls: int) -> float:
    """Times every case; the median of all bare launches in microseconds."""
    stream = torch.cuda.current_stream().cuda_stream
    bares = []
    for case in cases:
        for _ in range(20):
            case.call()
    gc.collect()
    gc.disable()
    for _ in range(max(3, calls // PER_ROUND)):
        for case in cases:
            # The first of a set pays for what the synchronisation let go cold, as the first call does.
            launches = _native._launch_ns(0, stream, PER_ROUND)
            bares += launches
            case.round(median(launches) / 1000)
        m.synchronize()
    gc.enable()
    return median(bares) / 1000


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


class Rig:
    def __init__(self) -> None:
        self.device = torch.device("cuda:0")
        shape = (2, BLOCKS, BS, NH, HS)
        self.tensors = [torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(LAYERS)]
        self.cache = m.PagedCache(self.tensors, block_size=BS, num_kv_heads=NH, head_size=HS)
        config = {"maru_device": "cuda:0", "maru_backend": "native"}
        self.engines = {s: m.Engine(config | {"maru_strategy": s}) for s in STRATEGIES}
        for engine in self.engines.values():
            engine.register(self.cache)
        self.region = m.Region.anonymous(2 * self.cache.slab_bytes(T))
        self.region.register(self.device)
        addresses = [t.data_ptr() for t in self.tensors]
        self.ptrs = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        self.slots = torch.randperm(self.cache.num_slots, device=self.device)[:T]

    def slab(self, tokens: int) -> m.Slab:
        return self.region.slab(0, self.cache.slab_bytes(tokens))

    def pinned(self, tokens: int) -> torch.Tensor:
        return torch.zeros(self.cache.slab_shape(tokens), dtype=torch.bfloat16).pin_memory()

    def legacy(self, slab, slots) -> None:
        m.multi_layer_kv_transfer(slab, self.ptrs, slots, self.device, self.cache.num_slots, 0, 1, BS, HS)

    def cases(self, tokens: int) -> list[Case]:
        cache, slab, pinned = self.cache, self.slab(tokens), self.pinned(tokens)
        on_device = self.slots[:tokens].clone()
        on_host = on_device.cpu()
        given = {"cuda tensor": on_device, "cpu tensor": on_host, "numpy": on_host.numpy(), "list": on_host.tolist()}
        cases = []

        def load(strategy, into, slots):
            engine = self.engines[strategy]
            target, options = (slab, {"slab_tokens": tokens}) if into == "slab" else (pinned, {})
            transfer = engine.load(cache, given[slots], target, **options)
            transfer.wait()
            row = {"kind": "load", "call": "Engine.load", "slab": into, "slots": slots, "strategy": strategy}
            row |= {"tokens": tokens, "moved_by": transfer.strategy}
            call = lambda: engine.load(cache, given[slots], target, **options)  # noqa: E731
            cases.append(Case(row, call))

        for strategy in STRATEGIES:
            for into in ("slab", "tensor"):
                load(strategy, into, "cuda tensor")
        for slots in ("cpu tensor", "numpy", "list"):
            load("auto", "slab", slots)
        for slots in given:
            if slots != "list":
                row = {"kind": "legacy", "call": "multi_layer_kv_transfer", "slab": "tensor", "slots": slots}
                row |= {"strategy": "auto", "tokens": tokens}
                cases.append(Case(row, lambda slots=slots: self.legacy(pinned, given[slots])))
        return cases

    def others(self) -> dict[str, Case]:
        """One token each."""
        engine, cache, slot, stream = self.engines["auto"], self.cache, self.slots[:1].clone(), torch.cuda.current_stream()
        pinned, slab = self.pinned(1), self.slab(1)
        one_layer = torch.zeros((2, 1, NH * HS), dtype=torch.bfloat16, device=self.device)
        raw = stream.cuda_stream
        calls = {
            "legacy multi_layer": ("legacy", lambda: self.legacy(pinned, slot)),
            "legacy single_layer": ("legacy", lambda: m.single_layer_kv_transfer(one_layer, self.tensors[0], slot, 0, 1)),
            "Engine.load, slab": ("load", lambda: engine.load(cache, slot, slab, slab_tokens=1)),
            "Engine.load, tensor": ("load", lambda: engine.load(cache, slot, pinned)),
            "Engine.load, slab, stream given": (
                "load", lambda: engine.load(cache, slot, slab, slab_tokens=1, stream=raw),
            ),
            "Engine.load, slab, stream object given": (
                "load", lambda: engine.load(cache, slot, slab, slab_tokens=1, stream=stream),
            ),
            "Engine.load, slab, by layer": (
                "", lambda: engine.load(cache, slot, slab, slab_tokens=1, by_layer=True),
            ),
            "nothing (the clock and an empty call)": ("", lambda: None),
            "torch index (one layer)": ("", lambda: self.tensors[0].view(2, -1, NH * HS)[:, slot]),
        }  # fmt: skip
        return {name: Case({"kind": kind} if kind else {}, call) for name, (kind, call) in calls.items()}

    def chunk_ms(self) -> dict[str, float]:
        engine, cache, slots, ours = self.engines["auto"], self.cache, self.slots, self.slab(T)
        pinned, host_slots = self.pinned(T), self.slots.cpu()
        staging = torch.zeros_like(pinned, device=self.device)

        def torch_store():
            for layer, t in enumerate(self.tensors):
                pinned[:, layer].copy_(t.view(2, -1, NH * HS)[:, slots], non_blocking=True)

        def torch_load():
            for layer, t in enumerate(self.tensors):
                t.view(2, -1, NH * HS)[:, slots] = pinned[:, layer].to(self.device, non_blocking=True)

        times = {
            "flat copy, host to device": gpu_ms(lambda: staging.copy_(pinned, non_blocking=True)),
            "maru load (slots on device)": gpu_ms(lambda: engine.load(cache, slots, ours)),
            "maru load (slots on host)": gpu_ms(lambda: engine.load(cache, host_slots, ours)),
            "maru load by layer": gpu_ms(lambda: engine.load(cache, slots, ours, by_layer=True)),
            "flat copy, device to host": gpu_ms(lambda: pinned.copy_(staging, non_blocking=True)),
            "maru store": gpu_ms(lambda: engine.store(cache, slots, ours)),
            "maru store (slots on host)": gpu_ms(lambda: engine.store(cache, host_slots, ours)),
            "torch load, layer by layer": gpu_ms(torch_load),
            "torch store, layer by layer": gpu_ms(torch_store),
        }
        m.synchronize()
        return times

    def lmcache(self, times: dict[str, float]) -> str:
        """Its kernel on the same chunk, where it is installed."""
        try:
            import lmcache.c_ops as lmc

            enum = getattr(lmc, "EngineKVFormat", None) or lmc.GPUKVFormat
            form, h2d, pinned = enum.NL_X_TWO_NB_BS_NH_HS, lmc.TransferDirection.H2D, self.pinned(T)
            call = lambda: lmc.multi_layer_kv_transfer(  # noqa: E731
                pinned, self.ptrs, self.slots, self.device, self.cache.num_slots, h2d, form, BS
            )
            times["lmcache load"] = gpu_ms(call)
            return "compared"
        except Exception as error:  # noqa: BLE001
            return f"not compared: {type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=800, help="of each case")
    calls = parser.parse_args().calls
    rig = Rig()
    named, by_size = rig.others(), [case for tokens in TOKENS for case in rig.cases(tokens)]
    bare = measure([*named.values(), *by_size], calls)
    times = rig.chunk_ms()
    compared = rig.lmcache(times)
    chunk_mb = rig.cache.slab_bytes(T) / 1e6
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "maru_kv_ops": m.__version__,
        "bare_launch_us": bare,
        "call_us": {name: case.result() for name, case in named.items()},
        "call_us_by_size": [case.result() for case in by_size],
        "chunk_mb": chunk_mb,
        "chunk_ms": times,
        "chunk_gbps": {name: chunk_mb / ms for name, ms in times.items()},
        "lmcache": compared,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
