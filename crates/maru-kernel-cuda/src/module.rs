//! An image of the kernel, loaded by the driver.

use cudarc::driver::sys;
use maru_driver::{Context, DriverError, check};

use crate::abi::Entry;
use crate::{Image, KernelError, image};

/// A loaded image and its entries. Unloaded when dropped.
#[derive(Debug)]
pub(crate) struct Module {
    handle: sys::CUmodule,
    functions: [sys::CUfunction; Entry::COUNT],
    pub(crate) image: Image,
    context: Context,
}

// SAFETY: module and function handles may be used from any thread with the context current.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// The first image that the driver takes; else the error of the last. The context is current.
    pub(crate) fn load(context: &Context, images: impl Iterator<Item = Image>) -> Result<Self, KernelError> {
        let mut last = None;
        for image in images {
            let mut handle = std::ptr::null_mut();
            // SAFETY: the image is a fat binary or zero-terminated PTX; the out pointer is valid.
            let result = unsafe { sys::cuModuleLoadData(&raw mut handle, image.bytes().as_ptr().cast()) };
            match check("cuModuleLoadData", result) {
                Ok(()) => return Module::find_entries(context.clone(), handle, image),
                // Has nothing to do with the image.
                Err(error) if error.is_context_lost() => return Err(error.into()),
                Err(error) => {
                    let error = refused(image, error);
                    tracing::debug!(%error, %image, "an image of the kernel did not load");
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or(KernelError::ModuleLoad { image: "image", name: "there is none".into(), code: 0 }))
    }

    fn find_entries(context: Context, handle: sys::CUmodule, image: Image) -> Result<Self, KernelError> {
        // From here on `Drop` unloads it.
        let functions = [std::ptr::null_mut(); Entry::COUNT];
        let mut module = Module { handle, functions, image, context };
        for entry in Entry::all() {
            let function = &mut module.functions[entry.index()];
            // SAFETY: the module was just loaded; the name is a C string.
            let found = unsafe { sys::cuModuleGetFunction(function, handle, entry.name().as_ptr()) };
            check("cuModuleGetFunction", found)?;
        }
        Ok(module)
    }

    pub(crate) fn function(&self, entry: Entry) -> sys::CUfunction {
        self.functions[entry.index()]
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.give_back("the native kernel", || {
            // SAFETY: loaded by `load`, unloaded once. Every completion handle keeps this value alive, and the
            // driver waits for kernels that still run.
            check("cuModuleUnload", unsafe { sys::cuModuleUnload(self.handle) })
        });
    }
}

fn refused(image: Image, error: DriverError) -> KernelError {
    if error.code == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32 {
        let mut cuda_version = 0;
        // SAFETY: the out pointer is valid.
        let _ = unsafe { sys::cuDriverGetVersion(&raw mut cuda_version) };
        return KernelError::UnsupportedPtx { ptx_version: image::PORTABLE_PTX_VERSION, cuda_version };
    }
    KernelError::ModuleLoad { image: image.label(), name: error.name, code: error.code }
}
