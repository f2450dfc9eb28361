"""Torch with a GPU, or why there is none."""

from __future__ import annotations

import os

import pytest


def required():
    """The module. Without it the calling module is skipped, which ``MARU_REQUIRE_GPU=1`` makes a failure."""
    reason = None
    try:
        import torch

        if not torch.cuda.is_available():
            reason = "torch sees no CUDA device"
    except ImportError as error:
        reason = f"torch is not installed ({error})"
    if reason is None:
        return torch
    if os.environ.get("MARU_REQUIRE_GPU") == "1":
        pytest.fail(f"MARU_REQUIRE_GPU=1, but {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)
