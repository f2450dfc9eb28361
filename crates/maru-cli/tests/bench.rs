//! `maru bench`: numbers of every mover, checked before they are taken.

mod common;

use common::{Place, Sim, maru};
use serde_json::Value;

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().unwrap_or_else(|| panic!("no rows: {report}"))
}

/// `maru bench` of the small profile, two rounds each.
fn small(place: &Place, arguments: &[&str]) -> Vec<String> {
    let profile = place.path("small.toml");
    let start = ["bench", "--profile", &profile, "--rounds", "2", "--json"];
    start.iter().chain(arguments).map(|word| (*word).to_owned()).collect()
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

#[test]
fn each_mover_stands_beside_the_flat_copy() {
    let place = Place::new();
    let run = maru(&words(&small(&place, &["--device", "host", "--tokens", "5,600"])));
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    // Layouts, two token counts, two directions, two movers.
    assert_eq!(rows(&report).len(), 4 * 2 * 2 * 2, "{report}");
    for row in rows(&report) {
        assert_eq!(row["bytes"].as_u64(), row["tokens"].as_u64().map(|n| n * 2 * 2 * 2 * 8 * 2), "{row}");
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
        let (bytes, seconds) = (number("bytes"), number("seconds"));
        assert!(seconds > 0.0 && (number("gbps") - bytes / seconds / 1e9).abs() < 1e-6, "{row}");
        assert!(number("ratio") > 0.0 && number("flat_gbps") > 0.0, "{row}");
        assert_eq!((row["backend"].as_str(), row["strategy"].as_str()), (Some("fallback"), Some("host")));
        assert_eq!(row["rounds"], 2);
    }
    assert_eq!(report["failures"], serde_json::json!([]));
}

#[test]
fn the_numbers_go_to_a_table_a_file_and_a_picture() {
    let place = Place::new();
    let (csv, svg) = (place.path("out.csv"), place.path("out.svg"));
    let arguments = small(
        &place,
        &["--device", "host", "--layout", "fused_blhnc", "--tokens", "16", "--csv", &csv, "--plot", &svg],
    );
    let run = maru(&words(&arguments));
    assert_eq!(run.code, Some(0), "{run:?}");
    let csv = std::fs::read_to_string(csv).expect("the numbers");
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(lines.len(), 1 + rows(&run.json()).len(), "{csv}");
    assert!(lines[0].starts_with("profile,layout,device,tokens,bytes,direction,mover,"), "{csv}");
    assert!(lines.iter().all(|line| line.split(',').count() == lines[0].split(',').count()), "{csv}");
    assert!(lines[1].starts_with("small,fused_blhnc,host,16,"), "{csv}");
    let svg = std::fs::read_to_string(svg).expect("the picture");
    assert!(svg.starts_with("<svg") && svg.contains("flat copy") && svg.contains("fused_blhnc"), "{svg}");

    let human: Vec<&str> = words(&arguments).into_iter().filter(|word| *word != "--json").collect();
    let run = maru(&human);
    assert_eq!(run.code, Some(0), "{run:?}");
    for text in ["small fused_blhnc on host: 16 tokens", "fallback/1", "ratio", "one memcpy of one thread"] {
        assert!(run.out.contains(text), "{text}: {}", run.out);
    }
}

#[test]
fn wrong_bytes_are_not_timed() {
    let place = Place::new();
    let run = maru(&words(&small(&place, &["--device", "host", "--tokens", "16", "--test-fault"])));
    assert_eq!(run.code, Some(1), "{run:?}");
    let report = run.json();
    assert!(rows(&report).is_empty(), "{report}");
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(4 * 2 * 2), "{report}");
}

