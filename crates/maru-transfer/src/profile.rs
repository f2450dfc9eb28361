//! Shapes of well-known models' KV caches, for benches, tests and the command line.
//!
//! A profile describes what one rank of an engine holds: so many layers of so many KV heads of
//! one width (or one latent row per token, under MLA), in one dtype and block size. The built-in
//! ones live in `config/profiles/*.toml` and name the published model configuration they come
//! from; more can be read from files with the same keys.
//!
//! Every layer of a profile has the same shape. A model with alternating sliding-window layers
//! (gpt-oss) has that too: its windowed layers cache the same bytes per token, only for fewer
//! tokens. Its profile counts all layers as one cache, which is what an engine allocates when
//! it keeps the whole context for every layer (as vLLM does with its hybrid KV-cache manager
//! off), and says with `sliding_layers` and `sliding_window` how many of them could forget. An
//! engine that manages the two kinds as separate groups registers one cache per group.

use std::path::Path;
use std::sync::Arc;

use maru_layout::DType;

use crate::config::{ConfigError, Limit, Node, Section, Sources, quoted, read_file};

/// The KV-cache shape of one rank of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Profile {
    /// The profile's name, such as `qwen2.5-32b-tp8`.
    pub name: String,
    /// The published model it describes, such as `Qwen/Qwen2.5-32B-Instruct`.
    pub model: String,
    /// Ranks the KV heads are split over; `kv_heads` is what one of them holds.
    pub tensor_parallel: u32,
    /// Layers with a KV cache.
    pub layers: u32,
    /// KV heads on this rank; 1 under MLA.
    pub kv_heads: u32,
    /// Elements of one head, or of the whole latent row under MLA.
    pub head_size: u32,
    /// Whether each token has one latent row instead of a K and a V row.
    pub mla: bool,
    /// The element type of the cache.
    pub dtype: DType,
    /// Tokens in a block of the paged cache.
    pub block_size: u32,
    /// How many of `layers` attend only to a window; 0 = none.
    pub sliding_layers: u32,
    /// Tokens of that window; 0 = no such layers.
    pub sliding_window: u32,
}

macro_rules! builtin {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_str!(concat!("../../../config/profiles/", $name, ".toml")))),+]
    };
}

const BUILTIN: &[(&str, &str)] = builtin![
    "qwen2.5-32b",
    "qwen2.5-32b-tp8",
    "llama-3.1-8b",
    "llama-3.1-8b-fp8",
    "llama-3.1-70b-tp4",
    "llama-3.1-70b-tp8",
    "qwen3-235b-a22b-tp4",
    "deepseek-v3-mla",
    "gpt-oss-120b",
];

const LAYERS: Limit = Limit::count(1, 4096);
const HEADS: Limit = Limit::count(1, 4096);
const WIDTH: Limit = Limit::count(1, 1 << 16);
const BLOCK: Limit = Limit::count(1, 1 << 16);
const RANKS: Limit = Limit::count(1, 1024);
const WINDOW: Limit = Limit::count(0, 1 << 24);

impl Profile {
    /// The built-in profile of that name.
    ///
    /// # Errors
    /// [`ConfigError::UnknownProfile`], which lists the names there are.
    pub fn builtin(name: &str) -> Result<Profile, ConfigError> {
        match BUILTIN.iter().find(|(known, _)| *known == name) {
            Some((known, text)) => Profile::from_toml_str(text, &format!("profile {known}")),
            None => Err(ConfigError::UnknownProfile {
                name: name.to_owned(),
                known: Profile::names().collect::<Vec<_>>().join(", "),
            }),
        }
    }

