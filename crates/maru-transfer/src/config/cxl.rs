//! `[cxl]` and `[[cxl.pool]]`: which memory, and how it is mapped.

use std::path::PathBuf;

use serde::Serialize;

use super::choice::CoherenceKind;
use super::error::ConfigError;
use super::index::writable_path;
use super::limit::Limit;
use super::node::{Node, Sources, Value, quoted};
use super::section::{Section, wrong_type};
use super::size::{SIZE_MAX, human};
use super::transfer::THREADS;

/// Section `[cxl]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CxlConfig {
    /// Whether pages are touched at `open` rather than by the first transfer. Default true.
    pub prefault: bool,
    /// Threads that touch them, up to 1024; 0 = automatic. Default 0.
    pub prefault_threads: u32,
    /// Whether regions are registered with CUDA. Default true.
    pub register: bool,
    /// Whether failure to register is an error rather than an unregistered region. Default
    /// false.
    pub require_registration: bool,
    /// Upper limit of one registration call in bytes, 2 MiB to just under 512 GiB. Default
    /// 64 GiB.
    pub register_piece: u64,
    /// What keeps CPU caches and the device in step. Default none.
    pub coherence: CoherenceKind,
    /// The pools, `[[cxl.pool]]` in the file, 0 to 1024 of them. Default none.
    #[serde(rename = "pool")]
    pub pools: Vec<PoolConfig>,
}

impl Default for CxlConfig {
    fn default() -> Self {
        CxlConfig {
            prefault: true,
            prefault_threads: 0,
            register: true,
            require_registration: false,
            register_piece: 64 << 30,
            coherence: CoherenceKind::None,
            pools: Vec::new(),
        }
    }
}

/// One entry of `[[cxl.pool]]`: a byte range of a device or file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PoolConfig {
    /// The dax device, or a regular file. Has no default.
    pub path: PathBuf,
    /// First byte. Default 0. Whether it is aligned well enough only the device can say.
    pub offset: u64,
    /// Bytes, at least 4096; 0 = all of the device from `offset` on. Default 4 GiB.
    pub size: u64,
}

impl PoolConfig {
    /// A pool of the default size at the start of `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        PoolConfig { path: path.into(), offset: 0, size: 4 << 30 }
    }

    /// The same pool at another first byte.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// The same pool with another number of bytes; 0 = all of the device.
    #[must_use]
    pub fn with_size(mut self, size: u64) -> Self {
        self.size = size;
        self
    }
}

pub(super) const KEYS: &[&str] = &[
    "prefault",
    "prefault_threads",
    "register",
    "require_registration",
    "register_piece",
    "coherence",
    "pool",
];
pub(super) const POOL_KEYS: &[&str] = &["path", "offset", "size"];

const REGISTER_PIECE: Limit = Limit::bytes(2 << 20, (512 << 30) - 1);
const OFFSET: Limit = Limit::bytes(0, SIZE_MAX);
const SIZE: Limit = Limit::bytes(4096, SIZE_MAX).or_zero("all of the device");
const MAX_POOLS: usize = 1024;
const POOLS_ALLOWED: &str = "an array of tables, [[cxl.pool]], of at most 1024";
const PATH_ALLOWED: &str = "text: the path of a dax device such as /dev/dax0.0, or of a file";

impl CxlConfig {
    pub(super) fn read(mut section: Section, sources: &mut Sources) -> Result<Self, ConfigError> {
        let default = CxlConfig::default();
        let s = &mut section;
        let pools = s.take("pool", sources);
        let config = CxlConfig {
            prefault: s.boolean("prefault", sources)?.unwrap_or(default.prefault),
            prefault_threads: s
                .count("prefault_threads", THREADS, sources)?
                .unwrap_or(default.prefault_threads),
            register: s.boolean("register", sources)?.unwrap_or(default.register),
            require_registration: s
                .boolean("require_registration", sources)?
                .unwrap_or(default.require_registration),
            register_piece: s
                .size("register_piece", REGISTER_PIECE, sources)?
                .unwrap_or(default.register_piece),
            coherence: s.word("coherence", sources)?.unwrap_or(default.coherence),
            pools: Vec::new(),
        };
        section.finish(sources)?;
        let pools = match pools {
            None => Vec::new(),
            Some(node) => read_pools(node, sources)?,
        };
        Ok(CxlConfig { pools, ..config })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        THREADS.check("cxl.prefault_threads", u64::from(self.prefault_threads))?;
        REGISTER_PIECE.check("cxl.register_piece", self.register_piece)?;
        if self.require_registration && !self.register {
            return Err(ConfigError::contradiction(
                "cxl.require_registration",
                "cxl.register",
                "registration cannot be both required (true) and switched off (false)",
            ));
        }
        if self.pools.len() > MAX_POOLS {
            return Err(ConfigError::invalid(
                "cxl.pool",
                format!("{} pools", self.pools.len()),
                POOLS_ALLOWED,
            ));
        }
        let mut extents = Vec::with_capacity(self.pools.len());
        for (i, pool) in self.pools.iter().enumerate() {
            let extent = Extent::of(i, pool)?;
            for (j, earlier) in extents.iter().enumerate() {
                extent.refuse_overlap(earlier, j)?;
            }
            extents.push(extent);
        }
        Ok(())
    }
}

