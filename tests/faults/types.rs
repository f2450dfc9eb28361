//! Kind: element types and widths of access (C12, C19; C13 belongs to the Python wheel).

use maru::layout::{RowKind, SlabLayout};
use maru::{DType, SlotMapping, TransferRequest};

use crate::harness::Test;
use crate::rig::{BOTH, Rig, View, read, same, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        moved:
            c12_rows_of_92_bytes,
            c12_a_slab_two_bytes_off,
            c12_odd_rows_on_odd_addresses,
            c19_two_types_of_one_width_do_not_mix,
            c19_raw_bytes_move_only_if_declared,
            slabs_stored_under_another_fingerprint;
    ]
}

fn c12_rows_of_92_bytes(rig: &Rig) {
    let cache = rig.cache(&View::new(&[2, 4, 16, 1, 46], "kv,block,token,head,dim"));
    assert_eq!(cache.registered.paged().layout().row_bytes(), 92);
    cache.exact(&slots(&[0, 1, 2, 3, 63]));
    cache.exact(&slots(&[0, 1, 2, 3, 63]).slab_shift(2));
}

fn c12_a_slab_two_bytes_off(rig: &Rig) {
    let cache = rig.cache(&View::new(&[2, 4, 16, 1, 64], "kv,block,token,head,dim"));
    for shift in [2, 1, 4, 8, 3, 15] {
        cache.exact(&slots(&[0, 1, 2, 3, 63]).slab_shift(shift));
    }
}

/// Rows and addresses that are multiples of nothing, on either side.
fn c12_odd_rows_on_odd_addresses(rig: &Rig) {
    for (dtype, head, shift) in [
        (DType::U8, 1, 0),
        (DType::U8, 1, 1),
        (DType::U8, 3, 3),
        (DType::U8, 17, 7),
        (DType::Fp8E4m3, 33, 5),
        (DType::Bf16, 23, 2),
        (DType::Bf16, 1, 6),
        (DType::F32, 5, 4),
        (DType::F32, 4, 12),
        (DType::Raw64, 3, 8),
        // Not even aligned for their own element.
        (DType::F32, 8, 1),
        (DType::Raw64, 2, 2),
    ] {
        let view = View::new(&[3, 2, 5, 2, head], "block,kv,token,head,dim").dtype(dtype);
        // Pads that are odd in elements: between tokens and between blocks.
        let token = 2 * head + 1;
        let padded = view.clone().strides(&[10 * token + 3, 5 * token, token, head, 1]);
        for view in [view, padded] {
            let cache = rig.cache(&view.at(&[shift]));
            cache.exact(&slots(&[14, 0, 7, 1]).slab_shift(shift / 2));
        }
    }
}

fn packed(rig: &Rig, dtype: DType, elements: u64) -> (SlabLayout, maru::cxl::Slab) {
    let layout = SlabLayout::packed(2, 1, 4, elements, dtype).unwrap();
    let content: Vec<u8> = (0..layout.bytes()).map(|i| (i * 7 % 256) as u8).collect();
    (layout, rig.slab(&content))
}

/// bf16 read as fp16 is fluent nonsense: 0x3e25 is 0.1621 or 1.537.
fn c19_two_types_of_one_width_do_not_mix(rig: &Rig) {
    for (cache, slab, factor) in [
        (DType::Bf16, DType::F16, 1),
        (DType::F16, DType::Bf16, 1),
        (DType::U8, DType::I8, 1),
        (DType::Fp8E4m3, DType::Fp8E5m2, 1),
        (DType::Fp8E4m3, DType::U8, 1),
        // Twice the columns of half the width.
        (DType::Bf16, DType::U8, 2),
        (DType::F32, DType::Bf16, 2),
    ] {
        let registered = rig.cache(&View::new(&[4, 2, 4, 1, 8], "block,kv,token,head,dim").dtype(cache));
        let (layout, memory) = packed(rig, slab, 8 * factor);
        let (before, image) = (registered.bytes(), read(&memory));
        for direction in BOTH {
            let mapping = SlotMapping::from_slots([0, 1, 2, 3]);
            let request = match direction {
                maru::Direction::Gather => TransferRequest::gather(&registered.registered, mapping, &memory),
                _ => TransferRequest::scatter(&registered.registered, mapping, &memory),
            };
            let error = rig.engine.submit(&request.slab_layout(layout.clone())).unwrap_err();
            assert_eq!(error.kind(), "dtype_mismatch");
            let text = error.to_string();
            assert!(
                text.contains(cache.name()) && text.contains(slab.name()) && text.contains("raw"),
                "{text}"
            );
            same("cache", direction, &registered.bytes(), &before);
            same("slab", direction, &read(&memory), &image);
        }
    }
}

