//! Configurations that are accepted, and what they amount to.
#![allow(clippy::unwrap_used)]

use maru_transfer::config::{
    BackendChoice, ChecksumKind, CoherenceKind, Config, DeviceChoice, KernelSource, PoolConfig,
    StrategyChoice, Warning,
};

fn read(text: &str) -> Config {
    match Config::from_toml_str(text, "test.toml") {
        Ok(config) => config,
        Err(error) => panic!("refused: {error}\n{text}"),
    }
}

#[test]
fn an_empty_file_is_the_defaults() {
    for text in ["", "\n\n", "# nothing\n", "[transfer]\n[cxl]\n[index]\n"] {
        assert_eq!(read(text), Config::default(), "{text:?}");
    }
}

#[test]
fn the_defaults_are_the_documented_ones() {
    let config = Config::default();
    let t = &config.transfer;
    assert_eq!(t.backend, BackendChoice::Auto);
    assert_eq!(t.device, DeviceChoice::Auto);
    assert_eq!(t.strategy, StrategyChoice::Auto);
    assert_eq!((t.kv_chunk_tokens, t.sm_budget), (256, 4));
    assert_eq!((t.staging_bytes, t.host_threads), (134_217_728, 0));
    assert!(t.calibrate && !t.enable_fused_load);
    assert_eq!(t.checksum, ChecksumKind::None);
    let c = &config.cxl;
    assert!(c.prefault && c.register && !c.require_registration);
    assert_eq!((c.prefault_threads, c.register_piece), (0, 68_719_476_736));
    assert_eq!(c.coherence, CoherenceKind::None);
    assert!(c.pools.is_empty());
    assert!(config.index.path.as_os_str().is_empty());
    let pool = PoolConfig::new("/dev/dax0.0");
    assert_eq!((pool.offset, pool.size), (0, 4_294_967_296));
}

#[test]
fn every_key_is_read() {
    let config = read(
        r#"
        [transfer]
        backend = "native"
        device = "cuda:3"
        strategy = "staged"
        kv_chunk_tokens = 512
        sm_budget = 16
        staging_bytes = "64M"
        host_threads = 8
        calibrate = false
        checksum = "xxh3"
        enable_fused_load = true
        [cxl]
        prefault = false
        prefault_threads = 4
        register = true
        require_registration = true
        register_piece = "32G"
        coherence = "flush"
        [[cxl.pool]]
        path = "/dev/dax0.0"
        offset = "2MiB"
        size = 1073741824
        [[cxl.pool]]
        path = "/dev/dax1.0"
        size = 0
        [index]
        path = "/run/maru/index"
        "#,
    );
    let t = &config.transfer;
    assert_eq!(t.backend, BackendChoice::Native);
    assert_eq!(t.device, DeviceChoice::Cuda(3));
    assert_eq!(t.strategy, StrategyChoice::Staged);
    assert_eq!((t.kv_chunk_tokens, t.sm_budget), (512, 16));
    assert_eq!((t.staging_bytes, t.host_threads), (64 << 20, 8));
    assert!(!t.calibrate && t.enable_fused_load);
    assert_eq!(t.checksum, ChecksumKind::Xxh3);
    let c = &config.cxl;
    assert!(!c.prefault && c.register && c.require_registration);
    assert_eq!((c.prefault_threads, c.register_piece), (4, 32 << 30));
    assert_eq!(c.coherence, CoherenceKind::Flush);
    assert_eq!(
        c.pools,
        [
            PoolConfig::new("/dev/dax0.0").with_offset(2 << 20).with_size(1 << 30),
            PoolConfig::new("/dev/dax1.0").with_size(0),
        ]
    );
    assert_eq!(config.index.path.to_str(), Some("/run/maru/index"));
    assert!(config.warnings().is_empty());
}

#[test]
fn sizes_are_integers_or_text_of_1024_units() {
    for (size, bytes) in [
        ("4096", 4096u64),
        ("\"4096\"", 4096),
        ("0x10_0000", 1 << 20),
        ("\"4G\"", 4 << 30),
        ("\"4gb\"", 4 << 30),
        ("\"500M\"", 500 << 20),
        ("\"1.5GiB\"", 3 << 29),
        ("\"1.5gIb\"", 3 << 29),
        ("\"2TB\"", 2 << 40),
        ("\"0\"", 0),
        ("\"0G\"", 0),
        ("0", 0),
    ] {
        let config = read(&format!("[[cxl.pool]]\npath = \"p\"\nsize = {size}"));
        assert_eq!(config.cxl.pools[0].size, bytes, "{size}");
    }
}

