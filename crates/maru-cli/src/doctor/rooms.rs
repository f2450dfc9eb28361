//! Places for pools that are files: how much room, and can CUDA register what is mapped there.

use std::path::Path;

use serde::Serialize;

use crate::doctor::{Findings, Roots};

/// A directory that a pool's file can be made in.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Room {
    pub(crate) path: String,
    pub(crate) file_system: Option<String>,
    pub(crate) size: Option<u64>,
    pub(crate) free: Option<u64>,
    /// Whether CUDA can register mappings of files there.
    pub(crate) registrable: Option<bool>,
}

/// What `maru p2p` needs with its defaults: 1024 tokens of Llama 3.1 8B.
const LEAST: u64 = 160 << 20;

pub(crate) fn look(roots: &Roots, findings: &mut Findings) -> Vec<Room> {
    let shm = room(&roots.dev.join("shm"));
    let temporary = room(&std::env::temp_dir());
    match (shm.free, shm.registrable) {
        (None, _) => findings.warning(
            format!("{} cannot be used: pools that are files go to {}", shm.path, temporary.path),
            "mount a tmpfs there; only tmpfs, hugetlbfs and device-dax can be registered with CUDA",
        ),
        (Some(_), Some(false)) => findings.warning(
            format!(
                "{} is on {}, which CUDA cannot register",
                shm.path,
                shm.file_system.as_deref().unwrap_or("an unknown file system")
            ),
            "mount a tmpfs there",
        ),
        (Some(free), _) if free < LEAST => findings.warning(
            format!("{} has {free} bytes free; the default run of `maru p2p` needs {LEAST}", shm.path),
            "make it larger (`mount -o remount,size=8G /dev/shm`; for a container --shm-size=8g), or use fewer --tokens",
        ),
        _ => {}
    }
    vec![shm, temporary]
}

fn room(path: &Path) -> Room {
    let none = Room {
        path: path.display().to_string(),
        file_system: None,
        size: None,
        free: None,
        registrable: None,
    };
    let (Ok(stat), Ok(kind)) = (rustix::fs::statvfs(path), rustix::fs::statfs(path)) else {
        return none;
    };
    let (name, registrable) = file_system(kind.f_type);
    Room {
        file_system: Some(name.map_or_else(|| format!("{:#x}", kind.f_type), str::to_owned)),
        size: stat.f_blocks.checked_mul(stat.f_frsize),
        free: stat.f_bavail.checked_mul(stat.f_frsize),
        registrable,
        ..none
    }
}

/// Name of a file system by its magic number (statfs(2)), and whether CUDA registers mappings of its files.
pub(crate) fn file_system(magic: i64) -> (Option<&'static str>, Option<bool>) {
    match magic {
        0x0102_1994 => (Some("tmpfs"), Some(true)),
        0x9584_58f6 => (Some("hugetlbfs"), Some(true)),
        0xef53 => (Some("ext2/3/4"), Some(false)),
        0x5846_5342 => (Some("xfs"), Some(false)),
        0x9123_683e => (Some("btrfs"), Some(false)),
        0x794c_7630 => (Some("overlayfs"), Some(false)),
        0x6969 => (Some("nfs"), Some(false)),
        0x2fc1_2fc1 => (Some("zfs"), Some(false)),
        0x6573_5546 => (Some("fuse"), Some(false)),
        0x0102_1997 => (Some("9p"), Some(false)),
        _ => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roots(dev: &Path) -> Roots {
        Roots { sys: "/nowhere".into(), dev: dev.into(), proc: "/nowhere".into() }
    }

    #[test]
    fn a_missing_shm_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let mut findings = Findings::default();
        let rooms = look(&roots(dir.path()), &mut findings);
        assert_eq!((rooms[0].free, rooms[0].registrable), (None, None));
        assert!(rooms[1].free.is_some());
        let found = findings.sorted();
        assert!(found[0].what.contains("/shm cannot be used"), "{found:?}");
    }

    #[test]
    fn tmpfs_can_be_registered_and_disks_cannot() {
        assert_eq!(file_system(0x0102_1994), (Some("tmpfs"), Some(true)));
        assert_eq!(file_system(0xef53).1, Some(false));
        assert_eq!(file_system(1), (None, None));
    }
}
