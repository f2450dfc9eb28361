//! One side at a time over a pool that has a name.

mod common;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use common::{Place, Run, end, start};
use serde_json::Value;

#[track_caller]
fn verified(run: &Run) {
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.json()["verified"], true, "{run:?}");
}

fn producer<'a>(pool: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["--role", "producer", "--tokens", "600", "--json", "--pool", pool], more].concat()
}

fn consumer<'a>(pool: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["--role", "consumer", "--tokens", "600", "--json", "--pool", pool], more].concat()
}

#[test]
fn producer_then_consumer() {
    let place = Place::new();
    let pool = place.path("pool");
    let stored = place.run(&producer(&pool, &[]));
    assert_eq!(stored.code, Some(0), "{stored:?}");
    let value = stored.json();
    assert!(
        value["cache_hit"].is_null() && value["verified"].is_null() && value["load_gbps"].is_null(),
        "{value}"
    );
    assert!(value["store_gbps"].as_f64() > Some(0.0), "{value}");
    let mode = Path::new(&pool).metadata().expect("the pool stays").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let loaded = place.run(&consumer(&pool, &[]));
    verified(&loaded);
    assert!(loaded.json()["store_gbps"].is_null());
    // It stays for others.
    verified(&place.run(&consumer(&pool, &[])));
}

#[test]
fn a_consumer_that_comes_first_waits() {
    let place = Place::new();
    let pool = place.path("pool");
    let waiting = start(&mut place.p2p(&consumer(&pool, &[])));
    std::thread::sleep(std::time::Duration::from_millis(300));
    let stored = place.run(&producer(&pool, &["--test-pause", "100"]));
    assert_eq!(stored.code, Some(0), "{stored:?}");
    verified(&end(waiting));
}

#[test]
fn sides_may_lay_out_their_caches_differently() {
    let place = Place::new();
    for (a, b) in [("nhd", "fused"), ("fused", "hnd"), ("hnd", "nhd")] {
        let pool = place.path(&format!("pool-{a}"));
        assert_eq!(place.run(&producer(&pool, &["--layout", a])).code, Some(0));
        verified(&place.run(&consumer(&pool, &["--layout", b])));
    }
}

#[test]
fn a_prompt_is_found_by_its_text_and_length() {
    let place = Place::new();
    let pool = place.path("pool");
    assert_eq!(place.run(&producer(&pool, &["--prompt", "once upon a time"])).code, Some(0));
    verified(&place.run(&consumer(&pool, &["--prompt", "once upon a time"])));
    let other = place.run(&consumer(&pool, &["--prompt", "twice", "--timeout", "1"]));
    assert_eq!((other.code, &other.json()["cache_hit"]), (Some(1), &Value::Bool(false)), "{other:?}");
    let miss = place.run(&consumer(&pool, &["--prompt", "once upon a time", "--miss"]));
    assert_eq!((miss.code, &miss.json()["cache_hit"]), (Some(1), &Value::Bool(false)), "{miss:?}");
}

#[test]
fn a_model_of_another_shape_misses() {
    let place = Place::new();
    let pool = place.path("pool");
    assert_eq!(place.run(&producer(&pool, &[])).code, Some(0));
    let other =
        "name='s'\nmodel='test/small'\nlayers=2\nkv_heads=2\nhead_size=8\ndtype='f16'\nblock_size=4\n";
    place.file("small.toml", other);
    let run = place.run(&consumer(&pool, &["--timeout", "1"]));
    assert_eq!((run.code, &run.json()["cache_hit"]), (Some(1), &Value::Bool(false)), "{run:?}");
}

#[test]
fn storing_twice_replaces() {
    let place = Place::new();
    let pool = place.path("pool");
    for _ in 0..3 {
        let run = place.run(&producer(&pool, &[]));
        assert_eq!(run.code, Some(0), "{run:?}");
    }
    verified(&place.run(&consumer(&pool, &[])));
}

#[test]
fn a_corrupt_pool_is_noticed_by_the_other_side() {
    let place = Place::new();
    let pool = place.path("pool");
    assert_eq!(place.run(&producer(&pool, &["--corrupt"])).code, Some(0));
    let run = place.run(&consumer(&pool, &[]));
    assert_eq!(run.code, Some(1), "{run:?}");
    assert_eq!(run.json()["verified"], false);
    assert!(run.json()["first_difference"].is_object());
}

#[test]
fn a_pool_that_never_comes_is_a_time_out() {
    let place = Place::new();
    let pool = place.path("pool");
    let (kind, message) = place.run(&consumer(&pool, &["--timeout", "1"])).error(1);
    assert_eq!(kind, "timeout");
    assert!(message.contains("1 s") && message.contains(&pool), "{message}");
}

#[test]
fn foreign_data_is_not_overwritten_unless_forced() {
    let place = Place::new();
    let pool = place.file("precious", &"precious data ".repeat(200_000));
    let before = std::fs::read(&pool).expect("read");
    let run = place.run(&producer(&pool, &[]));
    assert_eq!(run.error(2).0, "not_a_pool");
    assert_eq!(std::fs::read(&pool).expect("read"), before);
    let run = place.run(&producer(&pool, &["--force"]));
    assert_eq!(run.code, Some(0), "{run:?}");
    verified(&place.run(&consumer(&pool, &[])));
}

#[test]
fn a_pool_of_smaller_slabs_is_refused_with_the_sizes() {
    let place = Place::new();
    let pool = place.path("pool");
    assert_eq!(place.run(&["--role", "producer", "--tokens", "8", "--pool", &pool]).code, Some(0));
    let (kind, message) = place.run(&producer(&pool, &[])).error(2);
    assert_eq!(kind, "invalid_argument");
    assert!(message.contains("32768") && message.contains("--force"), "{message}");
}

#[test]
fn a_full_pool_says_what_is_missing() {
    let place = Place::new();
    let pool = place.path("pool");
    assert_eq!(place.run(&producer(&pool, &[])).code, Some(0));
    let (kind, message) = place.run(&producer(&pool, &["--prompt", "another"])).error(1);
    assert_eq!(kind, "no_space");
    assert!(message.contains("3 more slabs"), "{message}");
    // What was there is still there.
    verified(&place.run(&consumer(&pool, &[])));
}

#[test]
fn both_sides_over_a_named_pool_leave_it_as_they_found_it() {
    let place = Place::new();
    let pool = place.path("pool");
    // Made by the run, so removed by it.
    verified(&place.run(&["--tokens", "300", "--json", "--pool", &pool]));
    assert!(!Path::new(&pool).exists());
    // There before, so still there; its slabs are free again.
    std::fs::File::create(&pool).and_then(|f| f.set_len(1 << 20)).expect("a blank file");
    for _ in 0..8 {
        verified(&place.run(&["--tokens", "600", "--json", "--pool", &pool]));
    }
    assert!(Path::new(&pool).exists());
}

#[test]
fn the_pool_may_come_from_the_configuration() {
    let place = Place::new();
    let pool = place.path("pool");
    let config = place.file("maru.toml", &format!("[[cxl.pool]]\npath='{pool}'\nsize='4MiB'\n"));
    let run = place.run(&["--role", "producer", "--tokens", "600", "--config", &config]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(Path::new(&pool).metadata().expect("made").len(), 4 << 20);
    assert!(run.out.contains("the same command with --role consumer"), "{run:?}");
    verified(&place.run(&["--role", "consumer", "--tokens", "600", "--config", &config, "--json"]));
}
