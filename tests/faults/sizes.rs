//! Kind: sizes past 32 and 63 bits (C16).

use std::sync::{Mutex, PoisonError};

use cudarc::driver::{CudaContext, sys};
use maru::cxl::{Region, Slab};
use maru::layout::{PagedLayout, RowKind, SlabLayout, StridedSpec};
use maru::{
    CacheSpec, CacheTensor, Config, DType, Direction, PagedCache, Place, SlotMapping, TensorDesc, Tensors,
    TransferEngine, TransferError, TransferRequest,
};

use crate::harness::Test;
use crate::rig::{MOVERS, Rig, block_size, read};

pub(crate) fn tests() -> Vec<Test> {
    tests![
        plain:
            c16_blocks_beyond_two_gib_on_the_host,
            c16_a_stride_that_wraps_at_block_2066_on_the_host,
            c16_shapes_over_the_address_space_are_errors,
            c16_addresses_that_wrap_are_errors,
            c16_slabs_over_the_address_space_are_errors;
        on_device:
            c16_a_stride_that_wraps_at_block_2066_on_the_device,
            c16_blocks_beyond_four_gib_on_the_device;
        device:
            what_the_kernel_cannot_count_goes_to_the_fallback;
    ]
}

/// Memory of which most is never touched.
trait Memory {
    fn addr(&self) -> u64;
    fn put(&self, at: u64, bytes: &[u8]);
    fn get(&self, at: u64, len: usize) -> Vec<u8>;
}

impl Memory for Slab {
    fn addr(&self) -> u64 {
        Slab::addr(self).addr().get() as u64
    }
    fn put(&self, at: u64, bytes: &[u8]) {
        self.write_at(at, bytes).unwrap();
    }
    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read_at(at, &mut bytes).unwrap();
        bytes
    }
}

/// Device memory.
#[derive(Debug)]
struct Device<'a> {
    context: &'a CudaContext,
    addr: u64,
}

impl<'a> Device<'a> {
    fn new(context: &'a CudaContext, len: u64) -> Device<'a> {
        context.bind_to_thread().unwrap();
        let mut addr = 0;
        // SAFETY: a context is current; the out pointer is valid.
        let code = unsafe { sys::cuMemAlloc_v2(&mut addr, len as usize) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Device { context, addr }
    }
}

impl Memory for Device<'_> {
    fn addr(&self) -> u64 {
        self.addr
    }
    fn put(&self, at: u64, bytes: &[u8]) {
        self.context.bind_to_thread().unwrap();
        // SAFETY: the test stays inside the allocation.
        let code = unsafe { sys::cuMemcpyHtoD_v2(self.addr + at, bytes.as_ptr().cast(), bytes.len()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        self.context.bind_to_thread().unwrap();
        let mut bytes = vec![0; len];
        // SAFETY: the test stays inside the allocation; the vector has `len` bytes.
        let code = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.addr + at, len) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        bytes
    }
}

impl Drop for Device<'_> {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated by `new`, freed once.
        let _ = unsafe { sys::cuMemFree_v2(self.addr) };
    }
}

/// Stores and loads tokens of far blocks; block 0 and the blocks that a wrapped product would hit are canaries.
fn far(engine: &TransferEngine, memory: &dyn Memory, desc: &TensorDesc, blocks: &[u64], slab: &Slab) {
    let tensor = CacheTensor { addr: memory.addr(), len: desc.span_bytes(), desc: desc.clone() };
    // SAFETY: the memory outlives the cache and is touched by this test only.
    let cache =
        unsafe { PagedCache::new(&Tensors::PerLayer(vec![tensor]), &block_size(16), engine.place(), None) };
    let cache = engine.register(cache.unwrap()).unwrap();
    let layout = cache.paged().layout().clone();
    let strides = layout.byte_strides();
    let (block, token) = (strides.block.unwrap(), strides.token.unwrap());
    let row = layout.token_bytes();
    // K of block b, token t.
    let at = |slot: u64| slot / 16 * block + slot % 16 * token;
    let wrapped: Vec<u64> = blocks
        .iter()
        .map(|b| b * block)
        .filter(|a| a >> 32 != 0)
        .map(|a| a % (1 << 32))
        .filter(|a| *a > 0)
        .collect();
    let list: Vec<i64> = blocks.iter().flat_map(|b| [b * 16, b * 16 + 15]).map(|s| s as i64).collect();
    let content = |n: usize, salt: u8| -> Vec<u8> { (0..n).map(|i| (i * 31) as u8 ^ salt).collect() };
    for (n, slot) in list.iter().enumerate() {
        memory.put(at(*slot as u64), &content(row as usize, n as u8));
    }
    memory.put(0, &content(row as usize, 0xcc));
    wrapped.iter().for_each(|a| memory.put(*a, &content(row as usize, 0xdd)));
    let tokens = list.len() as u64;
    let request = |direction| {
        let mapping = SlotMapping::from_slots(&list[..]);
        match direction {
            Direction::Gather => TransferRequest::gather(&cache, mapping, slab),
            _ => TransferRequest::scatter(&cache, mapping, slab),
        }
        .slab_tokens(tokens)
    };
    engine.submit(&request(Direction::Gather)).unwrap().wait().unwrap();
    let stored = read(slab);
    for n in 0..list.len() {
        assert!(stored[n * row as usize..][..row as usize] == content(row as usize, n as u8), "token {n}");
    }
    let loaded: Vec<u8> = stored.iter().map(|b| !b).collect();
    slab.write_at(0, &loaded).unwrap();
    engine.submit(&request(Direction::Scatter)).unwrap().wait().unwrap();
    for (n, slot) in list.iter().enumerate() {
        let expected: Vec<u8> = content(row as usize, n as u8).iter().map(|b| !b).collect();
        assert_eq!(memory.get(at(*slot as u64), row as usize), expected, "slot {slot}");
    }
    for a in wrapped.into_iter().filter(|a| *a >= row) {
        assert_eq!(memory.get(a, row as usize), content(row as usize, 0xdd), "a canary at {a}");
    }
    assert_eq!(memory.get(0, 16), content(row as usize, 0xcc)[..16], "block 0");
}

