//! Kind: layers that are not alike, or not as many as the model has (C06).

use maru::layout::SlabLayout;
use maru::{
    CacheSpec, CacheTensor, DType, Direction, Fingerprint, LayoutError, PagedCache, Place, SlotMapping,
    TensorDesc, Tensors, TransferError, TransferRequest,
};

use crate::harness::Test;
use crate::rig::{MOVERS, Random, Rig, View, block_size, read, same, slots};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c06_two_families_in_one_list_are_an_error,
            c06_more_tensors_than_layers_are_an_error,
            c06_other_layers_that_differ,
            c06_lists_that_make_no_cache,
            a_model_of_a_thousand_layers,
            a_layer_axis_of_any_length_registers_in_no_time;
        moved:
            c06_each_family_moves_as_its_own_cache,
            slabs_of_one_layer_in_every_order;
    ]
}

/// Address space that nobody touches: registration looks at numbers only.
const NOWHERE: u64 = 1 << 40;

fn tensor(at: u64, shape: &[i64], dtype: DType) -> CacheTensor {
    let desc = TensorDesc::contiguous(shape, dtype).unwrap();
    CacheTensor { addr: NOWHERE + at, len: desc.span_bytes(), desc }
}

fn cache(tensors: &Tensors, spec: &CacheSpec, layers: Option<usize>) -> Result<PagedCache, TransferError> {
    // SAFETY: nothing is transferred, so the memory is never touched.
    unsafe { PagedCache::new(tensors, spec, Place::Host, layers) }
}

fn families() -> Vec<CacheTensor> {
    let indexer = |i: u64| tensor(i << 20, &[8, 64, 132], DType::U8);
    let latent = |i: u64| tensor(i << 20, &[8, 64, 576], DType::Bf16);
    vec![indexer(0), latent(1), indexer(2), latent(3)]
}

