//! The three calls of the old connectors, on the same engine as everything else.

mod block;
mod multi;
mod planes;
mod single;

use maru_layout::{Direction, EngineFormat, SlotMapping};
use maru_transfer::{Place, Transfer};
use pyo3::prelude::*;

pub(crate) use block::{PageBufferShapeDesc, multi_layer_block_kv_transfer};
pub(crate) use multi::multi_layer_kv_transfer;
pub(crate) use planes::{Registrations, planes_on_device};
pub(crate) use single::single_layer_kv_transfer;

use crate::args;
use crate::errors::{Fault, Result};
use crate::process::{InFlight, Keep, process};

fn direction(object: &Bound<'_, PyAny>) -> Result<Direction> {
    match args::int(object, "direction")? {
        0 => Ok(Direction::Scatter),
        1 => Ok(Direction::Gather),
        other => {
            Err(Fault::value(format!("direction is {other}; allowed: 0 (H2D, load), 1 (D2H, store)")).into())
        }
    }
}

fn format(object: &Bound<'_, PyAny>) -> Result<EngineFormat> {
    let number = args::int(object, "engine_kv_format")?;
    Ok(EngineFormat::from_number(number)?)
}

/// What a device still reads stays alive until the transfer is over; errors in flight go to the log and to
/// `synchronize()`.
fn finish(py: Python<'_>, place: Place, transfer: Transfer, keep: Keep) {
    process().park(place, Box::new(InFlight { transfer, keep }));
    process().reap(py);
}

/// Refuses to write what NumPy calls read-only.
fn writable(read_only: bool, written: bool, name: &str) -> std::result::Result<(), Fault> {
    match read_only && written {
        true => Err(Fault::value(format!("{name} is read-only and would be written"))),
        false => Ok(()),
    }
}

/// One slot per token of the slab, neither more nor fewer.
fn one_per_token(slots: &SlotMapping, tokens: u64) -> std::result::Result<(), Fault> {
    match slots.len() == tokens {
        true => Ok(()),
        false => Err(Fault::value(format!(
            "slot_mapping has {} slots, the slab has {tokens} tokens; one per token is needed",
            slots.len()
        ))),
    }
}

/// Block size and count of a cache of `slots` slots.
fn blocks_of(slots: u64, block_size: u64) -> std::result::Result<u64, Fault> {
    match slots.is_multiple_of(block_size) && slots > 0 {
        true => Ok(slots / block_size),
        false => Err(Fault::value(format!(
            "page_buffer_size is {slots}, which is no whole number of blocks of block_size {block_size}"
        ))),
    }
}

/// The memory a call moves, told from a device argument.
fn place(device: &Bound<'_, PyAny>, name: &str) -> Result<Place> {
    crate::tensor::place_of(device, name)
}