fn host(desc: &TensorDesc, blocks: &[u64]) {
    let engine = TransferEngine::open(&Config::from_toml_str(MOVERS[0].config, "x").unwrap()).unwrap();
    let region = Region::anonymous(desc.span_bytes()).unwrap();
    let memory = region.slab(0, desc.span_bytes()).unwrap();
    let len = 1 << 20;
    far(&engine, &memory, desc, blocks, &Region::anonymous(len).unwrap().slab(0, len).unwrap());
}

fn c16_blocks_beyond_two_gib_on_the_host() {
    let desc = TensorDesc::contiguous(&[65_537, 2, 16, 8, 128], DType::U8).unwrap();
    assert!(desc.span_bytes() > 1 << 31);
    host(&desc, &[65_535, 65_536, 1]);
    // Past 2^32, where the wrap is whole.
    let desc = TensorDesc::contiguous(&[131_074, 2, 16, 8, 128], DType::U8).unwrap();
    host(&desc, &[131_072, 131_073, 65_536]);
}

fn wraps_at_2066() -> TensorDesc {
    TensorDesc::strided(&[2067, 2, 16, 2, 64], &[1_039_680, 2048, 128, 64, 1], DType::U8).unwrap()
}

fn c16_a_stride_that_wraps_at_block_2066_on_the_host() {
    host(&wraps_at_2066(), &[2065, 2066]);
}

/// One such cache at a time, for the sake of smaller GPUs.
static ROOM: Mutex<()> = Mutex::new(());

fn device(rig: &Rig, desc: &TensorDesc, blocks: &[u64]) {
    let _room = ROOM.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = Device::new(rig.context.as_ref().unwrap(), desc.span_bytes());
    far(&rig.engine, &memory, desc, blocks, &rig.slab(&[0; 12 * 1024]));
}

fn c16_a_stride_that_wraps_at_block_2066_on_the_device(rig: &Rig) {
    device(rig, &wraps_at_2066(), &[2065, 2066]);
}

fn c16_blocks_beyond_four_gib_on_the_device(rig: &Rig) {
    let desc = TensorDesc::contiguous(&[131_074, 2, 16, 8, 128], DType::U8).unwrap();
    device(rig, &desc, &[131_072, 131_073, 65_536]);
}

fn c16_shapes_over_the_address_space_are_errors() {
    let dtype = DType::Bf16;
    for shape in [
        &[1 << 40, 2, 16, 8, 1 << 20][..],
        &[i64::MAX, 2],
        &[2, i64::MAX],
        &[1 << 62, 1, 1],
        &[1 << 31, 1 << 31, 2],
        &[1 << 32, 1 << 32, 1 << 32],
        &[i64::MAX],
        &[3, (1 << 62) / 3 + 1],
    ] {
        let error = TensorDesc::contiguous(shape, dtype).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument");
        assert!(error.to_string().contains("2^63"), "{shape:?}: {error}");
        // The same lengths with strides that look harmless, or wrap.
        for stride in [1, 1 << 32, i64::MAX] {
            let strides = vec![stride; shape.len()];
            TensorDesc::strided(shape, &strides, dtype).unwrap_err();
        }
    }
    // Half the edge is fine.
    TensorDesc::contiguous(&[1 << 30, 1 << 31], dtype).unwrap();
    let edge = TensorDesc::strided(&[2, 1], &[(1 << 62) - 2, 1], dtype).unwrap();
    assert_eq!(edge.span_bytes(), i64::MAX as u64 - 1);
    TensorDesc::strided(&[2, 1], &[1 << 62, 1], dtype).unwrap_err();
    // Strides as plain numbers, up to 2^64.
    let good = StridedSpec {
        dtype,
        row_kind: RowKind::Plain,
        kv_planes: 2,
        kv_stride: 1 << 20,
        layers: 1,
        layer_stride: 0,
        num_blocks: 4,
        block_size: 16,
        num_heads: 2,
        head_size: 8,
        block_stride: 512,
        token_stride: 32,
        head_stride: 16,
    };
    PagedLayout::from_strides(&good).unwrap();
    for number in [1 << 60, 1 << 63, u64::MAX, u64::MAX / 16, u64::MAX / 2 + 1] {
        for bad in [
            StridedSpec { num_blocks: number, ..good.clone() },
            StridedSpec { block_size: number, ..good.clone() },
            StridedSpec { num_heads: number, ..good.clone() },
            StridedSpec { head_size: number, ..good.clone() },
            StridedSpec { layers: number, layer_stride: 16, ..good.clone() },
            StridedSpec { kv_planes: number, ..good.clone() },
            StridedSpec { block_stride: number, num_blocks: 1 << 10, ..good.clone() },
            StridedSpec { token_stride: number, ..good.clone() },
        ] {
            let error = PagedLayout::from_strides(&bad).unwrap_err();
            assert_eq!(error.kind(), "invalid_argument", "{error}");
        }
    }
}