fn c06_two_families_in_one_list_are_an_error() {
    for layers in [None, Some(2), Some(4)] {
        let error = cache(&Tensors::PerLayer(families()), &block_size(64), layers).unwrap_err();
        assert_eq!(error.kind(), "layout_mismatch");
        let text = error.to_string();
        for part in ["layer 1 has dtype bf16", "layer 0 has u8", "one per group"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

fn c06_each_family_moves_as_its_own_cache(rig: &Rig) {
    for (width, dtype, row) in [(132, DType::U8, 132), (576, DType::Bf16, 1152)] {
        let step = 8 * 64 * row;
        let view = View::new(&[8, 64, width], "block,token,dim").dtype(dtype).at(&[0, step]);
        let cache = rig.cache(&view);
        assert_eq!(cache.registered.paged().layout().row_bytes(), row);
        cache.exact(&slots(&[511, 3, 64, 63]));
    }
}

fn c06_more_tensors_than_layers_are_an_error() {
    let alike =
        |n: u64| Tensors::PerLayer((0..n).map(|i| tensor(i << 20, &[8, 64, 576], DType::Bf16)).collect());
    for (tensors, layers) in [(4, 2), (99, 78), (1, 0), (2, 3), (1, usize::MAX)] {
        let error = cache(&alike(tensors), &block_size(64), Some(layers)).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, TransferError::LayerCount { .. }), "{text}");
        assert!(text.contains(&tensors.to_string()) && text.contains(&layers.to_string()), "{text}");
    }
    let one = Tensors::CrossLayer(tensor(0, &[8, 5, 2, 16, 2, 64], DType::Bf16));
    let error = cache(&one, &block_size(16), Some(8)).unwrap_err();
    assert!(matches!(error, TransferError::LayerCount { found: 5, expected: 8 }), "{error}");
}

/// A layer of a cache as an object of its own: planes outermost, tokens outermost, and with pads.
fn slabs_of_one_layer_in_every_order(rig: &Rig) {
    let cache = rig.cache(&View::new(&[4, 2, 4, 2, 8], "block,kv,token,head,dim").at(&[0, 2048, 4096]));
    let (row, tokens, list) = (32u64, 5u64, [15i64, 3, 0, 8, 9]);
    for layout in [
        SlabLayout::layer_object(2, tokens, 16, DType::Bf16).unwrap(),
        SlabLayout::token_major(2, tokens, 16, DType::Bf16).unwrap(),
        SlabLayout::strided([2, 1, tokens], row, [500, 0, 48], DType::Bf16).unwrap(),
        SlabLayout::strided([2, 1, tokens], row, [33, 0, 67], DType::Bf16).unwrap(),
    ] {
        let [plane, _, token] = layout.strides();
        for layer in [2u32, 0] {
            let request = |slab: &maru::cxl::Slab, load: bool| {
                let mapping = SlotMapping::from_slots(&list[..]);
                match load {
                    true => TransferRequest::scatter(&cache.registered, mapping, slab),
                    false => TransferRequest::gather(&cache.registered, mapping, slab),
                }
                .slab_layout(layout.clone())
                .layers(layer, 1)
            };
            // Each row of both sides, and what lies between them.
            let rows = |memory: &mut [u8], slab: &mut [u8], load: bool| {
                for (kv, t) in (0..2).flat_map(|kv| (0..tokens).map(move |t| (kv, t))) {
                    let at = (kv * plane + t * token) as usize;
                    for byte in 0..row {
                        let from =
                            cache.reference.paged_offset(kv, layer.into(), list[t as usize] as u64, byte);
                        match load {
                            true => memory[from as usize] = slab[at + byte as usize],
                            false => slab[at + byte as usize] = memory[from as usize],
                        }
                    }
                }
            };
            for load in [true, false] {
                let mut image = Random(31 + u64::from(layer)).bytes(layout.bytes() as usize + 16);
                let (slab, mut memory) = (rig.slab(&image), cache.bytes());
                rig.engine.submit(&request(&slab, load)).unwrap().wait().unwrap();
                rows(&mut memory, &mut image, load);
                let direction = if load { Direction::Scatter } else { Direction::Gather };
                same("cache", direction, &cache.bytes(), &memory);
                same("slab", direction, &read(&slab), &image);
            }
        }
    }
}

/// What differs, and how it is named; layer 2 is the odd one.
fn c06_other_layers_that_differ() {
    let plain = TensorDesc::contiguous(&[8, 2, 16, 4, 64], DType::Bf16).unwrap();
    let odd = [
        (TensorDesc::contiguous(&[8, 2, 16, 2, 64], DType::Bf16), "shape [8, 2, 16, 2, 64]"),
        (TensorDesc::contiguous(&[8, 2, 16, 4, 128], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[7, 2, 16, 4, 64], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[9, 2, 16, 4, 64], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[8, 2, 32, 4, 64], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[8, 2, 4, 16, 64], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[2, 8, 16, 4, 64], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[8, 2, 16, 256], DType::Bf16), "shape"),
        (TensorDesc::contiguous(&[8, 2, 16, 4, 64], DType::F16), "dtype f16"),
        (TensorDesc::contiguous(&[8, 2, 16, 4, 64], DType::Raw16), "dtype raw16"),
        // Heads first in memory, padded pages, and K first.
        (TensorDesc::strided(&[8, 2, 16, 4, 64], &[8192, 4096, 64, 1024, 1], DType::Bf16), "strides"),
        (TensorDesc::strided(&[8, 2, 16, 4, 64], &[9000, 4096, 256, 64, 1], DType::Bf16), "strides"),
        (TensorDesc::strided(&[8, 2, 16, 4, 64], &[4096, 32_768, 256, 64, 1], DType::Bf16), "strides"),
    ];
    for (desc, what) in odd {
        let desc = desc.unwrap();
        let at = |i: u64, desc: &TensorDesc| CacheTensor {
            addr: NOWHERE + (i << 24),
            len: 1 << 24,
            desc: desc.clone(),
        };
        let list = vec![at(0, &plain), at(1, &plain), at(2, &desc), at(3, &plain)];
        let error = cache(&Tensors::PerLayer(list), &block_size(16), None).unwrap_err();
        assert!(matches!(error, TransferError::LayerDiffers { layer: 2, .. }), "{error}");
        assert!(error.to_string().contains(&format!("layer 2 has {what}")), "{error}");
    }
    // In lists of K and V the odd one is a V tensor.
    let (k, v) = ([8, 16, 4, 64], [8, 16, 4, 128]);
    let split = Tensors::Split {
        k: vec![tensor(0, &k, DType::Bf16), tensor(1 << 24, &k, DType::Bf16)],
        v: vec![tensor(2 << 24, &k, DType::Bf16), tensor(3 << 24, &v, DType::Bf16)],
    };
    let text = cache(&split, &block_size(16), None).unwrap_err().to_string();
    assert!(text.contains("layer 1") && text.contains("V") && text.contains("128"), "{text}");
}

fn c06_lists_that_make_no_cache() {
    let one = || tensor(0, &[8, 16, 4, 64], DType::Bf16);
    let spec = block_size(16);
    assert!(matches!(cache(&Tensors::PerLayer(vec![]), &spec, None), Err(TransferError::NoTensors)));
    let empty = Tensors::Split { k: vec![], v: vec![] };
    assert!(matches!(cache(&empty, &spec, None), Err(TransferError::NoTensors)));
    let uneven = Tensors::Split { k: vec![one()], v: vec![] };
    let error = cache(&uneven, &spec, None).unwrap_err();
    assert!(matches!(error, TransferError::SplitCount { k: 1, v: 0 }), "{error}");
    // K and V the same memory, as when a list is passed twice.
    let twice = Tensors::Split { k: vec![one()], v: vec![one()] };
    assert!(matches!(cache(&twice, &spec, None), Err(TransferError::SharedPlanes { .. })));
    // A tensor per layer that has layers of its own.
    let nested = |i: u64| tensor(i << 24, &[8, 5, 2, 16, 4, 64], DType::Bf16);
    let error = cache(&Tensors::PerLayer(vec![nested(0), nested(1)]), &spec, None).unwrap_err();
    assert_eq!(error.kind(), "layout_mismatch");
    let text = error.to_string();
    assert!(text.contains('5') && text.contains("layer"), "{text}");
    // One byte short.
    let mut short = one();
    short.len -= 1;
    let error =
        cache(&Tensors::PerLayer(vec![short]), &CacheSpec { split_kv: true, ..spec }, None).unwrap_err();
    assert!(matches!(error, TransferError::TensorTooSmall { layer: 0, .. }), "{error}");
}

fn a_model_of_a_thousand_layers() {
    // Layers of one allocation interleave: block outermost.
    let desc = TensorDesc::strided(&[8, 2, 16, 64], &[1000 * 2048, 1024, 64, 1], DType::Bf16).unwrap();
    let at = |i: u64| CacheTensor { addr: NOWHERE + i * 4096, len: desc.span_bytes(), desc: desc.clone() };
    let spec = CacheSpec { num_kv_heads: Some(1), head_size: Some(64), ..block_size(16) };
    let spec = CacheSpec { axes: Some(crate::rig::axes("block,kv,token,heads_dim")), ..spec };
    let list: Vec<CacheTensor> = (0..1000).map(at).collect();
    let cache = cache(&Tensors::PerLayer(list), &spec, Some(1000)).unwrap();
    assert_eq!(cache.layers(), 1000);
    let fingerprint = |tokens| -> Fingerprint { cache.slab_layout(tokens).unwrap().fingerprint() };
    assert_ne!(fingerprint(256), fingerprint(255));
}

/// A layer axis may turn out to be something else entirely, such as slots: an answer all the same, and soon.
fn a_layer_axis_of_any_length_registers_in_no_time() {
    for layers in [1i64, 70_000, 2_000_000, 1 << 33, 1 << 50] {
        let begun = std::time::Instant::now();
        let desc = TensorDesc::contiguous(&[2, layers, 2, 16, 1, 1], DType::U8).unwrap();
        let one = CacheTensor { addr: NOWHERE, len: desc.span_bytes(), desc };
        match cache(&Tensors::CrossLayer(one), &block_size(16), None) {
            Ok(cache) => assert_eq!(cache.layers(), layers as u64),
            Err(TransferError::Layout(LayoutError::OutOfRange { what: "layers", found, .. })) => {
                assert_eq!(found, i128::from(layers));
            }
            Err(e) => panic!("{e}"),
        }
        assert!(begun.elapsed().as_secs() < 5, "{layers} layers took {:?}", begun.elapsed());
    }
    // And an engine takes it or says no at registration, not at the first transfer.
    let rig = Rig::open(&MOVERS[0], None);
    let view = View::new(&[2, 300, 2, 2, 1, 1], "block,layer,kv,token,head,dim");
    rig.cache(&view).exact(&slots(&[3, 0]));
}
