"""Threads, forks, pickles and the interpreter's end."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import time

import maru_kv_ops as m
import numpy as np
import pytest


def big(host_engine, tokens=4096):
    layers = [np.random.default_rng(i).integers(0, 2**16, (2, 300, 16, 8, 128), np.uint16) for i in range(4)]
    cache = m.PagedCache(layers, block_size=16, num_kv_heads=8)
    slab = np.zeros(cache.slab_shape(tokens), np.uint16)
    return cache, np.random.default_rng(9).permutation(4800)[:tokens], slab


def test_c18_the_interpreter_runs_on_during_a_transfer(host_engine):
    cache, slots, slab = big(host_engine)
    ticks, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        seen = 0
        for _ in range(20):
            before = ticks[0]
            host_engine.store(cache, slots, slab).wait()
            seen += ticks[0] > before
        assert seen >= 10
    finally:
        stop.set()
        counter.join()


def test_c18_two_threads_on_one_engine_cache_and_transfer(host_engine):
    layers = [np.arange(2 * 40 * 4 * 24, dtype=np.uint16).reshape(2, 40, 4, 2, 12) for _ in range(2)]
    cache = m.PagedCache(layers, block_size=4, num_kv_heads=2)
    expected = np.zeros(cache.slab_shape(16), np.uint16)
    host_engine.store(cache, list(range(16)), expected).wait()
    failures = []

    def work(seed):
        try:
            slab = np.zeros_like(expected)
            for _ in range(50):
                slab[...] = 0
                transfer = host_engine.store(cache, list(range(16)), slab)
                assert transfer.done()
                transfer.wait()
                assert np.array_equal(slab, expected)
                m.multi_layer_kv_transfer(
                    slab, np.array([t.ctypes.data for t in layers]), np.arange(16), "cpu", 160, 1, 1, block_size=4
                )
                assert np.array_equal(slab, expected)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()
    assert not failures
    shared = host_engine.store(cache, list(range(16)), expected)
    threads = [threading.Thread(target=shared.wait) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
        assert not t.is_alive()


def objects(host_engine, tmp_path):
    cache = m.PagedCache([np.zeros((2, 5, 4, 2, 6), np.uint16)], block_size=4, num_kv_heads=2)
    region = m.Region.anonymous(4096)
    slab = np.zeros(cache.slab_shape(4), np.uint16)
    return [
        cache,
        region,
        region.slab(0, 16),
        host_engine,
        host_engine.store(cache, [0, 1, 2, 3], slab),
        host_engine.create_pool(4096, tmp_path / "pool", size=8 << 20),
    ]


def test_pickling_and_copying_are_refused_with_what_to_do(host_engine, tmp_path):
    for thing in objects(host_engine, tmp_path):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied; .*other process|path|submitted"):
                attempt(thing)


def in_child(body) -> str:
    """Runs ``body`` in a forked child and returns what it wrote, or fails if it hangs."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            try:
                text = body()
            except BaseException as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}"
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 30
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the forked child hangs")
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


def legacy_once(tag: int) -> bool:
    layer = np.arange(2 * 5 * 4 * 12, dtype=np.uint16).reshape(2, 5, 4, 2, 6) + np.uint16(tag)
    slab = np.zeros((2, 1, 3, 12), np.uint16)
    m.multi_layer_kv_transfer(slab, np.array([layer.ctypes.data]), np.array([19, 0, 7]), "cpu", 20, 1, 1, block_size=4)
    return np.array_equal(slab[:, 0], layer.reshape(2, 20, 12)[:, [19, 0, 7]])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_after_import(host_engine):
    assert legacy_once(1)
    cache, slots, slab = big(host_engine, 512)
    transfer = host_engine.store(cache, slots, slab)
    assert in_child(lambda: str(legacy_once(2))) == "True"
    text = in_child(lambda: str(host_engine.store(cache, slots, slab)))
    assert text.startswith("StateError") and "spawn" in text and str(os.getpid()) in text
    assert in_child(lambda: transfer.wait() or "waited").startswith("StateError")

    def anew():
        engine = m.Engine({"maru_device": "host"})
        engine.store(cache, slots, slab).wait()
        return "stored"

    assert in_child(anew) == "stored"
    transfer.wait()
    host_engine.store(cache, slots, slab).wait()


def test_the_interpreter_ends_with_everything_alive():
    code = """
import threading, numpy as np, maru_kv_ops as m
engine = m.Engine({"maru_device": "host", "maru_kv_chunk_tokens": 4})
layers = [np.zeros((2, 500, 16, 8, 128), np.uint16) for _ in range(4)]
cache = m.PagedCache(layers, block_size=16, num_kv_heads=8)
region = m.Region.anonymous(1 << 28)
slab = region.slab(0, cache.slab_bytes(4000))
kept = [engine.store(cache, np.arange(4000), slab, slab_tokens=4000) for _ in range(3)]
def forever():
    while True:
        engine.store(cache, np.arange(4000), slab, slab_tokens=4000)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
view = memoryview(slab)
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done


def test_the_log_goes_to_logging(caplog):
    with caplog.at_level("INFO", logger="maru_kv_ops"):
        engine = m.Engine({"maru_device": "host", "maru_use_lmcache_kernels": False})
        engine.register(m.PagedCache([np.zeros((2, 5, 4, 2, 6), np.uint16)], block_size=4, num_kv_heads=2))
    texts = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert any(level == "WARNING" and "maru_use_native_kernels" in text for level, text in texts), texts
    assert any("registered a paged cache" in text for _level, text in texts), texts
