//! The machine's root file system: an archive in the kernel's "newc" format, unpacked to memory at boot.

use std::fs;
use std::path::{Path, PathBuf};

use super::Outcome;
use super::build::Program;
use super::packages::Tools;

/// Shell lines that run one program and report how it ended.
pub(super) fn step(name: &str, command: &str) -> String {
    // Through a pipe: the console is a terminal, and nobody wants progress bars in a log.
    format!("echo 'DAXVM-BEGIN: {name}'\n({command}; echo \"DAXVM-END: {name} $?\") 2>&1 | cat\n")
}

/// Writes an image whose first process runs the steps and switches the machine off.
pub(super) fn write(
    work: &Path,
    name: &str,
    tools: &Tools,
    programs: &[Program],
    steps: &str,
) -> Outcome<PathBuf> {
    let mut archive = Archive::default();
    for dir in ["bin", "lib", "proc", "sys", "dev", "tmp"] {
        archive.directory(dir);
    }
    archive.program("bin/busybox", &fs::read(&tools.busybox)?);
    for program in programs {
        archive.program(&format!("bin/{}", program.name), &fs::read(&program.path)?);
    }
    let mut load = String::new();
    for module in &tools.modules {
        let file = module.file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
        archive.program(&format!("lib/{file}"), &fs::read(module)?);
        load.push_str(&format!("insmod /lib/{file}\n"));
    }
    archive.program("init", format!("{PROLOGUE}{load}{WAIT}{steps}{EPILOGUE}").as_bytes());
    let path = work.join(format!("{name}.img"));
    fs::write(&path, archive.finish())?;
    Ok(path)
}

const PROLOGUE: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp TMPDIR=/tmp RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
"#;

/// From kernel 6.3 on such memory is not given to `device_dax` unless it is named; naming it binds it.
const WAIT: &str = r#"
device=/sys/bus/dax/devices/dax0.0
tries=0
until [ -e $device ] || [ $tries -ge 100 ]; do sleep 0.1; tries=$((tries + 1)); done
[ -e $device/driver ] || echo dax0.0 > /sys/bus/dax/drivers/device_dax/new_id
tries=0
until [ -c /dev/dax0.0 ] || [ $tries -ge 100 ]; do sleep 0.1; tries=$((tries + 1)); done
export MARU_DAX_DEV=/dev/dax0.0 MARU_REQUIRE_DAX=1
echo "DAXVM-DEVICE: $(uname -r) $(ls -l /dev/dax0.0) size $(cat $device/size) align $(cat $device/align)"
"#;

const EPILOGUE: &str = r#"
dmesg | grep -E 'WARNING:|BUG:|Oops|bad pmd|use-after-free' | sed 's/^/DAXVM-KERNEL: /'
echo "DAXVM-DONE: $(cut -d' ' -f1 /proc/uptime)"
poweroff -f
"#;

/// A "newc" archive: per file a header of hexadecimal numbers, its name and its bytes, each padded to four.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    files: u32,
}

impl Archive {
    fn directory(&mut self, name: &str) {
        self.add(name, 0o040_755, &[]);
    }

    fn program(&mut self, name: &str, content: &[u8]) {
        self.add(name, 0o100_755, content);
    }

    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.files += 1;
        // inode, mode, uid, gid, links, time, size, device and its own number (four fields), name's length, check.
        let numbers =
            [self.files as usize, mode as usize, 0, 0, 1, 0, content.len(), 0, 0, 0, 0, name.len() + 1, 0];
        self.bytes.extend_from_slice(b"070701");
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_the_layout_the_kernel_reads() {
        let mut archive = Archive::default();
        archive.program("ab", b"xyz");
        let bytes = archive.finish();
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[14..22], b"000081ed", "a regular file, mode 0755");
        assert_eq!(&bytes[54..62], b"00000003", "its size");
        assert_eq!(&bytes[94..102], b"00000003", "its name with the zero");
        assert_eq!(&bytes[110..113], b"ab\0");
        assert_eq!(&bytes[116..120], b"xyz\0", "padded to four");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
