//! Kind: which slots, and how many (C04, C05, C21).

use maru::layout::SlabLayout;
use maru::{SlotMapping, TransferRequest};

use crate::harness::Test;
use crate::rig::{Random, Rig, View, read, same, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        moved:
            c04_minus_one_leaves_both_sides_alone,
            c04_a_slot_outside_writes_nothing,
            c04_lists_of_nothing_but_holes,
            c05_skip_prefix_does_not_shift,
            c05_skips_of_any_length,
            c21_seventy_thousand_slots,
            c21_seventy_thousand_rows_of_layers,
            c21_nothing_to_move_is_no_error,
            counts_around_the_limits_of_a_grid,
            slots_given_twice,
            lists_shorter_and_longer_than_the_slab;
        on_device:
            c04_a_slot_outside_in_device_memory_is_reported;
        plain:
            c04_blocks_become_slots_or_an_error,
            device_lists_need_a_device;
    ]
}

/// 4 blocks of 16: 64 slots, two layers.
fn small(rig: &Rig) -> crate::rig::Cache<'_> {
    rig.cache(&View::new(&[4, 2, 16, 2, 8], "block,kv,token,head,dim").at(&[0, 8192]))
}

/// Outside 0..64 by one, by a little, by what a narrower type would drop.
const OUTSIDE: [i64; 12] = [
    64,
    65,
    -2,
    -3,
    (1 << 40) + 17,
    1 << 32,
    (1 << 32) - 1,
    -(1 << 32) + 17,
    1 << 31,
    i64::MAX,
    i64::MIN,
    i64::MIN + 17,
];

fn c04_minus_one_leaves_both_sides_alone(rig: &Rig) {
    let cache = small(rig);
    cache.exact(&slots(&[5, -1, 63]));
    cache.exact(&slots(&[-1, 5, 63, -1]));
    cache.exact(&slots(&[-1, -1, 0, 1, 2, 3, -1, 4, 5]));
}

fn c04_a_slot_outside_writes_nothing(rig: &Rig) {
    let cache = small(rig);
    for bad in OUTSIDE {
        for list in [vec![bad], vec![17, bad], vec![0, 1, 2, 3, 4, 5, 6, bad], vec![bad, -1, 17]] {
            let at = list.iter().position(|s| *s == bad).unwrap();
            let text = cache.refused(&slots(&list), "slot_out_of_range");
            assert!(
                text.contains(&format!("slot {bad} of token {at}")) && text.contains("0 to 63"),
                "{text}"
            );
        }
    }
    // A run that leaves the cache, and one that wraps.
    let text = cache.refused(&slots(&(56..72).collect::<Vec<_>>()), "slot_out_of_range");
    assert!(text.contains("slot 64 of token 8"), "{text}");
    let wraps: Vec<i64> = (0..8).map(|i| (i64::MAX - 3).wrapping_add(i)).collect();
    cache.refused(&slots(&wraps), "slot_out_of_range");
    // In the skipped prefix too: the list is wrong, whatever is done with it.
    cache.refused(&slots(&[64, 3]).skip(1), "slot_out_of_range");
}

fn c04_a_slot_outside_in_device_memory_is_reported(rig: &Rig) {
    let cache = small(rig);
    for bad in OUTSIDE {
        let text = cache.reported(&slots(&[17, 3, bad, 60]));
        assert!(text.contains(&format!("slot {bad} of token 2")), "{text}");
    }
    let text = cache.reported(&slots(&[1, 64, -2, 2]));
    assert!(text.contains("of token 1"), "the first one is named: {text}");
}

/// -1 everywhere, in every length, is empty work.
fn c04_lists_of_nothing_but_holes(rig: &Rig) {
    let cache = small(rig);
    for n in [1, 2, 7, 8, 9, 63, 64, 1000] {
        let holes = vec![-1; n];
        cache.exact(&slots(&holes));
        cache.exact(&slots(&holes).skip(n as u64));
        cache.exact(&slots(&holes).skip(1).of(2000));
    }
}

fn c04_blocks_become_slots_or_an_error() {
    for (blocks, size, tokens, part) in [
        (&[7i64, 2][..], 16, 14..33, "14 to 32"),
        (&[7, -1], 16, 0..32, "block id is -1"),
        (&[7], 0, 0..1, "block_size is 0"),
        (&[i64::MAX], 16, 0..16, "63 bits"),
        (&[i64::MAX / 16], 16, 0..16, "63 bits"),
        (&[i64::MAX / 16 - 1], 16, 0..16, ""),
        (&[i64::MAX / 16 + 1], 16, 0..1, "63 bits"),
        (&[], 16, 0..1, "0 blocks"),
        (&[1], u64::MAX, 0..2, "63 bits"),
    ] {
        match SlotMapping::from_blocks(blocks, size, tokens) {
            Ok(mapping) => assert_eq!((part, mapping.len()), ("", 16)),
            Err(e) => assert!(!part.is_empty() && e.to_string().contains(part), "{part}: {e}"),
        }
    }
}