#[test]
fn layouts_that_a_profile_cannot_have_are_left_out() {
    let place = Place::new();
    let arguments =
        small(&place, &["--device", "host", "--tokens", "4", "--layout", "mla", "--layout", "cross_layer"]);
    let run = maru(&words(&arguments));
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert!(rows(&report).iter().all(|row| row["layout"] == "cross_layer"), "{report}");
    assert_eq!(report["skipped"][0]["what"], "small as mla", "{report}");
    let reason = report["skipped"][0]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("deepseek-v3-mla"), "{report}");
    let none: Vec<String> = small(&place, &["--device", "host", "--tokens", "4", "--layout", "mla"])
        .into_iter()
        .filter(|word| word != "--json")
        .collect();
    let run = maru(&words(&none));
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.out.contains("Nothing was timed"), "{run:?}");
    let mla = place.file(
        "mla.toml",
        "name='latent'\nmodel='m'\nlayers=2\nhead_size=9\nmla=true\ndtype='bf16'\nblock_size=4\n",
    );
    let run =
        maru(&["bench", "--profile", &mla, "--rounds", "1", "--tokens", "7", "--device", "host", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(rows(&run.json()).iter().all(|row| row["layout"] == "mla" && row["profile"] == "latent"));
}

#[test]
fn what_does_not_fit_into_memory_is_skipped() {
    let place = Place::new();
    let profile = place.file(
        "large.toml",
        "name='large'\nmodel='m'\nlayers=1000\nkv_heads=128\nhead_size=256\ndtype='bf16'\nblock_size=16\n",
    );
    let arguments = [
        "bench",
        "--profile",
        &profile,
        "--tokens",
        "1048576",
        "--device",
        "host",
        "--layout",
        "block_first_nhd",
        "--json",
    ];
    let run = maru(&arguments);
    assert_eq!(run.code, Some(1), "nothing was timed: {run:?}");
    assert!(
        run.json()["skipped"][0]["reason"].as_str().is_some_and(|r| r.contains("are available")),
        "{run:?}"
    );
}

#[test]
fn bad_arguments_are_refused_before_anything_is_timed() {
    let place = Place::new();
    for arguments in [
        &["--tokens", "0"][..],
        &["--tokens", "16,many"],
        &["--layout", "nhd"],
        &["--rounds", "0"],
        &["--device", "gpu"],
        &["--device", "host", "--plot", "/tmp/bars.png"],
    ] {
        let (kind, message) = maru(&words(&small(&place, arguments))).error(2);
        assert_eq!(kind, "invalid_argument", "{arguments:?}: {message}");
    }
    assert_eq!(maru(&["bench", "--profile", "gpt-2", "--json"]).error(2).0, "config");
    let nowhere = place.path("nowhere/out.csv");
    assert_eq!(maru(&words(&small(&place, &["--device", "host", "--csv", &nowhere]))).error(1).0, "io");
}

#[test]
fn every_mover_of_a_simulated_gpu_is_timed() {
    let Some(sim) = Sim::new() else { return };
    let place = Place::new();
    let arguments = small(&place, &["--device", "cuda:0", "--tokens", "300", "--layout", "block_first_hnd"]);
    let run = sim.maru(&words(&arguments), "devices=1");
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    let found: Vec<(&str, &str)> = rows(&report)
        .iter()
        .filter(|row| row["direction"] == "scatter")
        .map(|row| (row["mover"].as_str().unwrap_or("?"), row["strategy"].as_str().unwrap_or("?")))
        .collect();
    assert_eq!(found.len(), 4, "{found:?}");
    for wanted in
        [("native/direct", "direct"), ("native/staged", "staged"), ("fallback/copy_engine", "copy_engine")]
    {
        assert!(found.contains(&wanted), "{wanted:?}: {found:?}");
    }
    let own =
        found.iter().find(|(mover, _)| *mover == "native/auto").expect("the native backend's own choice");
    assert!(["direct", "staged"].contains(&own.1), "{found:?}");
}

#[test]
fn help_lists_what_may_be_named() {
    for (command, words) in [
        ("bench", &["deepseek-v3-mla", "fused_lbnhc*", "kv_first_nhd "][..]),
        ("verify", &["layer_first_cross", "fused_lbnhc "]),
    ] {
        let run = maru(&[command, "--help"]);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(words.iter().all(|word| run.out.contains(word)), "{words:?}: {}", run.out);
    }
}
