//! Memory of the place a backend moves: the host's, or a device's.

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use maru::cxl::{CudaRegistrar, Region, Slab};

/// Where a trial's cache lives.
#[derive(Debug)]
pub(crate) enum Arena {
    Host(Slab),
    Device { context: Arc<CudaContext>, addr: u64 },
}

fn check(what: &str, code: sys::CUresult) -> Result<(), String> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(format!("{what}: {code:?}")),
    }
}

impl Arena {
    pub(crate) fn new(context: Option<&Arc<CudaContext>>, content: &[u8]) -> Result<Arena, String> {
        let Some(context) = context else {
            let memory = host(content)?;
            return Ok(Arena::Host(memory));
        };
        context.bind_to_thread().map_err(|e| e.to_string())?;
        let mut addr = 0;
        // SAFETY: a context is current; the out pointer is valid.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut addr, content.len()) })?;
        let arena = Arena::Device { context: Arc::clone(context), addr };
        // SAFETY: the allocation holds `content.len()` bytes.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(addr, content.as_ptr().cast(), content.len()) })?;
        Ok(arena)
    }

    pub(crate) fn addr(&self) -> u64 {
        match self {
            Arena::Host(slab) => slab.addr().as_ptr().expose_provenance() as u64,
            Arena::Device { addr, .. } => *addr,
        }
    }

    pub(crate) fn read(&self, len: usize) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0u8; len];
        match self {
            Arena::Host(slab) => slab.read_at(0, &mut bytes).map_err(|e| e.to_string())?,
            Arena::Device { context, addr } => {
                context.bind_to_thread().map_err(|e| e.to_string())?;
                // SAFETY: the arena was made with at least `len` bytes.
                check("cuMemcpyDtoH", unsafe {
                    sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), *addr, len)
                })?;
            }
        }
        Ok(bytes)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Arena::Device { context, addr } = self
            && context.bind_to_thread().is_ok()
        {
            // SAFETY: allocated by `new`, freed once.
            let _ = unsafe { sys::cuMemFree_v2(*addr) };
        }
    }
}

fn host(content: &[u8]) -> Result<Slab, String> {
    let len = content.len() as u64;
    let slab = Region::anonymous(len).and_then(|r| r.slab(0, len)).map_err(|e| e.to_string())?;
    slab.write_at(0, content).map_err(|e| e.to_string())?;
    Ok(slab)
}

/// A slab with content, registered with the device if there is one.
pub(crate) fn slab(context: Option<&Arc<CudaContext>>, content: &[u8]) -> Result<Slab, String> {
    let slab = host(content)?;
    if let Some(context) = context {
        let registrar = CudaRegistrar::new(Arc::clone(context)).map_err(|e| e.to_string())?;
        let options = maru::cxl::RegisterOptions { required: true, ..Default::default() };
        slab.region().register(Arc::new(registrar), options).map_err(|e| e.to_string())?;
    }
    Ok(slab)
}
