//! `maru config check` as a process.

mod common;

use common::{Place, maru};

#[test]
fn an_empty_file_is_the_defaults_as_toml() {
    let place = Place::new();
    let run = maru(&["config", "check", &place.file("a.toml", "")]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let table: toml::Table = run.out.parse().expect("TOML");
    assert_eq!(table["transfer"]["staging_bytes"].as_integer(), Some(128 << 20));
    assert_eq!(table["transfer"]["backend"].as_str(), Some("auto"));
    assert_eq!(table["cxl"]["register_piece"].as_integer(), Some(64 << 30));
}

#[test]
fn what_is_printed_reads_back_as_itself() {
    let place = Place::new();
    let text = "[transfer]\nchecksum='xxh3'\nstaging_bytes='1.5MiB'\n[[cxl.pool]]\npath='/dev/dax0.0'\nsize='4GiB'\n";
    let first = maru(&["config", "check", &place.file("a.toml", text)]);
    assert!(first.out.contains("1572864"), "{}", first.out);
    let second = maru(&["config", "check", &place.file("b.toml", &first.out)]);
    assert_eq!(first.out, second.out);
}

#[test]
fn json_is_the_same_configuration() {
    let place = Place::new();
    let run =
        maru(&["config", "check", "--json", &place.file("a.toml", "[[cxl.pool]]\npath='/x'\nsize=8192\n")]);
    let value = run.json();
    assert_eq!(value["cxl"]["pool"][0]["size"], 8192);
    assert_eq!(value["transfer"]["kv_chunk_tokens"], 256);
}

#[test]
fn no_pool_is_touched() {
    let place = Place::new();
    let pool = place.path("pool");
    let file = place.file("a.toml", &format!("[[cxl.pool]]\npath='{pool}'\nsize='1MiB'\n"));
    assert_eq!(maru(&["config", "check", &file]).code, Some(0));
    assert!(!std::path::Path::new(&pool).exists());
}

#[test]
fn refused_configurations_name_file_line_and_key() {
    let place = Place::new();
    for (text, hint) in [
        ("[transfer]\nbackand='auto'", "backand"),
        ("[transfer]\nbackend='fast'", "transfer.backend"),
        ("[transfer]\nsm_budget='four'", "sm_budget"),
        ("[transfer]\nstaging_bytes='12 parsec'", "staging_bytes"),
        ("[cxl]\nregister_piece='512GiB'", "register_piece"),
        ("[nonsense]", "nonsense"),
        ("not toml at all", "a.toml"),
        ("[[cxl.pool]]\npath='/x'\nsize=8192\n[[cxl.pool]]\npath='/x'\nsize=8192\n", "/x"),
    ] {
        let path = place.file("a.toml", text);
        let (kind, message) = maru(&["--json", "config", "check", &path]).error(2);
        assert_eq!(kind, "config", "{text}: {message}");
        assert!(message.contains(hint) && message.contains("a.toml"), "{text}: {message}");
    }
}

#[test]
fn an_unreadable_file_is_bad_input() {
    let place = Place::new();
    for path in [place.path("missing.toml"), place.dir.path().to_str().expect("UTF-8").to_owned()] {
        let (kind, message) = maru(&["config", "check", &path, "--json"]).error(2);
        assert_eq!(kind, "io", "{message}");
        assert!(message.contains(&path), "{message}");
    }
}

#[test]
fn warnings_go_to_stderr_and_json_stays_alone() {
    let place = Place::new();
    let file = place.file("a.toml", "[transfer]\nuse_lmcache = 1\n");
    assert_eq!(maru(&["config", "check", &file, "--json"]).error(2).0, "config");
    let file = place.file("b.toml", "[transfer]\nmaru_use_lmcache_kernels = true\n");
    let run = maru(&["config", "check", &file, "--json"]);
    assert_eq!(run.json()["transfer"]["backend"], "auto");
    assert!(run.err.contains("maru_use_lmcache_kernels"), "{}", run.err);
}
