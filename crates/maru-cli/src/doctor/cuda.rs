//! The CUDA driver and its GPUs.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use maru::Config;
use maru::kernel::Image;
use maru_driver::{DriverError, check};
use serde::Serialize;

use crate::doctor::host::node_of;
use crate::doctor::pci::{self, Link};
use crate::doctor::probe::{self, Kernel, Registration};
use crate::doctor::system::text;
use crate::doctor::{Findings, Roots};

/// Drivers of the r580 series fail beyond this in one registration call.
const REGISTRATION_LIMIT: u64 = 512 << 30;

/// Functions that are called here; without one of them the driver is not asked at all.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceGetPCIBusId",
];

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Cuda {
    /// Whether the driver library is there and can be used.
    pub(crate) available: bool,
    pub(crate) reason: Option<String>,
    /// CUDA version the driver supports, such as 13.0.
    pub(crate) driver_cuda: Option<String>,
    /// The kernel module's line in /proc/driver/nvidia/version.
    pub(crate) module: Option<String>,
    pub(crate) kernel_images: Vec<EmbeddedImage>,
    /// One registration call must stay below this many bytes.
    pub(crate) registration_limit_bytes: u64,
    pub(crate) gpus: Vec<Gpu>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct EmbeddedImage {
    /// `fatbin` or `portable_ptx`.
    pub(crate) kind: &'static str,
    pub(crate) built_by: &'static str,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Gpu {
    pub(crate) device: u32,
    pub(crate) name: String,
    /// Such as 9.0.
    pub(crate) compute_capability: String,
    pub(crate) memory_bytes: u64,
    pub(crate) multiprocessors: Option<u32>,
    pub(crate) copy_engines: Option<u32>,
    pub(crate) pci: Option<String>,
    pub(crate) numa_node: Option<i32>,
    pub(crate) link: Link,
    pub(crate) registers_host_memory: Option<bool>,
    pub(crate) registers_read_only_memory: Option<bool>,
    /// null: not tried.
    pub(crate) native_kernel: Option<Kernel>,
    pub(crate) registration: Option<Registration>,
}

impl Gpu {
    pub(crate) fn numa_node(&self) -> Option<i32> {
        self.numa_node
    }
}

pub(crate) fn look(roots: &Roots, probe: bool, config: Option<&Config>, findings: &mut Findings) -> Cuda {
    let mut cuda = Cuda {
        available: false,
        reason: None,
        driver_cuda: None,
        module: text(&roots.proc.join("driver/nvidia/version"))
            .and_then(|text| text.lines().next().map(str::to_owned)),
        kernel_images: Image::embedded()
            .map(|image| EmbeddedImage { kind: kind(image), built_by: image.built_by() })
            .collect(),
        registration_limit_bytes: REGISTRATION_LIMIT,
        gpus: Vec::new(),
    };
    match devices(&mut cuda) {
        Ok(count) => cuda.gpus = (0..count).filter_map(|n| describe(n, roots, findings)).collect(),
        Err(reason) => absent(&mut cuda, reason, roots, findings),
    }
    for gpu in &mut cuda.gpus {
        judge_link(gpu, findings);
        if probe {
            try_it(gpu, roots, config, findings);
        }
    }
    if cuda.available && !cuda.kernel_images.iter().any(|image| image.kind == "fatbin") {
        findings.note(
            "this program holds the native kernel as portable PTX only: the driver compiles it at the first start \
             (about a tenth of a second, then it is cached)",
            "build with nvcc in the PATH for machine code in the binary (MARU_REQUIRE_NVCC=1 makes its absence an error)",
        );
    }
    cuda
}

fn kind(image: Image) -> &'static str {
    match image {
        Image::Fatbin => "fatbin",
        Image::PortablePtx => "portable_ptx",
        _ => "other",
    }
}

/// Starts the driver and counts devices.
fn devices(cuda: &mut Cuda) -> Result<u32, String> {
    maru_driver::require(NEEDED).map_err(|e| e.to_string())?;
    let mut version: c_int = 0;
    // SAFETY: the function exists, as checked above; the out pointer is valid.
    if check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) }).is_ok() {
        cuda.driver_cuda = Some(format!("{}.{}", version / 1000, version % 1000 / 10));
    }
    // SAFETY: the function exists; it takes no pointers.
    check("cuInit", unsafe { sys::cuInit(0) }).map_err(|e| e.to_string())?;
    let mut count: c_int = 0;
    // SAFETY: the out pointer is valid.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) }).map_err(|e| e.to_string())?;
    match u32::try_from(count) {
        Ok(count) if count > 0 => {
            cuda.available = true;
            Ok(count)
        }
        _ => Err("the driver has no device".to_owned()),
    }
}

fn absent(cuda: &mut Cuda, reason: String, roots: &Roots, findings: &mut Findings) {
    let boards = pci::nvidia_devices(&roots.sys);
    let here = if boards.is_empty() { String::new() } else { format!(" ({})", boards.join(", ")) };
    match (cuda.module.is_some(), boards.is_empty()) {
        (true, _) => findings.error(
            format!("the NVIDIA kernel module is loaded and CUDA cannot be used: {reason}"),
            "install the user library of the same driver version (libcuda.so.1), put it into the library path, and in a \
             container pass the GPUs in (--gpus all); see that CUDA_VISIBLE_DEVICES names devices",
        ),
        (false, false) => findings.error(
            format!("there are NVIDIA devices{here} and no driver: {reason}"),
            "install the NVIDIA driver, 525 or later, and load it (`modprobe nvidia`)",
        ),
        (false, true) => findings.note(
            format!("there is no usable GPU: {reason}; caches are in host memory, moved by the fallback"),
            "nothing, on a machine without a GPU",
        ),
    }
    cuda.reason = Some(reason);
}

