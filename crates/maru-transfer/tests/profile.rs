//! Model profiles: the built-in ones hold what the models publish, and files are checked.
#![allow(clippy::unwrap_used)]

use maru_layout::DType;
use maru_transfer::profile::Profile;

/// Name, layers, KV heads per rank, head or latent width, MLA, dtype, block size, ranks, bytes
/// of one token by hand.
type Row = (&'static str, u32, u32, u32, bool, &'static str, u32, u32, u64);

const BUILTIN: [Row; 9] = [
    ("qwen2.5-32b", 64, 8, 128, false, "bf16", 16, 1, 262_144),
    ("qwen2.5-32b-tp8", 64, 1, 128, false, "bf16", 16, 8, 32_768),
    ("llama-3.1-8b", 32, 8, 128, false, "bf16", 16, 1, 131_072),
    ("llama-3.1-8b-fp8", 32, 8, 128, false, "fp8_e4m3", 16, 1, 65_536),
    ("llama-3.1-70b-tp4", 80, 2, 128, false, "bf16", 16, 4, 81_920),
    ("llama-3.1-70b-tp8", 80, 1, 128, false, "bf16", 16, 8, 40_960),
    ("qwen3-235b-a22b-tp4", 94, 1, 128, false, "bf16", 16, 4, 48_128),
    ("deepseek-v3-mla", 61, 1, 576, true, "bf16", 64, 1, 70_272),
    ("gpt-oss-120b", 36, 8, 64, false, "bf16", 16, 1, 73_728),
];

#[test]
fn builtin_profiles_hold_the_published_shapes() {
    for (name, layers, heads, width, mla, dtype, block, ranks, token_bytes) in BUILTIN {
        let p = Profile::builtin(name).unwrap();
        assert_eq!(p.name, name);
        assert!(!p.model.is_empty(), "{name}");
        assert_eq!((p.layers, p.kv_heads, p.head_size), (layers, heads, width), "{name}");
        assert_eq!((p.mla, p.dtype.name()), (mla, dtype), "{name}");
        assert_eq!((p.block_size, p.tensor_parallel), (block, ranks), "{name}");
        assert_eq!(p.token_bytes(), Some(token_bytes), "{name}");
        assert_eq!(p.slab_bytes(256), Some(256 * token_bytes), "{name}");
    }
}

#[test]
fn names_are_all_and_only_the_files() {
    let mut names: Vec<String> = Profile::names().map(str::to_owned).collect();
    let mut files: Vec<String> =
        std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../config/profiles"))
            .unwrap()
            .map(|entry| {
                let name = entry.unwrap().file_name().into_string().unwrap();
                name.strip_suffix(".toml").unwrap().to_owned()
            })
            .collect();
    names.sort();
    files.sort();
    assert_eq!(names, files);
    assert_eq!(names.len(), BUILTIN.len());
}

#[test]
fn builtin_files_state_their_source() {
    for name in Profile::names() {
        let path = format!("{}/../../config/profiles/{name}.toml", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("# Source: config.json of "), "{name}");
        assert_eq!(Profile::from_file(&path).unwrap(), Profile::builtin(name).unwrap());
    }
}

#[test]
fn gpt_oss_counts_windowed_layers_in_one_cache() {
    let p = Profile::builtin("gpt-oss-120b").unwrap();
    assert_eq!((p.layers, p.sliding_layers, p.sliding_window), (36, 18, 128));
    assert_eq!(p.kv_planes(), 2);
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    for name in ["", "gpt-5", "llama-3.1-8B", "../maru"] {
        let error = Profile::builtin(name).unwrap_err();
        assert_eq!(error.kind(), "config");
        let message = error.to_string();
        assert!(message.contains(&format!("`{name}`")), "{message}");
        for known in Profile::names() {
            assert!(message.contains(known), "{message}");
        }
    }
}

