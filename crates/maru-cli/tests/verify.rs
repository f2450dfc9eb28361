//! `maru verify`: on the host, on a simulated GPU, and when something is wrong.

mod common;

use common::{Sim, maru};
use serde_json::Value;

fn count(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or_else(|| panic!("no {key}: {report}"))
}

fn list<'a>(report: &'a Value, key: &str) -> &'a [Value] {
    report[key].as_array().unwrap_or_else(|| panic!("no {key}: {report}"))
}

#[test]
fn every_layout_is_right_on_the_host() {
    let run = maru(&["verify", "--device", "host", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert_eq!((count(&report, "failed"), list(&report, "layouts").len()), (0, 24));
    assert_eq!(list(&report, "movers").len(), 2, "one thread and several");
    assert!(count(&report, "passed") > 2 * 2 * 24 * 3, "{report}");
    assert!(list(&report, "failures").is_empty() && list(&report, "skipped").is_empty(), "{report}");
}

#[test]
fn a_spoilt_byte_is_a_failure() {
    let run = maru(&["verify", "--device", "host", "--test-fault", "kv_first_hnd", "--json"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let report = run.json();
    // Two movers, every size, both directions; and nothing else.
    let failures = list(&report, "failures");
    assert_eq!((failures.len() as u64, failures.len() % 4), (count(&report, "failed"), 0));
    assert!(failures.len() >= 2 * 7 * 2, "{report}");
    for failure in failures {
        assert_eq!(failure["layout"], "kv_first_hnd");
        assert!(failure["what"].as_str().is_some_and(|w| w.contains("slab byte")), "{failure}");
    }
    let run = maru(&["verify", "--device", "host", "--layout", "mla", "--test-fault", "mla"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.out.contains("FAIL") && run.out.contains("Not verified"), "{}", run.out);
}

#[test]
fn what_is_asked_for_is_tried_and_nothing_else() {
    let run = maru(&["verify", "--device", "host", "--layout", "mla", "--layout", "cross_layer", "--json"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(list(&run.json(), "layouts"), ["mla", "cross_layer"]);
    for arguments in [
        &["--layout", "nhd"][..],
        &["--device", "gpu"],
        &["--backend", "fastest"],
        &["--device", "host", "--backend", "native"],
        &["--seed", "-1"],
    ] {
        let (kind, message) = maru(&[&["verify", "--json"], arguments].concat()).error(2);
        assert_eq!(kind, "invalid_argument", "{arguments:?}: {message}");
    }
}

#[test]
fn the_table_names_movers_and_layouts() {
    let run = maru(&["verify", "--device", "host", "--layout", "sglang_slots"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.out.contains("host fallback/1") && run.out.contains("sglang_slots"), "{}", run.out);
    assert!(run.out.contains("Verified: "), "{}", run.out);
}

#[test]
fn a_gpu_that_is_not_there_is_skipped_unless_it_is_asked_for() {
    let sim = Sim::without_driver();
    let run = sim.maru(&["verify", "--layout", "mla", "--json"], "");
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    assert!(list(&report, "skipped")[0]["reason"].as_str().is_some_and(|r| r.contains("driver")), "{report}");
    for arguments in
        [&["verify", "--device", "cuda:0", "--json"][..], &["verify", "--backend", "native", "--json"]]
    {
        let (kind, message) = sim.maru(arguments, "").error(2);
        assert_eq!(kind, "not_available", "{message}");
        assert!(message.contains("driver"), "{message}");
    }
}

#[test]
fn every_mover_of_a_gpu_is_right_on_the_simulated_driver() {
    let Some(sim) = Sim::new() else { return };
    // Some of the layouts: the simulated kernel takes its time.
    let names =
        ["block_first_nhd", "fused_bhlnc", "mla", "sglang_slots", "opaque_blocks", "trtllm_cross_layer"];
    let arguments = names.iter().flat_map(|name| ["--layout", *name]);
    let arguments: Vec<&str> =
        ["verify", "--device", "cuda:0", "--json"].into_iter().chain(arguments).collect();
    let run = sim.maru(&arguments, "devices=1");
    assert_eq!(run.code, Some(0), "{run:?}");
    let report = run.json();
    let movers: Vec<&str> = list(&report, "movers").iter().filter_map(|m| m["mover"].as_str()).collect();
    assert_eq!(movers, ["native/direct", "native/staged", "fallback/copy_engine"]);
    assert!(list(&report, "movers").iter().all(|m| m["device"] == "cuda:0"), "{report}");
    assert_eq!(count(&report, "failed"), 0, "{report}");
}

#[test]
fn a_driver_call_that_fails_is_a_failure_and_no_panic() {
    let Some(sim) = Sim::new() else { return };
    let run = sim.maru(
        &["verify", "--device", "cuda:0", "--layout", "mla", "--json"],
        "devices=1;fail_all=cuMemHostRegister:1:2",
    );
    assert_eq!(run.code, Some(1), "{run:?}");
    let report = run.json();
    assert_eq!(count(&report, "passed"), 0, "{report}");
    assert!(
        list(&report, "failures")[0]["what"].as_str().is_some_and(|w| w.contains("registering")),
        "{report}"
    );
    // A kernel that does not load leaves the fallback.
    let run = sim.maru(
        &["verify", "--device", "cuda:0", "--layout", "mla", "--json"],
        "devices=1;fail_all=cuModuleLoadData:1:209;fail_all=cuModuleLoadDataEx:1:209",
    );
    let report = run.json();
    assert_eq!((run.code, count(&report, "failed")), (Some(0), 0), "{report}");
    assert_eq!((list(&report, "movers").len(), list(&report, "skipped").len()), (1, 2), "{report}");
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    for arguments in [&["verify", "--layout", "mla"][..], &["bench"], &["p2p"]] {
        let arguments = [arguments, &["--device", "cuda:1023", "--json"]].concat();
        let (kind, message) = maru(&arguments).error(2);
        assert_eq!(kind, "not_available", "{message}");
        assert!(message.starts_with("cuda:1023 not available: "), "{message}");
    }
}

#[test]
fn the_gpus_that_there_are_are_said() {
    let Some(sim) = Sim::new() else { return };
    for (devices, backend, gpus) in [
        ("devices=1", "auto", "the only GPU is cuda:0"),
        ("devices=3", "auto", "cuda:0 to cuda:2"),
        ("devices=3", "native", "cuda:0 to cuda:2"),
    ] {
        let arguments = ["bench", "--device", "cuda:7", "--backend", backend, "--json"];
        let (kind, message) = sim.maru(&arguments, devices).error(2);
        assert_eq!(kind, "not_available", "{message}");
        assert!(message.starts_with("cuda:7 not available: ") && message.contains(gpus), "{message}");
    }
}
