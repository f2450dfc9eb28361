//! `[transfer]`: which mover, and how it works.

use serde::Serialize;

use super::choice::{BackendChoice, ChecksumKind, DeviceChoice, MAX_ORDINAL, StrategyChoice};
use super::error::ConfigError;
use super::limit::Limit;
use super::node::Sources;
use super::section::Section;
use super::warning::Warning;

/// Section `[transfer]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransferConfig {
    /// Which mover to use. Default `auto`.
    pub backend: BackendChoice,
    /// Where the paged cache lives. Default `auto`.
    pub device: DeviceChoice,
    /// How the native backend moves bytes. Default `auto`.
    pub strategy: StrategyChoice,
    /// Tokens in a full chunk, 1 to 1048576. Default 256.
    pub kv_chunk_tokens: u32,
    /// Most thread blocks a direct launch may occupy at once, 1 to 1024. Default 4.
    pub sm_budget: u32,
    /// Bytes of the staged strategy's device ring, 4 KiB to 64 GiB; 0 disables that strategy.
    /// Default 128 MiB.
    pub staging_bytes: u64,
    /// Threads of the host mover, up to 1024; 0 = as many as help. Default 0.
    pub host_threads: u32,
    /// Whether to measure once per device and driver for `strategy = "auto"`. Default true.
    pub calibrate: bool,
    /// The checksum a published slab carries. Default none.
    pub checksum: ChecksumKind,
    /// The single-layer variant of loads; needs the native backend. Default false.
    pub enable_fused_load: bool,
}

impl Default for TransferConfig {
    fn default() -> Self {
        TransferConfig {
            backend: BackendChoice::Auto,
            device: DeviceChoice::Auto,
            strategy: StrategyChoice::Auto,
            kv_chunk_tokens: 256,
            sm_budget: 4,
            staging_bytes: 128 << 20,
            host_threads: 0,
            calibrate: true,
            checksum: ChecksumKind::None,
            enable_fused_load: false,
        }
    }
}

pub(super) const NATIVE_TOGGLE: &str = "maru_use_native_kernels";
pub(super) const OLD_TOGGLE: &str = "maru_use_lmcache_kernels";

pub(super) const KEYS: &[&str] = &[
    "backend",
    "device",
    "strategy",
    "kv_chunk_tokens",
    "sm_budget",
    "staging_bytes",
    "host_threads",
    "calibrate",
    "checksum",
    "enable_fused_load",
    NATIVE_TOGGLE,
    OLD_TOGGLE,
];

const KV_CHUNK_TOKENS: Limit = Limit::count(1, 1 << 20);
const SM_BUDGET: Limit = Limit::count(1, 1024);
const STAGING_BYTES: Limit = Limit::bytes(4 << 10, 64 << 30).or_zero("no staged strategy");
pub(super) const THREADS: Limit = Limit::count(1, 1024).or_zero("automatic");