#[test]
fn limits_are_inclusive() {
    for line in [
        "kv_chunk_tokens = 1",
        "kv_chunk_tokens = 1048576",
        "sm_budget = 1",
        "sm_budget = 1024",
        "staging_bytes = 0",
        "staging_bytes = 4096",
        "staging_bytes = \"64G\"",
        "host_threads = 1024",
        "device = \"cuda:0\"",
        "device = \"cuda:1023\"",
    ] {
        read(&format!("[transfer]\n{line}"));
    }
    for line in
        ["register_piece = \"2MiB\"", "register_piece = 549755813887", "prefault_threads = 1024", "pool = []"]
    {
        read(&format!("[cxl]\n{line}"));
    }
}

#[test]
fn devices_parse_and_print() {
    for (text, device) in [
        ("auto", DeviceChoice::Auto),
        ("host", DeviceChoice::Host),
        ("cuda:0", DeviceChoice::Cuda(0)),
        ("cuda:17", DeviceChoice::Cuda(17)),
    ] {
        assert_eq!(text.parse::<DeviceChoice>().unwrap(), device);
        assert_eq!(device.to_string(), text);
    }
}

#[test]
fn words_parse_and_print() {
    for choice in BackendChoice::ALL {
        assert_eq!(choice.as_str().parse::<BackendChoice>().unwrap(), *choice);
    }
    for choice in StrategyChoice::ALL {
        assert_eq!(choice.to_string().parse::<StrategyChoice>().unwrap(), *choice);
    }
    let error = "fast".parse::<BackendChoice>().unwrap_err();
    assert_eq!(error.to_string(), "`backend`: found \"fast\", allowed: \"auto\" | \"native\" | \"fallback\"");
}

/// Switch lines, backend line, outcome, number of warnings.
#[test]
fn kernel_switches_resolve_to_a_backend() {
    use BackendChoice::{Auto, Fallback, Native};
    let new = "maru_use_native_kernels";
    let old = "maru_use_lmcache_kernels";
    for (switches, backend, outcome, warnings) in [
        (format!("{new} = true"), "", Auto, 0),
        (format!("{new} = false"), "", Fallback, 0),
        (format!("{old} = true"), "", Auto, 1),
        (format!("{old} = false"), "", Fallback, 1),
        (format!("{new} = true\n{old} = true"), "", Auto, 1),
        (format!("{new} = false\n{old} = false"), "", Fallback, 1),
        (format!("{new} = true"), "auto", Auto, 0),
        (format!("{new} = true"), "native", Native, 0),
        (format!("{new} = false"), "auto", Fallback, 0),
        (format!("{new} = false"), "fallback", Fallback, 0),
        (format!("{old} = true"), "native", Native, 1),
        (format!("{old} = false"), "auto", Fallback, 1),
    ] {
        let mut text = format!("[transfer]\n{switches}\n");
        if !backend.is_empty() {
            text.push_str(&format!("backend = \"{backend}\""));
        }
        let config = read(&text);
        assert_eq!(config.transfer.backend, outcome, "{text}");
        assert_eq!(config.warnings().len(), warnings, "{text}");
    }
}

#[test]
fn the_old_switch_warns_with_its_place() {
    let config = read("[transfer]\n\nmaru_use_lmcache_kernels = true");
    let [warning @ Warning::DeprecatedKey { at, key, .. }] = config.warnings() else {
        panic!("{:?}", config.warnings());
    };
    assert_eq!((at.line(), key.as_str()), (Some(3), "transfer.maru_use_lmcache_kernels"));
    assert_eq!(
        warning.to_string(),
        "test.toml:3: `transfer.maru_use_lmcache_kernels` is deprecated, use \
         `maru_use_native_kernels`"
    );
}

#[test]
fn fused_load_with_the_fallback_is_disabled_with_a_warning() {
    for line in ["backend = \"fallback\"", "maru_use_native_kernels = false"] {
        let config = read(&format!("[transfer]\nenable_fused_load = true\n{line}"));
        assert!(!config.transfer.enable_fused_load);
        assert!(matches!(config.warnings(), [Warning::FusedLoadDisabled { .. }]));
        assert!(config.warnings()[0].to_string().contains("disabled"));
    }
    for backend in ["auto", "native"] {
        let config = read(&format!("[transfer]\nenable_fused_load = true\nbackend = \"{backend}\""));
        assert!(config.transfer.enable_fused_load);
        assert!(config.warnings().is_empty());
    }
}

#[test]
fn a_strategy_with_the_fallback_warns() {
    let config = read("[transfer]\nbackend = \"fallback\"\nstrategy = \"direct\"");
    assert!(matches!(config.warnings(), [Warning::StrategyIgnored { .. }]));
    // Checking twice, as opening an engine does, adds nothing.
    let again = config.clone().checked().unwrap();
    assert_eq!(again, config);
}

