//! Configurations that are refused, and what the error says.
#![allow(clippy::unwrap_used)]

use maru_transfer::config::{Config, ConfigError, DeviceChoice, PoolConfig};

fn refuse(text: &str) -> ConfigError {
    match Config::from_toml_str(text, "maru.toml") {
        Err(error) => {
            assert_eq!(error.kind(), "config");
            error
        }
        Ok(config) => panic!("accepted as {config:?}:\n{text}"),
    }
}

/// Every part must be in the message.
fn says(text: &str, parts: &[&str]) {
    let message = refuse(text).to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}\n{text}");
    }
}

#[test]
fn c11_misspelt_cxl_key() {
    let error = refuse("[cxl]\nprefault_threads = 2\nprefalt = true\n");
    assert!(matches!(&error, ConfigError::UnknownKey { key, .. } if key == "cxl.prefalt"));
    assert_eq!(error.location().unwrap().line(), Some(3));
    assert_eq!(
        error.to_string(),
        "maru.toml:3: unknown key `cxl.prefalt`, did you mean `prefault`?; known here: pool, \
         prefault, prefault_threads, register, require_registration, register_piece, coherence"
    );
}

#[test]
fn c11_key_of_another_section() {
    says(
        "[transfer]\nbackend = \"auto\"\npath = \"/dev/dax0.0\"\n",
        &["maru.toml:3:", "`transfer.path`", "belongs in [[cxl.pool]] or [index]"],
    );
    says("kv_chunk_tokens = 256", &["`kv_chunk_tokens`", "belongs in [transfer]"]);
    says("[cxl]\nsm_budget = 4", &["`cxl.sm_budget`", "belongs in [transfer]"]);
}

#[test]
fn c11_misspelt_top_level_key() {
    says("chunk_sise = 256\n", &["maru.toml:1:", "`chunk_sise`", "transfer, cxl, index"]);
}

#[test]
fn c11_pool_without_path() {
    let error = refuse("[cxl]\nprefault = true\n[[cxl.pool]]\nsize = \"1GiB\"\n");
    assert!(matches!(&error, ConfigError::MissingKey { key, .. } if key == "cxl.pool[0].path"));
    says(
        "[[cxl.pool]]\npath = \"a\"\n[[cxl.pool]]\nsize = \"1GiB\"\n",
        &["maru.toml:3:", "`cxl.pool[1].path` is missing"],
    );
    // A misspelt path is reported as itself.
    says("[[cxl.pool]]\npth = \"a\"", &["`cxl.pool[0].pth`", "did you mean `path`"]);
}

#[test]
fn unknown_keys_at_every_level() {
    for (text, key) in [
        ("[transfr]", "transfr"),
        ("[transfer]\nbackends = \"auto\"", "transfer.backends"),
        ("[transfer.backend2]", "transfer.backend2"),
        ("[transfer]\nBackend = \"auto\"", "transfer.Backend"),
        ("[transfer]\nmaru_backend = \"auto\"", "transfer.maru_backend"),
        ("maru_backend = \"auto\"", "maru_backend"),
        ("maru_use_native_kernels = true", "maru_use_native_kernels"),
        ("maru_kernel_source = \"maru\"", "maru_kernel_source"),
        ("[cxl]\npools = []", "cxl.pools"),
        ("[cxl.pools]", "cxl.pools"),
        ("[[cxl.pool]]\npath = \"a\"\nlength = 4", "cxl.pool[0].length"),
        ("[index]\npaht = \"\"", "index.paht"),
        ("[index.path2.deeper]", "index.path2"),
        ("\"\" = 1", "\"\""),
        ("\"a b\" = 1", "\"a b\""),
    ] {
        let error = refuse(text);
        assert!(
            matches!(&error, ConfigError::UnknownKey { .. }) && error.key() == Some(key),
            "{text}: {error}"
        );
    }
}