/// The engine holds 288 tokens and loads chunk 2, tokens 256..512, into blocks that others read.
fn c05_skip_prefix_does_not_shift(rig: &Rig) {
    let cache = rig.cache(&View::new(&[40, 2, 16, 2, 8], "block,kv,token,head,dim").at(&[0, 65_536]));
    let list: Vec<i64> = Random(7).shuffled(640)[..256].to_vec();
    let before = cache.bytes();
    let row = cache.reference.row_bytes();
    for skip in [32, 0, 256] {
        cache.exact(&slots(&list).skip(skip));
    }
    // In so many words, beside the oracle: token 288 receives row 32, the tokens before it nothing.
    let content: Vec<u8> = (0..cache.slab_bytes(256)).map(|i| (i / row % 251) as u8).collect();
    let slab = rig.slab(&content);
    let now = cache.bytes();
    let mapping = SlotMapping::from_slots(&list[..]);
    let request =
        TransferRequest::scatter(&cache.registered, mapping, &slab).slab_tokens(256).skip_tokens(32);
    rig.engine.submit(&request).unwrap().wait().unwrap();
    let after = cache.bytes();
    let at = |token: usize| {
        let from = cache.reference.paged_offset(0, 0, list[token] as u64, 0) as usize;
        from..from + row as usize
    };
    for token in 0..32 {
        assert_eq!(after[at(token)], now[at(token)], "token {token} is another request's");
    }
    assert_eq!(after[at(32)], content[32 * row as usize..33 * row as usize]);
    assert_ne!(before, after);
    let text = cache.refused(&slots(&list).skip(257), "invalid_argument");
    assert!(text.contains("257") && text.contains("256"), "{text}");
}

fn c05_skips_of_any_length(rig: &Rig) {
    let cache = small(rig);
    let list: Vec<i64> = Random(9).shuffled(64);
    let holes: Vec<i64> = list.iter().map(|s| if s % 3 == 0 { -1 } else { *s }).collect();
    for skip in [1, 7, 15, 16, 17, 33, 63, 64] {
        cache.exact(&slots(&list).skip(skip));
        cache.exact(&slots(&holes).skip(skip));
    }
    // Fewer slots than the slab has tokens: what counts is the slots.
    cache.exact(&slots(&list[..40]).skip(40).of(64));
    cache.exact(&slots(&list[..40]).skip(39).of(64));
    for skip in [41, 64, 65, 1 << 32, u64::MAX] {
        let text = cache.refused(&slots(&list[..40]).skip(skip).of(64), "invalid_argument");
        assert!(text.contains(&skip.to_string()) && text.contains("40"), "{text}");
    }
}

fn c21_seventy_thousand_slots(rig: &Rig) {
    let cache = rig.cache(&View::new(&[4375, 2, 16, 1, 4], "block,kv,token,head,dim"));
    let list = Random(11).shuffled(70_000);
    cache.exact(&slots(&list));
}

fn c21_seventy_thousand_rows_of_layers(rig: &Rig) {
    let offsets: Vec<u64> = (0..70).map(|l| l * 16_384).collect();
    let cache = rig.cache(&View::new(&[63, 2, 16, 1, 4], "block,kv,token,head,dim").at(&offsets));
    let list: Vec<i64> = Random(13).shuffled(1008)[..1000].to_vec();
    cache.exact(&slots(&list));
}

fn c21_nothing_to_move_is_no_error(rig: &Rig) {
    let cache = small(rig);
    cache.exact(&slots(&[]));
    cache.exact(&slots(&[]).of(256));
    let empty = rig.engine.submit_many(&[]).unwrap();
    assert_eq!((empty.bytes(), empty.strategy()), (0, "none"));
    empty.wait().unwrap();
    // No layers: at the front, in the middle, at the end.
    for first in [0, 1, 2] {
        cache.exact(&slots(&[3, 9]).layers(first, 0));
    }
    for (first, count) in [(3, 0), (0, 3), (2, 1), (u32::MAX, u32::MAX), (1, u32::MAX)] {
        let text = cache.refused(&slots(&[3, 9]).layers(first, count), "invalid_argument");
        assert!(text.contains("2 layers"), "{text}");
    }
    // No more than before: the next transfer works.
    cache.exact(&slots(&[0, 63]));
}

/// Grids have at most 65535 blocks on two of their axes; block counts are computed from tokens.
fn counts_around_the_limits_of_a_grid(rig: &Rig) {
    let cache = rig.cache(&View::new(&[65_537, 1, 2], "block,token,dim"));
    for n in [65_536, 65_537] {
        cache.exact(&slots(&(0..n).rev().collect::<Vec<i64>>()));
    }
    // One token of one layer of one plane of two bytes.
    let one = rig.cache(&View::new(&[1, 1, 1], "block,token,dim"));
    one.exact(&slots(&[0]));
    one.exact(&slots(&[0, -1]).of(300));
}

