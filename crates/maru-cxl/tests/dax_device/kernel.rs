//! What the kernel does with a device-dax node. Each is a reason for one of the library's own checks; if a kernel
//! changes its mind, these fail and not a user's program.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

use maru_cxl::DaxDevice;

use crate::Case;

pub(crate) const CASES: &[Case] = &[
    ("kernel::the_node_is_a_character_device_of_size_0", node),
    ("kernel::an_empty_mapping_is_einval", empty),
    ("kernel::a_private_mapping_is_einval", private),
    ("kernel::a_misaligned_offset_is_einval", offset),
    ("kernel::a_misaligned_length_is_einval", length),
    ("kernel::a_mapping_past_the_end_is_accepted", past_the_end),
    ("kernel::populating_past_the_end_is_efault", populate_past_the_end),
    ("kernel::msync_is_einval", msync),
    ("kernel::read_is_einval", read),
];

/// A raw mapping, unmapped when dropped.
struct Raw {
    start: *mut libc::c_void,
    len: usize,
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the mapping made below, which nothing refers to any more.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

fn open(device: &DaxDevice) -> File {
    File::options().read(true).write(true).open(device.path()).unwrap()
}

fn mmap(device: &DaxDevice, offset: u64, len: u64, flags: libc::c_int) -> Result<Raw, i32> {
    let file = open(device);
    let (len, offset) = (usize::try_from(len).unwrap(), i64::try_from(offset).unwrap());
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice; nothing is replaced.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, file.as_raw_fd(), offset) };
    if start == libc::MAP_FAILED { Err(errno()) } else { Ok(Raw { start, len }) }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn refusal(device: &DaxDevice, offset: u64, len: u64, flags: libc::c_int) -> Option<i32> {
    mmap(device, offset, len, flags).err()
}

fn node(device: &DaxDevice) {
    let metadata = open(device).metadata().unwrap();
    assert!(metadata.file_type().is_char_device());
    assert_eq!(metadata.size(), 0);
}

fn empty(device: &DaxDevice) {
    assert_eq!(refusal(device, 0, 0, libc::MAP_SHARED), Some(libc::EINVAL));
}

fn private(device: &DaxDevice) {
    // Without NORESERVE a big one can be ENOMEM before it is looked at.
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    assert_eq!(refusal(device, 0, device.align(), flags), Some(libc::EINVAL));
}

fn offset(device: &DaxDevice) {
    assert_eq!(refusal(device, 100, device.align(), libc::MAP_SHARED), Some(libc::EINVAL));
    if device.align() > 4096 {
        assert_eq!(refusal(device, 4096, device.align(), libc::MAP_SHARED), Some(libc::EINVAL));
    }
}

fn length(device: &DaxDevice) {
    if device.align() > 4096 {
        assert_eq!(refusal(device, 0, 4096, libc::MAP_SHARED), Some(libc::EINVAL));
        assert_eq!(refusal(device, 0, device.align() + 4096, libc::MAP_SHARED), Some(libc::EINVAL));
    }
}

fn past_the_end(device: &DaxDevice) {
    assert_eq!(refusal(device, 0, device.len() + device.align(), libc::MAP_SHARED), None);
}

fn populate_past_the_end(device: &DaxDevice) {
    let map = mmap(device, 0, device.len() + device.align(), libc::MAP_SHARED).unwrap();
    let beyond = map.start.wrapping_byte_add(usize::try_from(device.len()).unwrap());
    let align = usize::try_from(device.align()).unwrap();
    // SAFETY: the last unit of the mapping; populating changes no byte.
    let result = unsafe { libc::madvise(beyond, align, libc::MADV_POPULATE_WRITE) };
    assert_eq!((result, errno()), (-1, libc::EFAULT));
}

fn msync(device: &DaxDevice) {
    let map = mmap(device, 0, device.align(), libc::MAP_SHARED).unwrap();
    // SAFETY: a live mapping.
    let result = unsafe { libc::msync(map.start, map.len, libc::MS_SYNC) };
    assert_eq!((result, errno()), (-1, libc::EINVAL), "durability and visibility are by cache flush only");
}

fn read(device: &DaxDevice) {
    use std::io::Read as _;
    let error = open(device).read(&mut [0; 32]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "the header can be read through a mapping only");
}