#[test]
fn wrong_types() {
    for (text, key, found) in [
        ("transfer = 5", "transfer", "the integer 5"),
        ("[[transfer]]", "transfer", "an array"),
        ("cxl = true", "cxl", "the boolean true"),
        ("index = \"/tmp\"", "index", "the text \"/tmp\""),
        ("[transfer]\nbackend = true", "transfer.backend", "the boolean true"),
        ("[transfer.backend]\nkind = \"auto\"", "transfer.backend", "a table"),
        ("[transfer]\ndevice = 0", "transfer.device", "the integer 0"),
        ("[transfer]\nkv_chunk_tokens = \"256\"", "transfer.kv_chunk_tokens", "the text \"256\""),
        ("[transfer]\nkv_chunk_tokens = 256.0", "transfer.kv_chunk_tokens", "the float 256.0"),
        ("[transfer]\nsm_budget = [4]", "transfer.sm_budget", "an array"),
        ("[transfer]\nstaging_bytes = 1.5e6", "transfer.staging_bytes", "the float 1.5e6"),
        ("[transfer]\nstaging_bytes = true", "transfer.staging_bytes", "the boolean true"),
        ("[transfer]\ncalibrate = \"true\"", "transfer.calibrate", "the text \"true\""),
        ("[transfer]\ncalibrate = 1", "transfer.calibrate", "the integer 1"),
        (
            "[transfer]\nmaru_use_native_kernels = \"no\"",
            "transfer.maru_use_native_kernels",
            "the text \"no\"",
        ),
        ("[transfer]\nhost_threads = 1979-05-27", "transfer.host_threads", "the date or time"),
        ("[cxl]\npool = \"/dev/dax0.0\"", "cxl.pool", "the text"),
        ("[cxl.pool]\npath = \"a\"", "cxl.pool", "a table"),
        ("[cxl]\npool = [\"/dev/dax0.0\"]", "cxl.pool[0]", "the text"),
        ("[[cxl.pool]]\npath = 5", "cxl.pool[0].path", "the integer 5"),
        ("[[cxl.pool]]\npath = \"a\"\nsize = []", "cxl.pool[0].size", "an array"),
        ("[index]\npath = []", "index.path", "an array"),
    ] {
        let error = refuse(text);
        let ConfigError::WrongType { key: at, found: what, allowed, .. } = &error else {
            panic!("{text}: {error}");
        };
        assert_eq!(at, key, "{text}");
        assert!(what.starts_with(found), "{text}: {what}");
        assert!(!allowed.is_empty(), "{text}");
    }
}

#[test]
fn words_that_are_not_in_the_vocabulary() {
    for (text, allowed) in [
        ("[transfer]\nbackend = \"cuda\"", "\"auto\" | \"native\" | \"fallback\""),
        ("[transfer]\nbackend = \"Auto\"", "\"auto\""),
        ("[transfer]\nbackend = \"\"", "\"auto\""),
        ("[transfer]\nbackend = \" auto\"", "\"auto\""),
        ("[transfer]\nstrategy = \"fast\"", "\"auto\" | \"direct\" | \"staged\""),
        ("[transfer]\nchecksum = \"crc32\"", "\"none\" | \"xxh3\""),
        ("[cxl]\ncoherence = \"cxl3\"", "\"none\" | \"flush\""),
    ] {
        says(text, &[allowed, "maru.toml:2:"]);
    }
}

#[test]
fn devices_that_do_not_exist() {
    for device in [
        "",
        "cpu",
        "cuda",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:+1",
        "cuda:01",
        "cuda:00",
        "cuda: 0",
        "CUDA:0",
        "gpu:0",
        "cuda:1024",
        "cuda:4294967296",
        "cuda:0:1",
        "host ",
    ] {
        says(
            &format!("[transfer]\ndevice = \"{device}\""),
            &["`transfer.device`", &format!("found {device:?}"), "\"cuda:N\""],
        );
        assert!(device.parse::<DeviceChoice>().is_err());
    }
}

#[test]
fn numbers_out_of_range() {
    for (section, line, allowed) in [
        ("transfer", "kv_chunk_tokens = 0", "from 1 to 1048576"),
        ("transfer", "kv_chunk_tokens = -256", "from 1 to 1048576"),
        ("transfer", "kv_chunk_tokens = 1048577", "from 1 to 1048576"),
        ("transfer", "kv_chunk_tokens = 4294967552", "from 1 to 1048576"),
        ("transfer", "kv_chunk_tokens = 99999999999999999999", "from 1 to 1048576"),
        ("transfer", "sm_budget = 0", "from 1 to 1024"),
        ("transfer", "sm_budget = 1025", "from 1 to 1024"),
        ("transfer", "host_threads = -1", "0 (automatic), or an integer from 1 to 1024"),
        ("transfer", "host_threads = 1025", "from 1 to 1024"),
        ("cxl", "prefault_threads = 1025", "from 1 to 1024"),
        ("cxl", "prefault_threads = -1", "from 1 to 1024"),
    ] {
        let key = line.split(' ').next().unwrap();
        says(
            &format!("[{section}]\n{line}"),
            &["maru.toml:2:", &format!("`{section}.{key}`"), allowed, "found the integer"],
        );
    }
}

