//! Inputs from bytes: every byte string makes one, and near ones make near inputs.

use arbitrary::{Result, Unstructured};
use maru::layout::{RowKind, SlabSpan, StridedSpec};
use maru::{Axis, CacheSpec, DType, Direction, SlotMapping};

use crate::common::EDGES;
use crate::detection_target::{ORDERS, Tensor, dense_strides};
use crate::device_target::Edit;
use crate::jobs_target::{Job, pack};
use crate::sysfs_target::Attributes;

fn number(u: &mut Unstructured<'_>) -> Result<i64> {
    Ok(match u.int_in_range(0..=9)? {
        0..=4 => u.int_in_range(1..=5)?,
        5 | 6 => 8 << u.int_in_range(0..=6)?,
        7 => u.int_in_range(1..=300)?,
        8 => *u.choose(&EDGES)?,
        _ => u.arbitrary()?,
    })
}

fn unsigned(u: &mut Unstructured<'_>) -> Result<u64> {
    Ok(number(u)?.unsigned_abs())
}

fn some<T>(
    u: &mut Unstructured<'_>,
    of_ten: u8,
    make: impl Fn(&mut Unstructured<'_>) -> Result<T>,
) -> Result<Option<T>> {
    if u.ratio(of_ten, 10)? { make(u).map(Some) } else { Ok(None) }
}

fn list<T>(
    u: &mut Unstructured<'_>,
    most: usize,
    make: impl Fn(&mut Unstructured<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    let len = u.int_in_range(0..=most)?;
    (0..len).map(|_| make(u)).collect()
}

pub(crate) fn tensor(u: &mut Unstructured<'_>) -> Result<Tensor> {
    let shape = list(u, 9, number)?;
    let strides = if u.ratio(9, 10)? {
        let pads = (0..10).map(|_| u.int_in_range(0..=5)).collect::<Result<Vec<i64>>>()?;
        dense_strides(&shape, &pads, u.arbitrary()?)
    } else {
        shape.iter().map(|_| number(u)).collect::<Result<_>>()?
    };
    let dtype = *u.choose(&DType::ALL[..])?;
    // Mostly what is stated is found in the tensor.
    let fact = |u: &mut Unstructured<'_>| {
        some(u, 3, |u| match u.ratio(3, 4)? && !shape.is_empty() {
            true => Ok(u.choose(&shape)?.unsigned_abs()),
            false => unsigned(u),
        })
    };
    let spec = CacheSpec {
        block_size: fact(u)?,
        num_kv_heads: fact(u)?,
        head_size: fact(u)?,
        backend_head_size: fact(u)?,
        num_blocks: fact(u)?,
        mla: u.ratio(1, 8)?,
        split_kv: u.ratio(1, 5)?,
        axes: some(u, 4, |u| match u.ratio(3, 4)? {
            true => Ok(Axis::parse_list(u.choose(&ORDERS)?).unwrap()),
            false => list(u, 9, |u| u.choose(&Axis::ALL[..]).copied()),
        })?,
    };
    Ok((shape, strides, dtype, spec))
}

pub(crate) fn job(u: &mut Unstructured<'_>) -> Result<Job> {
    let pad = u.int_in_range(0..=3)?;
    let mut spec = StridedSpec {
        dtype: *u.choose(&DType::ALL[..])?,
        row_kind: RowKind::Plain,
        kv_planes: 1 + pad % 2,
        kv_stride: unsigned(u)?,
        layers: 1,
        layer_stride: unsigned(u)?,
        num_blocks: unsigned(u)?,
        block_size: unsigned(u)?,
        num_heads: unsigned(u)?,
        head_size: unsigned(u)?,
        block_stride: unsigned(u)?,
        token_stride: unsigned(u)?,
        head_stride: unsigned(u)?,
    };
    if u.ratio(9, 10)? {
        pack(&mut spec, pad);
    }
    let address = |u: &mut Unstructured<'_>| {
        some(u, 8, |u| match u.ratio(6, 7)? {
            true => u.int_in_range(1u64 << 20..=(1 << 20) + 8),
            false => unsigned(u),
        })
    };
    let slot = |u: &mut Unstructured<'_>| if u.ratio(20, 21)? { u.int_in_range(-1..=15) } else { number(u) };
    Ok(Job {
        spec,
        base: if u.ratio(12, 13)? { u.int_in_range(0x1000..=0x100f)? } else { u.arbitrary()? },
        layers: unsigned(u)?,
        slab: (
            [
                if u.ratio(9, 10)? { u.int_in_range(8..=63)? } else { unsigned(u)? },
                unsigned(u)?,
                unsigned(u)?,
            ],
            [unsigned(u)?, unsigned(u)?, unsigned(u)?],
            *u.choose(&DType::ALL[..])?,
            u.ratio(8, 10)?,
        ),
        span: SlabSpan {
            host: address(u)?,
            device: address(u)?,
            len: if u.ratio(9, 10)? { 1 << 40 } else { unsigned(u)? },
        },
        slots: match u.ratio(9, 10)? {
            true => SlotMapping::from_slots(list(u, 40, slot)?),
            false => SlotMapping::Device { addr: unsigned(u)?, len: unsigned(u)? },
        },
        skip: if u.ratio(12, 13)? { u.int_in_range(0..=3)? } else { u.arbitrary()? },
        partial: u.ratio(9, 10)?,
        range: some(u, 4, |u| match u.ratio(3, 4)? {
            true => Ok((u.int_in_range(0..=2)?, u.int_in_range(0..=2)?)),
            false => u.arbitrary(),
        })?,
        direction: if u.arbitrary()? { Direction::Gather } else { Direction::Scatter },
    })
}

pub(crate) fn edit(u: &mut Unstructured<'_>) -> Result<Edit> {
    let field = |u: &mut Unstructured<'_>| {
        let number = match u.int_in_range(0..=2)? {
            0 => number(u)? as u64,
            1 => u.int_in_range(0..=20)? * 4096,
            _ => u.arbitrary()?,
        };
        Ok((u.int_in_range(0..=31)?, number))
    };
    Ok(Edit {
        mend: u.ratio(8, 10)?,
        truncate: some(u, 1, |u| u.int_in_range(0..=65_535))?,
        numbers: list(u, 4, field)?,
        entry_numbers: list(u, 4, field)?,
        bytes: list(u, 3, |u| {
            let at = if u.ratio(3, 4)? { u.int_in_range(0..=8_999)? } else { u.int_in_range(0..=65_535)? };
            Ok((at, list(u, 40, |u| u.arbitrary())?))
        })?,
    })
}

/// Size, alignment, two nodes, driver and the ends of a range; a line of `-` is an attribute that is missing.
pub(crate) fn attributes(text: &str) -> Attributes {
    let mut lines = text.split('\n');
    let mut next = || lines.next().filter(|line| *line != "-").map(str::to_owned);
    let texts = [next(), next(), next(), next()];
    // What names a driver is a link, in which a slash or nothing would be another place.
    let driver = next()
        .filter(|d| !d.is_empty() && d.len() < 200 && !d.contains(['/', '\0']) && d != "." && d != "..");
    (texts, driver, (next().unwrap_or_default(), next().unwrap_or_default()))
}
