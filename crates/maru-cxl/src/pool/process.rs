//! Recognising the process that created or holds a pool.

use std::fs;

use crate::directory::Creator;

/// What is known of a process named in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It runs on this machine.
    Alive,
    /// It ran during this boot of this machine and has ended.
    Dead,
    /// It ran on another machine, in another container, or before a reboot.
    Unknown,
}

impl Liveness {
    /// In words, to finish "the process ...".
    pub fn describe(self) -> &'static str {
        match self {
            Self::Alive => "which is alive",
            Self::Dead => "which has ended",
            Self::Unknown => "on another host or before a reboot",
        }
    }
}

/// This process.
pub(crate) fn current() -> Creator {
    let pid = std::process::id();
    Creator { pid, start_ticks: start_ticks(pid).unwrap_or(0), boot_id: boot_id().unwrap_or([0; 16]) }
}

/// Whether the process is still there. A process id that was given to another process does not count.
pub(crate) fn liveness(creator: &Creator) -> Liveness {
    match boot_id() {
        Some(boot) if boot == creator.boot_id => {}
        _ => return Liveness::Unknown,
    }
    match start_ticks(creator.pid) {
        Some(ticks) if ticks == creator.start_ticks => Liveness::Alive,
        _ => Liveness::Dead,
    }
}

/// Field 22 of /proc/PID/stat. The name in field 2 may hold spaces and parentheses, so counting begins after it.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = stat.rsplit_once(')')?.1;
    after_name.split_whitespace().nth(19)?.parse().ok()
}

fn boot_id() -> Option<[u8; 16]> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
    Some(u128::from_str_radix(&digits, 16).ok()?.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_alive_and_its_id_with_another_start_is_not() {
        let me = current();
        assert_eq!(liveness(&me), Liveness::Alive);
        assert_eq!(liveness(&Creator { start_ticks: me.start_ticks + 1, ..me }), Liveness::Dead);
        assert_eq!(liveness(&Creator { boot_id: [1; 16], ..me }), Liveness::Unknown);
    }
}