impl TransferConfig {
    pub(super) fn read(
        mut section: Section,
        sources: &mut Sources,
        warnings: &mut Vec<Warning>,
    ) -> Result<Self, ConfigError> {
        let default = TransferConfig::default();
        let s = &mut section;
        let explicit = s.word("backend", sources)?;
        let config = TransferConfig {
            backend: default.backend,
            device: s.word("device", sources)?.unwrap_or(default.device),
            strategy: s.word("strategy", sources)?.unwrap_or(default.strategy),
            kv_chunk_tokens: s
                .count("kv_chunk_tokens", KV_CHUNK_TOKENS, sources)?
                .unwrap_or(default.kv_chunk_tokens),
            sm_budget: s.count("sm_budget", SM_BUDGET, sources)?.unwrap_or(default.sm_budget),
            staging_bytes: s.size("staging_bytes", STAGING_BYTES, sources)?.unwrap_or(default.staging_bytes),
            host_threads: s.count("host_threads", THREADS, sources)?.unwrap_or(default.host_threads),
            calibrate: s.boolean("calibrate", sources)?.unwrap_or(default.calibrate),
            checksum: s.word("checksum", sources)?.unwrap_or(default.checksum),
            enable_fused_load: s.boolean("enable_fused_load", sources)?.unwrap_or(default.enable_fused_load),
        };
        let native = s.boolean(NATIVE_TOGGLE, sources)?;
        let old = s.boolean(OLD_TOGGLE, sources)?;
        section.finish(sources)?;

        if old.is_some() {
            let mut warning = (super::Location::default(), format!("transfer.{OLD_TOGGLE}"));
            sources.locate(&mut warning.0, &mut warning.1);
            warnings.push(Warning::DeprecatedKey {
                at: warning.0,
                key: warning.1,
                replacement: NATIVE_TOGGLE.to_owned(),
            });
        }
        let backend = resolve_backend(explicit, native, old).map_err(|error| error.located(sources))?;
        Ok(TransferConfig { backend, ..config })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let count = |key, value, limit: Limit| limit.check(key, u64::from(value));
        if let DeviceChoice::Cuda(ordinal) = self.device
            && ordinal > MAX_ORDINAL
        {
            return Err(ConfigError::invalid(
                "transfer.device",
                format!("\"{}\"", self.device),
                <DeviceChoice as super::choice::Words>::ALLOWED,
            ));
        }
        count("transfer.kv_chunk_tokens", self.kv_chunk_tokens, KV_CHUNK_TOKENS)?;
        count("transfer.sm_budget", self.sm_budget, SM_BUDGET)?;
        STAGING_BYTES.check("transfer.staging_bytes", self.staging_bytes)?;
        count("transfer.host_threads", self.host_threads, THREADS)?;
        if self.strategy == StrategyChoice::Staged && self.staging_bytes == 0 {
            return Err(ConfigError::contradiction(
                "transfer.strategy",
                "transfer.staging_bytes",
                "\"staged\" needs a device ring and 0 bytes disables it; give it bytes or choose \
                 another strategy",
            ));
        }
        Ok(())
    }

    /// Switches off what the fallback cannot do, saying so.
    pub(super) fn settle(&mut self, warnings: &mut Vec<Warning>) {
        if self.backend != BackendChoice::Fallback {
            return;
        }
        if self.enable_fused_load {
            self.enable_fused_load = false;
            warnings.push(Warning::FusedLoadDisabled {
                because: "the configuration chooses the fallback".to_owned(),
            });
        }
        if self.strategy != StrategyChoice::Auto {
            let ignored = Warning::StrategyIgnored { strategy: self.strategy };
            if !warnings.contains(&ignored) {
                warnings.push(ignored);
            }
        }
    }
}

/// `true` means `auto` and contradicts only `fallback`; `false` means `fallback` and contradicts
/// only `native`; the two toggles contradict each other when they differ.
fn resolve_backend(
    explicit: Option<BackendChoice>,
    native: Option<bool>,
    old: Option<bool>,
) -> Result<BackendChoice, ConfigError> {
    let key = |name: &str| format!("transfer.{name}");
    let (name, toggle) = match (native, old) {
        (Some(new), Some(old)) if new != old => {
            return Err(ConfigError::contradiction(
                &key(NATIVE_TOGGLE),
                &key(OLD_TOGGLE),
                format!("{new} and {old}; they are two names of one switch, keep {NATIVE_TOGGLE} only"),
            ));
        }
        (Some(toggle), _) => (NATIVE_TOGGLE, toggle),
        (None, Some(toggle)) => (OLD_TOGGLE, toggle),
        (None, None) => return Ok(explicit.unwrap_or(BackendChoice::Auto)),
    };
    match (explicit, toggle) {
        (Some(BackendChoice::Fallback), true) => Err(ConfigError::contradiction(
            &key(name),
            &key("backend"),
            "true asks for the native kernels, \"fallback\" never loads them; remove one",
        )),
        (Some(BackendChoice::Native), false) => Err(ConfigError::contradiction(
            &key(name),
            &key("backend"),
            "false never loads the native kernels, \"native\" demands them; remove one",
        )),
        (Some(explicit), true) => Ok(explicit),
        (None, true) => Ok(BackendChoice::Auto),
        (_, false) => Ok(BackendChoice::Fallback),
    }
}