    /// The names of the built-in profiles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// Reads a profile file of at most 1 MiB.
    ///
    /// # Errors
    /// [`ConfigError::Io`] if the file cannot be read, else as [`Profile::from_toml_str`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Profile, ConfigError> {
        let path = path.as_ref();
        Profile::from_toml_str(&read_file(path)?, &path.display().to_string())
    }

    /// Reads a profile from TOML text; `origin` is what errors call it.
    ///
    /// `name`, `layers`, `kv_heads`, `head_size`, `dtype` and `block_size` have no default.
    /// Under `mla = true`, `kv_heads` may be left out and can only be 1.
    ///
    /// # Errors
    /// [`ConfigError`] for unknown or missing keys, wrong types, values out of range, and
    /// contradictions.
    pub fn from_toml_str(text: &str, origin: &str) -> Result<Profile, ConfigError> {
        let sources = &mut Sources::new(Arc::from(origin));
        let root = Node::parse(text, &sources.origin)?;
        let mut s = Section::new(root, "", "a table", sources)?;
        let name_allowed = "text: a name";
        let name = s.text("name", name_allowed, sources)?;
        let model = s.text("model", "text: the published model", sources)?;
        let tensor_parallel = s.count("tensor_parallel", RANKS, sources)?;
        let layers = s.count("layers", LAYERS, sources)?;
        let kv_heads = s.count("kv_heads", HEADS, sources)?;
        let head_size = s.count("head_size", WIDTH, sources)?;
        let mla = s.boolean("mla", sources)?.unwrap_or(false);
        let dtype_allowed = dtype_names();
        let dtype = s.text("dtype", &dtype_allowed, sources)?;
        let block_size = s.count("block_size", BLOCK, sources)?;
        let sliding_layers = s.count("sliding_layers", WINDOW, sources)?.unwrap_or(0);
        let sliding_window = s.count("sliding_window", WINDOW, sources)?.unwrap_or(0);
        let done = s.finish(sources)?;

        let kv_heads = if mla && kv_heads.is_none() { Some(1) } else { kv_heads };
        let Some(dtype) = dtype else {
            return Err(done.missing("dtype", &dtype_allowed, sources));
        };
        let dtype: DType = dtype
            .parse()
            .map_err(|_| ConfigError::invalid("dtype", quoted(&dtype), dtype_allowed).located(sources))?;
        let need = |key: &str, value: Option<u32>, limit: Limit| {
            value.ok_or_else(|| done.missing(key, &limit.allowed(), sources))
        };
        let profile = Profile {
            name: name.ok_or_else(|| done.missing("name", name_allowed, sources))?,
            model: model.unwrap_or_default(),
            tensor_parallel: tensor_parallel.unwrap_or(1),
            layers: need("layers", layers, LAYERS)?,
            kv_heads: need("kv_heads", kv_heads, HEADS)?,
            head_size: need("head_size", head_size, WIDTH)?,
            mla,
            dtype,
            block_size: need("block_size", block_size, BLOCK)?,
            sliding_layers,
            sliding_window,
        };
        profile.check().map_err(|error| error.located(sources))?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), ConfigError> {
        if self.name.is_empty() {
            return Err(ConfigError::invalid("name", "\"\"", "text: a name"));
        }
        if self.mla && self.kv_heads != 1 {
            return Err(ConfigError::contradiction(
                "kv_heads",
                "mla",
                format!(
                    "{} and true; MLA keeps one latent row per token, give 1 or leave it out",
                    self.kv_heads
                ),
            ));
        }
        if self.sliding_layers > self.layers {
            return Err(ConfigError::contradiction(
                "sliding_layers",
                "layers",
                format!("{} of {} layers", self.sliding_layers, self.layers),
            ));
        }
        if (self.sliding_layers == 0) != (self.sliding_window == 0) {
            return Err(ConfigError::contradiction(
                "sliding_layers",
                "sliding_window",
                format!(
                    "{} layers with a window of {} tokens; give both or neither",
                    self.sliding_layers, self.sliding_window
                ),
            ));
        }
        Ok(())
    }

    /// Planes per layer: 2 (K and V), or 1 under MLA.
    #[must_use]
    pub fn kv_planes(&self) -> u32 {
        if self.mla { 1 } else { 2 }
    }

    /// Bytes of one token in a slab, all layers and planes.
    ///
    /// `None` if that overflows 64 bits, which no profile that was read does.
    #[must_use]
    pub fn token_bytes(&self) -> Option<u64> {
        u64::from(self.kv_planes())
            .checked_mul(u64::from(self.layers))?
            .checked_mul(u64::from(self.kv_heads))?
            .checked_mul(u64::from(self.head_size))?
            .checked_mul(self.dtype.size())
    }

    /// Bytes of a slab of `tokens` tokens; `None` as for [`Profile::token_bytes`].
    #[must_use]
    pub fn slab_bytes(&self, tokens: u64) -> Option<u64> {
        self.token_bytes()?.checked_mul(tokens)
    }
}

fn dtype_names() -> String {
    DType::ALL.map(|dtype| format!("\"{dtype}\"")).join(" | ")
}
