//! The compiled half of the Python package `maru_kv_ops`; see `docs/python.md` for the package.
//!
//! Python connectors of LLM engines hand over their paged KV tensors and slabs in shared memory; everything
//! below this crate is the same engine that Rust programs use. This crate reads other libraries' tensors
//! without linking them, keeps objects alive while a device uses their memory, releases the GIL around
//! whatever may take time, and turns errors and panics into exceptions.

mod args;
mod bench;
mod cache;
mod config;
mod driver;
mod dtype;
mod engine;
mod errors;
mod legacy;
mod log;
mod memory;
mod pool;
mod process;
mod region;
mod request;
mod tensor;
mod transfer;
mod waiting;
mod words;

use pyo3::prelude::*;

use crate::errors::{detached, guard};
use crate::process::{cuda_allowed, process};

/// Why the native kernel cannot run on a device, or `None` if it can. Makes no context.
#[pyfunction]
#[pyo3(signature = (device=0))]
fn unavailable(py: Python<'_>, device: usize) -> PyResult<Option<(String, String)>> {
    guard(py, || {
        let reason = py.detach(|| match cuda_allowed() {
            Err(fault) => Some((fault.kind.to_owned(), fault.message)),
            Ok(()) => {
                maru_kernel_cuda::availability(device).err().map(|e| (e.kind().to_owned(), e.to_string()))
            }
        });
        Ok(reason)
    })
}

/// Waits for every transfer that nobody holds (those of the legacy calls), with the GIL released, and raises
/// the first that failed.
#[pyfunction]
fn synchronize(py: Python<'_>) -> PyResult<()> {
    guard(py, || {
        let (kept, outcome) = detached(py, || Ok(process().drain()))?;
        drop(kept);
        Ok(outcome?)
    })
}

/// `(number, name, whether it is moved)` of every engine format.
#[pyfunction]
fn engine_formats() -> Vec<(i64, &'static str, bool)> {
    let moved = |number| maru_layout::EngineFormat::from_number(number).is_ok();
    maru_layout::EngineFormat::known().map(|(number, name)| (number, name, moved(number))).collect()
}

/// Slots of the tokens `start..stop` of a request in blocks, as a list: `block * block_size + offset`.
#[pyfunction]
fn slots_from_blocks(
    py: Python<'_>,
    blocks: &Bound<'_, PyAny>,
    block_size: &Bound<'_, PyAny>,
    start: &Bound<'_, PyAny>,
    stop: &Bound<'_, PyAny>,
) -> PyResult<Vec<i64>> {
    guard(py, || {
        let blocks =
            words::Words::of(blocks, "blocks")?.values(py, "blocks", maru_transfer::Place::Host, 0)?;
        let block_size = args::positive(block_size, "block_size")?;
        let (start, stop) = (args::count(start, "start")?, args::count(stop, "stop")?);
        match maru_layout::SlotMapping::from_blocks(&blocks, block_size, start..stop)? {
            maru_layout::SlotMapping::Host(slots) => Ok(slots.to_vec()),
            _ => Ok(Vec::new()),
        }
    })
}

/// The package's version.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// A panic on purpose, to test that none reaches Python.
#[pyfunction]
fn _panic(py: Python<'_>) -> PyResult<()> {
    guard(py, || Ok(detached(py, || panic!("on purpose"))?))
}

#[pymodule]
#[pyo3(name = "_native")]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::install();
    process::watch_forks();
    for function in [
        wrap_pyfunction!(unavailable, module)?,
        wrap_pyfunction!(synchronize, module)?,
        wrap_pyfunction!(engine_formats, module)?,
        wrap_pyfunction!(slots_from_blocks, module)?,
        wrap_pyfunction!(version, module)?,
        wrap_pyfunction!(_panic, module)?,
        wrap_pyfunction!(bench::_launch_ns, module)?,
        wrap_pyfunction!(config::read_config, module)?,
        wrap_pyfunction!(legacy::multi_layer_kv_transfer, module)?,
        wrap_pyfunction!(legacy::single_layer_kv_transfer, module)?,
        wrap_pyfunction!(legacy::multi_layer_block_kv_transfer, module)?,
    ] {
        module.add_function(function)?;
    }
    module.add_class::<legacy::PageBufferShapeDesc>()?;
    module.add_class::<cache::PyPagedCache>()?;
    module.add_class::<region::PyRegion>()?;
    module.add_class::<region::PySlab>()?;
    module.add_class::<engine::PyEngine>()?;
    module.add_class::<transfer::PyTransfer>()?;
    module.add_class::<pool::PyPool>()?;
    module.add_class::<pool::PyChunkKeys>()?;
    Ok(())
}