/// Twice in a store is twice the same bytes; twice in a load would depend on scheduling.
fn slots_given_twice(rig: &Rig) {
    let cache = small(rig);
    for (list, first, second, slot) in [
        (vec![5, 5], 0, 1, 5),
        (vec![5, -1, 6, 5], 0, 3, 5),
        (vec![0, 1, 2, 3, 3, 4], 3, 4, 3),
        (vec![60, 61, 62, 63, 0, 61], 1, 5, 61),
    ] {
        let slab = rig.slab(&vec![1; cache.slab_bytes(list.len() as u64) as usize]);
        let mapping = || SlotMapping::from_slots(&list[..]);
        let tokens = list.len() as u64;
        let before = cache.bytes();
        let load = TransferRequest::scatter(&cache.registered, mapping(), &slab).slab_tokens(tokens);
        let error = rig.engine.submit(&load).unwrap_err();
        assert_eq!(error.kind(), "duplicate_slot");
        let expected = format!("slot {slot} is written by token {first} and token {second}");
        assert!(error.to_string().contains(&expected), "{error}");
        same("cache", maru::Direction::Scatter, &cache.bytes(), &before);
        let store = TransferRequest::gather(&cache.registered, mapping(), &slab).slab_tokens(tokens);
        rig.engine.submit(&store).unwrap().wait().unwrap();
        let row = cache.reference.row_bytes() as usize;
        let bytes = read(&slab);
        assert_eq!(bytes[first * row..][..row], bytes[second * row..][..row]);
    }
    // A slot of the skipped prefix is not written.
    let list = [5, 5];
    cache.exact(&slots(&list).skip(1));
}

fn lists_shorter_and_longer_than_the_slab(rig: &Rig) {
    let cache = small(rig);
    let slab = rig.slab(&vec![0; cache.slab_bytes(8) as usize]);
    for (n, partial, part) in [
        (7, false, "7 slots were given for a slab of 8 tokens; ask for a partial transfer"),
        (9, false, "9 slots were given for a slab of 8 tokens"),
        (9, true, "9 slots were given for a slab of 8 tokens"),
        (64, true, "64 slots"),
    ] {
        let list: Vec<i64> = (0..n).collect();
        let request = TransferRequest::gather(&cache.registered, SlotMapping::from_slots(list), &slab);
        let error = rig.engine.submit(&request.slab_tokens(8).partial(partial)).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument");
        assert!(error.to_string().contains(part), "{error}");
    }
    // A slab that is too small for what it is said to hold, by one byte too.
    let short = slab.span(0, slab.len() - 1).unwrap();
    for (slab, tokens) in [(&short, 8), (&slab, 9), (&slab, 1 << 40)] {
        let request = TransferRequest::gather(&cache.registered, SlotMapping::from_slots([0]), slab);
        let error = rig.engine.submit(&request.slab_tokens(tokens).partial(true)).unwrap_err();
        assert!(error.to_string().contains("bytes where its layout needs"), "{error}");
    }
    for tokens in [0, u64::MAX, 1 << 62] {
        let request = TransferRequest::gather(&cache.registered, SlotMapping::from_slots([0]), &slab);
        let error = rig.engine.submit(&request.slab_tokens(tokens).partial(true)).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument", "{error}");
    }
    // One layer as an object of its own takes one layer, no more.
    let object = SlabLayout::layer_object(2, 8, 16, maru::DType::Bf16).unwrap();
    let request = TransferRequest::gather(&cache.registered, SlotMapping::from_slots([0]), &slab);
    let error = rig.engine.submit(&request.slab_layout(object).partial(true)).unwrap_err();
    assert_eq!(error.kind(), "layout_mismatch", "{error}");
}

fn device_lists_need_a_device() {
    let rig = Rig::open(&crate::rig::MOVERS[0], None);
    let cache = small(&rig);
    let slab = rig.slab(&vec![0; cache.slab_bytes(8) as usize]);
    for (addr, len, part) in [
        (4096, 8, "device memory"),
        (4097, 8, "multiple of 8"),
        (0, 8, "multiple of 8"),
        (u64::MAX - 7, 8, "63 bits"),
        (4096, 9, "9 slots"),
        (4096, u64::MAX, "slots were given"),
    ] {
        let mapping = SlotMapping::Device { addr, len };
        let request = TransferRequest::gather(&cache.registered, mapping, &slab).slab_tokens(8);
        let error = rig.engine.submit(&request).unwrap_err();
        assert!(error.to_string().contains(part), "{part} is not in: {error}");
    }
}