fn describe(ordinal: u32, roots: &Roots, findings: &mut Findings) -> Option<Gpu> {
    match ask(ordinal) {
        Ok((mut gpu, handle)) => {
            let number = |attribute| attribute_of(handle, attribute).ok();
            let count = |attribute| number(attribute).and_then(|n| u32::try_from(n).ok());
            gpu.multiprocessors = count(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
            gpu.copy_engines = count(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
            gpu.registers_host_memory =
                number(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED).map(|n| n != 0);
            gpu.registers_read_only_memory =
                number(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED).map(|n| n != 0);
            gpu.pci = address(handle);
            if let Some(address) = &gpu.pci {
                gpu.link = pci::link(&roots.sys, address);
                gpu.numa_node = node_of(&pci::dir(&roots.sys, address));
            }
            Some(gpu)
        }
        Err(error) => {
            findings.error(
                format!("cuda:{ordinal} does not answer: {error}"),
                "see dmesg for Xid messages; a reset of the GPU or a reboot may be needed",
            );
            None
        }
    }
}

fn ask(ordinal: u32) -> Result<(Gpu, sys::CUdevice), DriverError> {
    let mut handle = 0;
    let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
    // SAFETY: the out pointer is valid; the driver checks the ordinal.
    check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut handle, number) })?;
    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: the buffer has the length given, and the driver ends what it writes there with a zero.
    check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, handle) })?;
    let mut memory = 0usize;
    // SAFETY: the out pointer is valid.
    check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory, handle) })?;
    let major = attribute_of(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute_of(handle, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let gpu = Gpu {
        device: ordinal,
        name: words(&name),
        compute_capability: format!("{major}.{minor}"),
        memory_bytes: memory as u64,
        multiprocessors: None,
        copy_engines: None,
        pci: None,
        numa_node: None,
        link: Link::default(),
        registers_host_memory: None,
        registers_read_only_memory: None,
        native_kernel: None,
        registration: None,
    };
    Ok((gpu, handle))
}

fn attribute_of(handle: sys::CUdevice, attribute: Attribute) -> Result<c_int, DriverError> {
    let mut value = 0;
    // SAFETY: the out pointer is valid; the handle is the driver's own.
    let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, handle) };
    check("cuDeviceGetAttribute", code).map(|()| value)
}

fn address(handle: sys::CUdevice) -> Option<String> {
    let mut text: [c_char; 64] = [0; 64];
    // SAFETY: the buffer has the length given, and the driver ends what it writes there with a zero.
    let code = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 63, handle) };
    check("cuDeviceGetPCIBusId", code).ok()?;
    Some(words(&text).to_ascii_lowercase()).filter(|text| !text.is_empty())
}

/// Text up to the first zero; the arrays are longer than what the driver was allowed to write.
fn words(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|c| c.to_ne_bytes()[0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

fn judge_link(gpu: &Gpu, findings: &mut Findings) {
    let (name, link) = (format!("cuda:{}", gpu.device), &gpu.link);
    let Some(best) = link.max_gbps else {
        findings.note(
            format!("{name}: the kernel does not say how its link runs (usual in virtual machines)"),
            "measure it: `maru bench` puts every backend beside one flat copy",
        );
        return;
    };
    if let (Some(now), Some(max)) = (link.width, link.max_width)
        && now < max
    {
        findings.warning(
            format!("{name}: its link has {now} lanes of {max}: transfers take {:.1} times as long", {
                f64::from(max) / f64::from(now)
            }),
            "reseat the board or riser, and check the slot's bifurcation in firmware",
        );
    }
    if let (Some(now), Some(max)) = (link.generation, link.max_generation)
        && now < max
    {
        findings.note(
            format!("{name}: its link runs at generation {now} of {max} now; GPUs slow it down while idle"),
            "look again while a transfer runs (`maru bench`); if it stays, check the slot and ASPM in firmware",
        );
    }
    if let Some(port) = &link.limited_by {
        findings.warning(
            format!(
                "{name}: the port {} above it carries {} GB/s, the GPU's own link {best} GB/s",
                port.pci, port.max_gbps
            ),
            "move the GPU to a slot as fast as its link",
        );
    }
}

fn try_it(gpu: &mut Gpu, roots: &Roots, config: Option<&Config>, findings: &mut Findings) {
    let name = format!("cuda:{}", gpu.device);
    let ordinal = usize::try_from(gpu.device).unwrap_or(usize::MAX);
    let kernel = probe::kernel(ordinal);
    if let Some(reason) = &kernel.reason {
        findings.error(
            format!("{name}: the native kernel does not load: {reason}"),
            "the native kernel needs a driver of 525 or later and compute capability 7.0 or later; until then use \
             backend = \"fallback\"",
        );
    }
    gpu.native_kernel = Some(kernel);
    let registration = probe::registration(ordinal, &roots.dev.join("shm"), probe::PROBE_BYTES);
    if let Some(reason) = &registration.reason {
        let wanted = config.is_none_or(|c| c.cxl.register);
        let text = format!(
            "{name}: registering {} bytes of {} failed: {reason}",
            registration.bytes, registration.memory
        );
        let remedy = "slabs are then moved by the slower fallback; raise the locked-memory limit, and see dmesg for the \
                      driver's reason";
        if wanted { findings.warning(text, remedy) } else { findings.note(text, remedy) }
    }
    gpu.registration = Some(registration);
}