#[test]
fn sizes_out_of_range() {
    for (section, line, allowed) in [
        ("transfer", "staging_bytes = 1", "4096 (4 KiB)"),
        ("transfer", "staging_bytes = \"65GiB\"", "68719476736 (64 GiB)"),
        ("transfer", "staging_bytes = -1", "0 (no staged strategy)"),
        ("cxl", "register_piece = 0", "2097152 (2 MiB)"),
        ("cxl", "register_piece = \"1M\"", "2097152 (2 MiB)"),
        ("cxl", "register_piece = \"512GiB\"", "549755813887"),
        ("cxl", "register_piece = \"1T\"", "549755813887"),
    ] {
        let key = line.split(' ').next().unwrap();
        says(
            &format!("[{section}]\n{line}"),
            &["maru.toml:2:", &format!("`{section}.{key}`"), allowed, "found"],
        );
    }
}

#[test]
fn texts_that_are_no_size() {
    for (size, why) in [
        ("", "not a size"),
        ("G", "not a size"),
        ("4X", "not a size"),
        ("4 G B", "not a size"),
        (".5G", "not a size"),
        ("1e9", "not a size"),
        ("+4G", "not a size"),
        ("-4G", "negative"),
        ("0.3K", "not a whole number of bytes"),
        ("1.5", "not a whole number of bytes"),
        ("8E", "more than 2^63 - 1 bytes"),
        ("99999999999999999999G", "more than 2^63 - 1 bytes"),
    ] {
        says(
            &format!("[[cxl.pool]]\npath = \"a\"\nsize = \"{size}\""),
            &["maru.toml:3:", "`cxl.pool[0].size`", &format!("{size:?}"), why, "\"1.5GiB\""],
        );
    }
}

#[test]
fn pool_values_out_of_range() {
    for (line, key) in [
        ("size = -1", "cxl.pool[0].size"),
        ("size = 1", "cxl.pool[0].size"),
        ("size = 4095", "cxl.pool[0].size"),
        ("size = 9223372036854775808", "cxl.pool[0].size"),
        ("offset = -4096", "cxl.pool[0].offset"),
        ("offset = \"18446744073707454464\"\nsize = \"4M\"", "cxl.pool[0].offset"),
        ("offset = 9223372036854775807\nsize = 4096", "cxl.pool[0].size"),
        ("offset = \"7E\"\nsize = \"1E\"", "cxl.pool[0].size"),
    ] {
        let error = refuse(&format!("[[cxl.pool]]\npath = \"a\"\n{line}"));
        assert!(matches!(error, ConfigError::InvalidValue { .. }), "{line}: {error}");
        assert_eq!(error.key(), Some(key), "{line}: {error}");
        assert!(error.location().unwrap().line() >= Some(3), "{line}: {error}");
    }
}

#[test]
fn paths_nobody_can_open() {
    says("[[cxl.pool]]\npath = \"\"", &["`cxl.pool[0].path`", "found \"\""]);
    says("[[cxl.pool]]\npath = \"a\\u0000b\"", &["`cxl.pool[0].path`", "zero byte"]);
    says("[index]\npath = \"a\\u0000b\"", &["`index.path`", "zero byte"]);
}

#[test]
fn index_on_a_device_or_in_a_pool() {
    for path in ["/dev/dax0.0", "/dev/dax1.2", "//dev/./dax0.0", "/dev/dax0.0/x"] {
        says(&format!("[index]\npath = \"{path}\""), &["maru.toml:2:", "`index.path`", "/dev/dax"]);
    }
    says(
        "[[cxl.pool]]\npath = \"/tmp/pool\"\n[index]\npath = \"/tmp//pool\"",
        &["maru.toml:4:", "`index.path` contradicts `cxl.pool[0].path`"],
    );
}

