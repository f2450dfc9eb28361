"""What importing gives, on any machine."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import maru_kv_ops
import pytest
from maru_kv_ops import EngineKVFormat, MaruError, PageBufferShapeDesc, TransferDirection

FORMATS = {
    0: "NB_NL_TWO_BS_NH_HS",
    1: "NL_X_TWO_NB_BS_NH_HS",
    2: "NL_X_NB_TWO_BS_NH_HS",
    3: "NL_X_NB_BS_HS",
    4: "TWO_X_NL_X_NBBS_NH_HS",
    5: "NL_X_NBBS_ONE_HS",
    6: "NL_X_TWO_NB_NH_BS_HS",
    7: "NL_X_NB_TWO_NH_BS_HS",
    8: "NB_NL_TWO_NH_BS_HS",
    9: "TWO_X_NL_X_NB_BS_NH_HS",
    10: "NL_X_NB_NH_BS_TWO_HS",
    11: "NL_X_NB_BS_NH_TWO_HS",
    12: "NL_X_NB_NH_BS_CS",
    13: "NL_X_NB_BS_NH_CS",
    14: "NL_X_NB_BSV_BSS",
    15: "NL_X_TWO_NB_NH_ONE_BS_HS",
    16: "NL_X_TWO_X_NB_BS_NH_HS",
    17: "NL_X_NP_X_NB_BS_ONE_HS",
    18: "NL_X_NB_BS_NH_HS",
}


def test_availability_and_its_reason_agree():
    error = maru_kv_ops.import_error()
    assert maru_kv_ops.is_available() == (error is None)
    if error is not None:
        assert isinstance(error, MaruError) and isinstance(error, RuntimeError)
        assert str(error)


def test_enums_have_the_numbers_of_the_old_callers():
    assert {int(m): m.name for m in EngineKVFormat} == FORMATS
    assert (int(TransferDirection.H2D), int(TransferDirection.D2H)) == (0, 1)


def test_unknown_names_are_ordinary_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_kernel"):
        maru_kv_ops.no_such_kernel  # noqa: B018
    assert not hasattr(maru_kv_ops, "EngineKVFormats")


def test_everything_promised_exists():
    for name in maru_kv_ops.__all__:
        assert getattr(maru_kv_ops, name) is not None


def test_import_needs_nothing_else():
    code = (
        "import sys; sys.modules.update(numpy=None, torch=None, cupy=None)\n"
        "import maru_kv_ops as m; e = m.Engine({'maru_device': 'host'}); assert e.backend == 'fallback'\n"
        "assert m.PagedCache is not None; print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "fine"


def test_shape_desc_is_made_empty_or_whole():
    names = ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems"]
    empty = PageBufferShapeDesc()
    for value, name in enumerate(names):
        assert getattr(empty, name) == 0
        setattr(empty, name, value)
    assert empty == PageBufferShapeDesc(*range(8))
    assert empty == PageBufferShapeDesc(**{name: i for i, name in enumerate(names)})
    assert pickle.loads(pickle.dumps(empty)) == empty == copy.deepcopy(empty)
    with pytest.raises(TypeError):
        empty.nl = "three"
    with pytest.raises(OverflowError):
        empty.nl = 2**70
    with pytest.raises(AttributeError):
        empty.layers = 1


def test_errors_have_one_base_and_the_usual_ones():
    from maru_kv_ops import _errors

    classes = set(_errors._CLASSES.values()) | {_errors.class_of_kind("io")}
    usual = (ValueError, TypeError, IndexError, OverflowError, RuntimeError)
    for cls in classes:
        assert issubclass(cls, MaruError) and issubclass(cls, usual), cls
        again = pickle.loads(pickle.dumps(cls("what happened", "some_kind")))
        assert type(again) is cls and str(again) == "what happened" and again.kind == "some_kind"


def test_a_panic_is_an_exception():
    with pytest.raises(maru_kv_ops.InternalError, match="on purpose") as caught:
        maru_kv_ops._native._panic()
    assert caught.value.kind == "internal"
    assert isinstance(caught.value, Exception)
    # And the module works on.
    assert maru_kv_ops.slots_from_blocks([1], 4, 0, 4) == [4, 5, 6, 7]


def test_slots_from_blocks():
    assert maru_kv_ops.slots_from_blocks([7, 2], 16, 14, 18) == [126, 127, 32, 33]
    with pytest.raises(ValueError, match="block_size"):
        maru_kv_ops.slots_from_blocks([7, 2], 0, 0, 1)
    with pytest.raises(ValueError, match="end of the token range"):
        maru_kv_ops.slots_from_blocks([7, 2], 16, 0, 33)
    with pytest.raises(ValueError, match="block id"):
        maru_kv_ops.slots_from_blocks([-1], 16, 0, 1)