const GOOD: &str = "name = \"x\"\nlayers = 2\nkv_heads = 3\nhead_size = 64\ndtype = \"f16\"\n\
                    block_size = 16\n";

#[test]
fn a_minimal_profile() {
    let p = Profile::from_toml_str(GOOD, "p.toml").unwrap();
    assert_eq!((p.tensor_parallel, p.mla, p.sliding_layers), (1, false, 0));
    assert_eq!(p.token_bytes(), Some(2 * 2 * 3 * 64 * 2));
}

#[test]
fn mla_has_one_head_and_one_plane() {
    let text = GOOD.replace("kv_heads = 3", "mla = true");
    let p = Profile::from_toml_str(&text, "p.toml").unwrap();
    assert_eq!((p.kv_heads, p.kv_planes()), (1, 1));
    let error = Profile::from_toml_str(&(GOOD.to_owned() + "mla = true"), "p.toml").unwrap_err();
    assert!(error.to_string().contains("`kv_heads` contradicts `mla`"), "{error}");
}

#[test]
fn every_dtype_name_is_accepted() {
    for dtype in DType::ALL {
        let text = GOOD.replace("f16", dtype.name());
        let p = Profile::from_toml_str(&text, "p.toml").unwrap();
        assert_eq!(p.dtype, dtype);
        assert_eq!(p.token_bytes(), Some(2 * 2 * 3 * 64 * dtype.size()), "{dtype}");
    }
}

#[test]
fn every_key_without_default_is_demanded() {
    for key in ["name", "layers", "kv_heads", "head_size", "dtype", "block_size"] {
        let text: String =
            GOOD.lines().filter(|line| !line.starts_with(key)).map(|line| format!("{line}\n")).collect();
        let message = Profile::from_toml_str(&text, "p.toml").unwrap_err().to_string();
        assert!(message.starts_with(&format!("p.toml: `{key}` is missing")), "{message}");
    }
}

#[test]
fn faults_name_key_line_and_file() {
    for (from, to, part) in [
        ("layers = 2", "layers = 0", "p.toml:2: `layers`: found the integer 0"),
        ("layers = 2", "layers = \"2\"", "p.toml:2: `layers` has the wrong type"),
        ("layers = 2", "layers = 4097", "from 1 to 4096"),
        ("layers = 2", "layers = -1", "from 1 to 4096"),
        ("layers = 2", "layers = 2\nlayer = 2", "p.toml:3: unknown key `layer`, did you mean"),
        ("kv_heads = 3", "kv_heads = 0", "p.toml:3: `kv_heads`"),
        ("head_size = 64", "head_size = 65537", "from 1 to 65536"),
        ("block_size = 16", "block_size = 0", "`block_size`"),
        ("block_size = 16", "block_size = 1.5", "wrong type"),
        ("\"f16\"", "\"fp16\"", "p.toml:5: `dtype`: found \"fp16\", allowed: \"f32\""),
        ("\"f16\"", "\"BF16\"", "\"bf16\""),
        ("\"x\"", "\"\"", "`name`"),
        ("name", "[profile]\nname", "unknown key `profile`"),
        ("layers = 2", "layers = 2\nsliding_layers = 1", "contradicts `sliding_window`"),
        ("layers = 2", "layers = 2\nsliding_window = 1", "contradicts `sliding_window`"),
        (
            "layers = 2",
            "layers = 2\nsliding_layers = 3\nsliding_window = 128",
            "p.toml:3: `sliding_layers` contradicts `layers`",
        ),
    ] {
        let text = GOOD.replacen(from, to, 1);
        assert_ne!(text, GOOD);
        let error = Profile::from_toml_str(&text, "p.toml").unwrap_err();
        assert_eq!(error.kind(), "config");
        assert!(error.to_string().contains(part), "{to}: {error}");
    }
}

#[test]
fn a_missing_file_is_an_io_error() {
    assert_eq!(Profile::from_file("/nonexistent/p.toml").unwrap_err().kind(), "io");
}