fn c19_raw_bytes_move_only_if_declared(rig: &Rig) {
    for (cache, slab, elements) in [
        (DType::Bf16, DType::Raw8, 16),
        (DType::Bf16, DType::Raw16, 8),
        (DType::Bf16, DType::Raw64, 2),
        (DType::Raw8, DType::Bf16, 8),
        (DType::Raw16, DType::F16, 8),
    ] {
        let width = 16 / cache.size() as i64;
        let registered = rig.cache(&View::new(&[4, 2, 4, 1, width], "block,kv,token,head,dim").dtype(cache));
        let (layout, memory) = packed(rig, slab, elements);
        let mapping = || SlotMapping::from_slots([9, 2, 15, 0]);
        let load = TransferRequest::scatter(&registered.registered, mapping(), &memory);
        rig.engine.submit(&load.slab_layout(layout.clone())).unwrap().wait().unwrap();
        let image = read(&memory);
        let (other, second) = packed(rig, slab, elements);
        second.write_at(0, &vec![0; image.len()]).unwrap();
        let store = TransferRequest::gather(&registered.registered, mapping(), &second);
        rig.engine.submit(&store.slab_layout(other)).unwrap().wait().unwrap();
        same("slab", maru::Direction::Gather, &read(&second), &image);
    }
    // A raw type does not make up for another size of rows.
    let registered = rig.cache(&View::new(&[4, 2, 4, 1, 8], "block,kv,token,head,dim"));
    let (layout, memory) = packed(rig, DType::Raw8, 15);
    let request = TransferRequest::gather(&registered.registered, SlotMapping::from_slots([0]), &memory);
    let error = rig.engine.submit(&request.slab_layout(layout).partial(true)).unwrap_err();
    assert_eq!(error.kind(), "layout_mismatch");
    assert!(error.to_string().contains("16") && error.to_string().contains("15"), "{error}");
}

/// Geometry, type and kind of rows enter the fingerprint; a slab of another one is refused by name.
fn slabs_stored_under_another_fingerprint(rig: &Rig) {
    let cache = rig.cache(&View::new(&[4, 2, 4, 2, 8], "block,kv,token,head,dim"));
    let mine = cache.registered.paged().slab_layout(4).unwrap();
    let others = [
        SlabLayout::packed(2, 1, 4, 16, DType::F16).unwrap(),
        SlabLayout::packed(2, 1, 4, 16, DType::Raw16).unwrap(),
        SlabLayout::packed(2, 1, 4, 15, DType::Bf16).unwrap(),
        SlabLayout::packed(1, 2, 4, 16, DType::Bf16).unwrap(),
        SlabLayout::packed(2, 2, 4, 16, DType::Bf16).unwrap(),
        SlabLayout::packed(2, 1, 8, 16, DType::Bf16).unwrap(),
        SlabLayout::token_major(2, 4, 16, DType::Bf16).unwrap(),
        mine.clone().with_row_kind(RowKind::OpaqueRows),
        mine.clone().with_row_kind(RowKind::OpaqueBlocks),
    ];
    let slab = rig.slab(&vec![1; mine.bytes() as usize]);
    let before = cache.bytes();
    let load = || {
        let mapping = SlotMapping::from_slots([0, 1, 2, 3]);
        TransferRequest::scatter(&cache.registered, mapping, &slab).slab_tokens(4)
    };
    for other in others {
        assert_ne!(other.fingerprint(), mine.fingerprint(), "{other:?}");
        let error = rig.engine.submit(&load().stored_as(other.fingerprint())).unwrap_err();
        assert_eq!(error.kind(), "layout_mismatch");
        assert!(error.to_string().contains(&mine.fingerprint().to_string()), "{error}");
    }
    same("cache", maru::Direction::Scatter, &cache.bytes(), &before);
    rig.engine.submit(&load().stored_as(mine.fingerprint())).unwrap().wait().unwrap();
    assert_ne!(cache.bytes(), before);
}