#[test]
fn overlapping_pools() {
    let pool = |path: &str, offset: &str, size: &str| {
        format!("[[cxl.pool]]\npath = \"{path}\"\noffset = \"{offset}\"\nsize = \"{size}\"\n")
    };
    for (a, b) in [
        (("/dev/dax0.0", "0", "8M"), ("/dev/dax0.0", "4M", "8M")),
        (("/dev/dax0.0", "4M", "8M"), ("/dev/dax0.0", "0", "8M")),
        (("/dev/dax0.0", "0", "8M"), ("/dev/dax0.0", "0", "8M")),
        (("/dev/dax0.0", "0", "8M"), ("/dev/dax0.0", "2M", "2M")),
        (("/dev/dax0.0", "0", "8M"), ("/dev//dax0.0/", "0", "8M")),
        (("/dev/dax0.0", "0", "8M"), ("/dev/x/../dax0.0", "0", "8M")),
        (("pool", "0", "8M"), ("./pool", "0", "8M")),
        (("/dev/dax0.0", "0", "0"), ("/dev/dax0.0", "1T", "8M")),
        (("/dev/dax0.0", "1T", "8M"), ("/dev/dax0.0", "0", "0")),
        (("/dev/dax0.0", "0", "0"), ("/dev/dax0.0", "4M", "0")),
    ] {
        let text = pool(a.0, a.1, a.2) + &pool(b.0, b.1, b.2);
        let error = refuse(&text);
        assert!(
            matches!(&error, ConfigError::OverlappingPools { first, second, .. }
                if first == "cxl.pool[0]" && second == "cxl.pool[1]"),
            "{text}{error}"
        );
        assert_eq!(error.location().unwrap().line(), Some(5), "{error}");
    }
    // The pair that overlaps is named, among others that do not.
    let text =
        [pool("a", "0", "1M"), pool("b", "0", "1M"), pool("a", "1M", "1M"), pool("b", "512K", "1M")].concat();
    says(&text, &["`cxl.pool[1]` and `cxl.pool[3]` overlap", "\"b\"", "0..1048576", "524288..1572864"]);
}

#[test]
fn more_pools_than_anybody_has() {
    let text: String = (0..1025).map(|i| format!("[[cxl.pool]]\npath = \"p{i}\"\n")).collect();
    says(&text, &["`cxl.pool`", "1025 pools", "at most 1024"]);
}

#[test]
fn contradicting_keys() {
    for (text, first, other) in [
        ("maru_use_native_kernels = true\nbackend = \"fallback\"", "maru_use_native_kernels", "backend"),
        ("maru_use_native_kernels = false\nbackend = \"native\"", "maru_use_native_kernels", "backend"),
        ("maru_use_lmcache_kernels = true\nbackend = \"fallback\"", "maru_use_lmcache_kernels", "backend"),
        ("maru_use_lmcache_kernels = false\nbackend = \"native\"", "maru_use_lmcache_kernels", "backend"),
        (
            "maru_use_native_kernels = true\nmaru_use_lmcache_kernels = false",
            "maru_use_native_kernels",
            "maru_use_lmcache_kernels",
        ),
        (
            "maru_use_native_kernels = false\nmaru_use_lmcache_kernels = true",
            "maru_use_native_kernels",
            "maru_use_lmcache_kernels",
        ),
        ("strategy = \"staged\"\nstaging_bytes = 0", "strategy", "staging_bytes"),
    ] {
        let text = format!("[transfer]\n{text}");
        says(&text, &["maru.toml:2:", &format!("`transfer.{first}` contradicts `transfer.{other}`")]);
    }
    says(
        "[cxl]\nregister = false\nrequire_registration = true",
        &["maru.toml:3:", "`cxl.require_registration` contradicts `cxl.register`"],
    );
}

#[test]
fn text_that_is_not_toml() {
    for (text, line) in [
        ("[transfer", 1),
        ("backend", 1),
        ("[transfer]\nbackend = auto", 2),
        ("[transfer]\nbackend = \"auto\nx", 2),
        ("[transfer]\nstaging_bytes = 128MiB", 2),
        ("[transfer]\nsm_budget = 007", 2),
        ("[[cxl.pool]\npath = \"a\"", 1),
        ("\u{0}", 1),
    ] {
        let error = refuse(text);
        assert!(matches!(error, ConfigError::Syntax { .. }), "{text:?}: {error}");
        assert_eq!(error.location().unwrap().line(), Some(line), "{text:?}: {error}");
    }
}

