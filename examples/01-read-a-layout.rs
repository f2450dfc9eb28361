//! Which axis is which? Run with `cargo run --example 01-read-a-layout`.

use maru::{Axis, CacheSpec, DType, PagedLayout, TensorDesc};

fn main() -> Result<(), maru::LayoutError> {
    // vLLM's fused default: (blocks, heads, tokens, K then V), tokens outermost inside a block.
    let fused = TensorDesc::strided(&[97871, 2, 16, 256], &[8192, 256, 512, 1], DType::Bf16)?;
    let known = CacheSpec {
        block_size: Some(16),
        num_kv_heads: Some(2),
        head_size: Some(128),
        ..CacheSpec::default()
    };
    let layout = PagedLayout::detect(&fused, &known)?;
    println!("{:?}: {:?}", fused.shape(), layout.byte_strides());
    println!("  {} slots, rows of {} bytes", layout.num_slots(), layout.row_bytes());

    // Two blocks, or K and V? Nothing in the tensor says, so nothing is guessed.
    let either = TensorDesc::contiguous(&[2, 2, 16, 8, 128], DType::Bf16)?;
    let known = CacheSpec { block_size: Some(16), ..CacheSpec::default() };
    println!("{}", PagedLayout::detect(&either, &known).expect_err("cannot be told apart"));

    // The caller knows.
    let axes = Axis::parse_list("kv,block,token,head,dim")?;
    let layout = PagedLayout::detect(&either, &CacheSpec { axes: Some(axes), ..known })?;
    println!("  V of block 0 begins at byte {}", layout.plane_offset(1, 0)?);
    Ok(())
}