#[test]
fn pools_that_do_not_overlap() {
    let pool = |path: &str, offset: &str, size: &str| {
        format!("[[cxl.pool]]\npath = \"{path}\"\noffset = \"{offset}\"\nsize = \"{size}\"\n")
    };
    for pools in [
        [pool("/dev/dax0.0", "0", "8M"), pool("/dev/dax0.0", "8M", "8M")],
        [pool("/dev/dax0.0", "8M", "8M"), pool("/dev/dax0.0", "0", "8M")],
        [pool("/dev/dax0.0", "0", "8M"), pool("/dev/dax0.0", "8M", "0")],
        [pool("/dev/dax0.0", "0", "0"), pool("/dev/dax0.1", "0", "0")],
        [pool("/dev/dax0.0", "0", "8M"), pool("dev/dax0.0", "0", "8M")],
        [pool("/a/../../b", "0", "8M"), pool("/a/b", "0", "8M")],
    ] {
        assert_eq!(read(&pools.concat()).cxl.pools.len(), 2, "{pools:?}");
    }
}

#[test]
fn inline_and_dotted_forms_read_alike() {
    let expected = read("[[cxl.pool]]\npath = \"p\"\nsize = 4096\n[transfer]\nsm_budget = 2");
    for text in [
        "transfer.sm_budget = 2\ncxl.pool = [{ path = \"p\", size = 4096 }]",
        "transfer = { sm_budget = 2 }\n[cxl]\npool = [\n  { path = \"p\", size = \"4K\" },\n]",
        "\"transfer\".'sm_budget' = 2\r\n[[cxl.pool]]\r\npath = 'p'\r\nsize = 4096\r\n",
    ] {
        assert_eq!(read(text), expected, "{text}");
    }
}

#[test]
fn to_toml_has_every_key_and_reads_back() {
    let text = r#"
        [transfer]
        maru_use_lmcache_kernels = false
        enable_fused_load = true
        staging_bytes = "1.5M"
        device = "cuda:2"
        [[cxl.pool]]
        path = "/tmp/a \"quoted\" path"
        size = "500M"
        [[cxl.pool]]
        path = "/dev/dax0.0"
        size = 0
    "#;
    let config = read(text);
    let written = config.to_toml().unwrap();
    for line in [
        "[transfer]",
        "backend = \"fallback\"",
        "device = \"cuda:2\"",
        "strategy = \"auto\"",
        "kv_chunk_tokens = 256",
        "sm_budget = 4",
        "staging_bytes = 1572864",
        "host_threads = 0",
        "calibrate = true",
        "checksum = \"none\"",
        "enable_fused_load = false",
        "[cxl]",
        "prefault = true",
        "prefault_threads = 0",
        "register = true",
        "require_registration = false",
        "register_piece = 68719476736",
        "coherence = \"none\"",
        "[[cxl.pool]]",
        "offset = 0",
        "size = 524288000",
        "size = 0",
        "[index]",
        "path = \"\"",
    ] {
        assert!(written.lines().any(|l| l == line), "no {line:?} in\n{written}");
    }
    let again = read(&written);
    assert_eq!(again.transfer, config.transfer);
    assert_eq!(again.cxl, config.cxl);
    assert_eq!(again.index, config.index);
    assert!(again.warnings().is_empty());
    assert_eq!(again.to_toml().unwrap(), written);
}

#[test]
fn to_toml_of_the_defaults_reads_back() {
    let written = Config::default().to_toml().unwrap();
    assert!(written.contains("pool = []"), "{written}");
    assert_eq!(read(&written), Config::default());
}

#[test]
fn a_section_of_another_file() {
    #[derive(serde::Deserialize)]
    struct Service {
        port: u16,
        maru: Config,
    }
    let service: Service = toml::from_str("port = 80\n[maru.transfer]\nsm_budget = 7").unwrap();
    assert_eq!((service.port, service.maru.transfer.sm_budget), (80, 7));
    let refused = toml::from_str::<Service>("port = 80\n[maru.transfer]\nsm_budge = 7");
    assert!(refused.err().unwrap().to_string().contains("transfer.sm_budge"));
}

#[test]
fn configurations_made_in_code() {
    let mut config = Config::default();
    config.transfer.backend = BackendChoice::Fallback;
    config.transfer.enable_fused_load = true;
    config.cxl.pools.push(PoolConfig::new("/dev/dax0.0"));
    config.kernel_source = KernelSource::Lmcache;
    let checked = config.checked().unwrap();
    assert!(!checked.transfer.enable_fused_load);
    assert_eq!(checked.warnings().len(), 2, "{:?}", checked.warnings());
    checked.log_warnings();
}
