from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_left_in_flight():
    yield
    import maru_kv_ops

    maru_kv_ops.synchronize()


@pytest.fixture
def host_engine():
    import maru_kv_ops

    return maru_kv_ops.Engine({"maru_device": "host", "maru_kv_chunk_tokens": 16})


def pytest_report_header(config):
    import maru_kv_ops

    return f"maru_kv_ops {maru_kv_ops.__version__} from {os.path.dirname(maru_kv_ops.__file__)}"