fn read_pools(node: Node, sources: &mut Sources) -> Result<Vec<PoolConfig>, ConfigError> {
    let Value::Array(items) = node.value else {
        return Err(wrong_type(&node, POOLS_ALLOWED, sources));
    };
    items
        .into_iter()
        .enumerate()
        .map(|(i, item)| {
            let canonical = format!("cxl.pool[{i}]");
            let allowed = "a table with path, offset and size";
            let mut section = Section::new(item, &canonical, allowed, sources)?;
            let path = section.text("path", PATH_ALLOWED, sources)?;
            let offset = section.size("offset", OFFSET, sources)?;
            let size = section.size("size", SIZE, sources)?;
            let done = section.finish(sources)?;
            let Some(path) = path else {
                return Err(done.missing("path", PATH_ALLOWED, sources));
            };
            let default = PoolConfig::new(path);
            Ok(PoolConfig {
                offset: offset.unwrap_or(default.offset),
                size: size.unwrap_or(default.size),
                ..default
            })
        })
        .collect()
}

/// A pool's bytes on its device, for comparing with the other pools'.
struct Extent {
    index: usize,
    path: String,
    start: u64,
    /// `None`: to the end of the device, wherever that is.
    end: Option<u64>,
}

impl Extent {
    fn of(index: usize, pool: &PoolConfig) -> Result<Self, ConfigError> {
        let key = |name: &str| format!("cxl.pool[{index}].{name}");
        let text = writable_path(&key("path"), &pool.path, PATH_ALLOWED)?;
        if text.is_empty() {
            return Err(ConfigError::invalid(key("path"), "\"\"", PATH_ALLOWED));
        }
        OFFSET.check(&key("offset"), pool.offset)?;
        SIZE.check(&key("size"), pool.size)?;
        let end = pool.offset.checked_add(pool.size);
        if end.is_none_or(|end| end > SIZE_MAX) {
            return Err(ConfigError::invalid(
                key("size"),
                format!("{} from offset {} on", human(pool.size), human(pool.offset)),
                "offset + size of at most 2^63 - 1 bytes",
            ));
        }
        Ok(Extent { index, path: normalised(text), start: pool.offset, end: end.filter(|_| pool.size != 0) })
    }

    fn refuse_overlap(&self, earlier: &Extent, earlier_index: usize) -> Result<(), ConfigError> {
        let starts_before_end = |a: &Extent, b: &Extent| b.end.is_none_or(|end| a.start < end);
        if self.path != earlier.path || !starts_before_end(self, earlier) || !starts_before_end(earlier, self)
        {
            return Ok(());
        }
        Err(ConfigError::OverlappingPools {
            at: super::Location::default(),
            first: format!("cxl.pool[{earlier_index}]"),
            second: format!("cxl.pool[{}]", self.index),
            detail: format!("{}: bytes {} and {}", quoted(&self.path), earlier.range(), self.range()),
        })
    }

    fn range(&self) -> String {
        match self.end {
            Some(end) => format!("{}..{end}", self.start),
            None => format!("{}.. to the end of the device", self.start),
        }
    }
}

/// The path without `.`, `..`, doubled and trailing slashes, as text only: nothing is opened, so
/// links are not followed. (Two names of one device are found out when the pools are opened.)
pub(super) fn normalised(path: &str) -> String {
    let absolute = path.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => match parts.last() {
                Some(&last) if last != ".." => {
                    parts.pop();
                }
                // There is nothing above the root, and above a relative path anything.
                _ if absolute => {}
                _ => parts.push(".."),
            },
            name => parts.push(name),
        }
    }
    let joined = parts.join("/");
    match (absolute, joined.is_empty()) {
        (true, _) => format!("/{joined}"),
        (false, true) => ".".to_owned(),
        (false, false) => joined,
    }
}

#[cfg(test)]
mod tests {
    use super::normalised;

    #[test]
    fn paths_are_normalised_as_text() {
        for (path, normal) in [
            ("/dev/dax0.0", "/dev/dax0.0"),
            ("//dev///dax0.0/", "/dev/dax0.0"),
            ("/dev/./x/../dax0.0", "/dev/dax0.0"),
            ("/../dev/dax0.0", "/dev/dax0.0"),
            ("/", "/"),
            ("pool", "pool"),
            ("./pool", "pool"),
            ("a/..", "."),
            ("../a/../../b", "../../b"),
        ] {
            assert_eq!(normalised(path), normal, "{path}");
        }
    }
}