#[test]
fn duplicate_keys() {
    for (text, line) in [
        ("[transfer]\nsm_budget = 4\nsm_budget = 4", 3),
        ("[transfer]\nsm_budget = 4\n[transfer]\ncalibrate = true", 3),
        ("[transfer]\nsm_budget = 4\n\"sm_budget\" = 5", 3),
        ("[cxl]\npool = []\n[[cxl.pool]]\npath = \"a\"", 3),
    ] {
        let error = refuse(text);
        assert!(error.to_string().contains("duplicate key"), "{text}: {error}");
        assert_eq!(error.location().unwrap().line(), Some(line), "{text}: {error}");
    }
}

#[test]
fn deep_nesting() {
    for text in [
        "[".repeat(100_000),
        format!("a = {}", "[".repeat(100_000)),
        format!("a = {}1", "{b = ".repeat(100_000)),
        format!("{}a = 1", "a.".repeat(100_000)),
        format!("[{}a]\n{}b = 1", "a.".repeat(70), "b.".repeat(70)),
        format!("transfer.backend.{}a = 1", "a.".repeat(70)),
    ] {
        refuse(&text);
    }
}

#[test]
fn long_values_are_cut_in_messages() {
    let long = "x".repeat(100_000);
    for text in [
        format!("{long} = 1"),
        format!("\"{long} \" = 1"),
        format!("[transfer]\nbackend = \"{long}\""),
        format!("[transfer]\nsm_budget = {}", "9".repeat(100_000)),
        format!("[[cxl.pool]]\npath = \"a\"\nsize = \"{}G\"", "9".repeat(100_000)),
    ] {
        let message = refuse(&text).to_string();
        assert!(message.len() < 600, "{} bytes: {}", message.len(), &message[..600]);
    }
}

#[test]
fn unreadable_files_are_io_errors() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().join("absent.toml"), dir.path().to_owned()] {
        let error = Config::from_file(&path).unwrap_err();
        assert_eq!(error.kind(), "io", "{error}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn files_that_are_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("maru.toml");
    std::fs::write(&path, b"[transfer]\n# \xff\n").unwrap();
    let error = Config::from_file(&path).unwrap_err();
    assert!(error.to_string().ends_with("maru.toml:2: not valid TOML: the file is not UTF-8 text"));
    assert_eq!(error.kind(), "config");

    std::fs::write(&path, vec![b'#'; 2 << 20]).unwrap();
    let error = Config::from_file(&path).unwrap_err();
    assert!(error.to_string().contains("larger than 1 MiB"), "{error}");
    // An endless file ends, too.
    assert!(Config::from_file("/dev/zero").is_err());
}

#[test]
fn errors_of_a_file_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("site.toml");
    std::fs::write(&path, "[transfer]\nsm_budget = 0\n").unwrap();
    let message = Config::from_file(&path).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{}:2: ", path.display())), "{message}");
}

#[test]
fn values_set_in_code_are_checked_too() {
    let spoiled: [fn(&mut Config); 12] = [
        |c| c.transfer.kv_chunk_tokens = 0,
        |c| c.transfer.sm_budget = 5000,
        |c| c.transfer.staging_bytes = 5,
        |c| c.transfer.host_threads = u32::MAX,
        |c| c.transfer.device = DeviceChoice::Cuda(u32::MAX),
        |c| c.cxl.prefault_threads = u32::MAX,
        |c| c.cxl.register_piece = 0,
        |c| c.cxl.pools.push(PoolConfig::new("")),
        |c| c.cxl.pools.push(PoolConfig::new("a").with_size(u64::MAX)),
        |c| c.cxl.pools.push(PoolConfig::new("a").with_offset(u64::MAX)),
        |c| {
            use std::os::unix::ffi::OsStringExt;
            let path = std::ffi::OsString::from_vec(vec![0xff]);
            c.cxl.pools.push(PoolConfig::new(path));
        },
        |c| c.index.path = "/dev/dax0.0".into(),
    ];
    for (i, spoil) in spoiled.iter().enumerate() {
        let mut config = Config::default();
        spoil(&mut config);
        let error = config.validate().expect_err(&i.to_string());
        assert!(error.to_string().starts_with('`'), "{i}: {error}");
        assert!(config.to_toml().is_err(), "{i}");
        assert!(config.checked().is_err(), "{i}");
    }
}