fn c16_addresses_that_wrap_are_errors() {
    let desc = TensorDesc::contiguous(&[4, 2, 16, 2, 8], DType::Bf16).unwrap();
    let span = desc.span_bytes();
    let register = |addr, len, layers: u64| {
        let tensor =
            |l: u64| CacheTensor { addr: u64::wrapping_add(addr, l * span), len, desc: desc.clone() };
        let list = Tensors::PerLayer((0..layers).map(tensor).collect());
        // SAFETY: nothing is transferred.
        unsafe { PagedCache::new(&list, &block_size(16), Place::Host, None) }
    };
    for (addr, len) in [(0, span), (u64::MAX, span), (u64::MAX - span + 1, span), (4096, u64::MAX)] {
        let error = register(addr, len, 1).unwrap_err();
        assert!(matches!(error, TransferError::BadAddress { layer: 0, .. }), "{addr:#x}: {error}");
    }
    // The last tensor below the edge, and the one behind it.
    register(u64::MAX - span, span, 1).unwrap();
    let error = register(u64::MAX - span, span, 2).unwrap_err();
    assert!(matches!(error, TransferError::BadAddress { layer: 1, .. }), "{error}");
    for len in [0, 1, span - 1] {
        let error = register(4096, len, 1).unwrap_err();
        assert!(
            error.to_string().contains(&format!("spans {span} bytes, its memory holds {len}")),
            "{error}"
        );
    }
}

fn c16_slabs_over_the_address_space_are_errors() {
    for (planes, layers, tokens, row) in [
        (2, 1 << 31, 1 << 31, 2),
        (2, 61, 256, u64::MAX),
        (2, u64::MAX, 256, 1024),
        (2, 61, u64::MAX, 1024),
        (1, 1, 1, 1 << 62),
        (1, 1, 1 << 62, 1),
        (3, 1, 1, 1),
        (0, 1, 1, 1),
        (u64::MAX, 1, 1, 1),
        (1, 0, 1, 1),
        (1, 1, 0, 1),
        (1, 1, 1, 0),
    ] {
        let error = SlabLayout::packed(planes, layers, tokens, row, DType::Bf16).unwrap_err();
        assert_eq!(error.kind(), "invalid_argument", "{error}");
    }
    SlabLayout::packed(1, 1, 1 << 61, 1, DType::Bf16).unwrap();
}

/// Counts past 32 bits: the kernel says so by name, and only `auto` goes on without it.
fn what_the_kernel_cannot_count_goes_to_the_fallback() {
    let rows = TensorDesc::contiguous(&[1, 1 << 33, 8], DType::U8).unwrap();
    let wide = TensorDesc::contiguous(&[2, 4, 1 << 33], DType::U8).unwrap();
    for (desc, size) in [(rows, 1 << 33), (wide, 4)] {
        let cache = || {
            let tensor = CacheTensor { addr: 1 << 40, len: desc.span_bytes(), desc: desc.clone() };
            let spec = CacheSpec { mla: true, ..block_size(size) };
            // SAFETY: nothing is transferred.
            unsafe { PagedCache::new(&Tensors::PerLayer(vec![tensor]), &spec, Place::Cuda(0), None) }.unwrap()
        };
        for (backend, expected) in
            [("native", Err("not_available")), ("fallback", Ok("fallback")), ("auto", Ok("fallback"))]
        {
            let text =
                format!("[transfer]\ndevice = \"cuda:0\"\nbackend = \"{backend}\"\nkv_chunk_tokens = 1");
            let engine = TransferEngine::open(&Config::from_toml_str(&text, "x").unwrap()).unwrap();
            let registered = engine.register(cache());
            let found = registered.as_ref().map(|r| r.backend()).map_err(TransferError::kind);
            assert_eq!(found, expected, "{backend}");
        }
    }
}
