//! The argument parser: its failures are answers like any other.

mod common;

use common::{Place, command, end, maru, start};

#[test]
fn parser_errors_are_json_objects_too() {
    for arguments in [
        &["--json"][..],
        &["--json", "p3p"],
        &["config", "--json"],
        &["config", "check", "--json"],
        &["layout", "--json"],
        &["layout", "--json", "--shape"],
        &["layout", "--shape", "1", "--shape", "2", "--json"],
        &["p2p", "--json", "--nonsense"],
        &["p2p", "--json", "--tokens", "many"],
        &["p2p", "--json", "--tokens", "0"],
        &["p2p", "--json", "--tokens", "-1"],
        &["p2p", "--json", "--tokens", "16777217"],
        &["p2p", "--json", "--tokens", "18446744073709551616"],
        &["p2p", "--json", "--timeout", "0"],
        &["p2p", "--json", "--role", "spectator"],
        &["p2p", "--json", "--layout", "nhdc"],
        &["p2p", "--json", "--miss", "--corrupt"],
        &["p2p", "--json=yes"],
        &["--json", "p2p", "stray"],
    ] {
        let run = maru(arguments);
        let (kind, message) = run.error(2);
        assert_eq!(kind, "invalid_argument", "{arguments:?}");
        assert!(!message.is_empty() && !message.contains("Usage:"), "{arguments:?}: {message}");
        assert_eq!(run.err, "", "{arguments:?}");
    }
}

#[test]
fn arguments_that_contradict_each_other_are_refused() {
    let place = Place::new();
    let pool = place.path("pool");
    for (arguments, hint) in [
        (&["--role", "consumer"][..], "--pool"),
        (&["--role", "producer"], "--pool"),
        (&["--role", "producer", "--pool", &pool, "--miss"], "--miss"),
        (&["--role", "consumer", "--pool", &pool, "--corrupt"], "--corrupt"),
        (&["--device", "gpu"], "--device"),
        (&["--device", "cuda:-1"], "--device"),
        (&["--backend", "fastest"], "--backend"),
    ] {
        let run = place.run(&[arguments, &["--json"]].concat());
        let (kind, message) = run.error(2);
        assert_eq!(kind, "invalid_argument", "{arguments:?}: {message}");
        assert!(message.contains(hint), "{arguments:?}: {message}");
    }
    assert!(!std::path::Path::new(&pool).exists());
}

#[test]
fn a_parser_error_without_json_is_for_people() {
    let run = maru(&["p2p", "--tokens", "many"]);
    assert_eq!((run.code, run.out.as_str()), (Some(2), ""));
    assert!(run.err.contains("--tokens") && run.err.contains("--help"), "{}", run.err);
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in
        [&["--help"][..], &["--json", "--help"], &["p2p", "--help"], &["config", "check", "--help"]]
    {
        let run = maru(arguments);
        assert_eq!(run.code, Some(0), "{run:?}");
        assert!(run.out.contains("Usage:"), "{run:?}");
    }
    let run = maru(&["--version"]);
    assert_eq!((run.code, run.out.trim()), (Some(0), concat!("maru ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn help_says_nothing_of_what_is_internal() {
    for arguments in [
        &["--help"][..],
        &["p2p", "--help"],
        &["doctor", "--help"],
        &["verify", "--help"],
        &["bench", "--help"],
    ] {
        let run = maru(arguments);
        assert_eq!(run.code, Some(0), "{run:?}");
        for word in ["p2p-child", "test-pause", "test-fault", "--sys", "--proc"] {
            assert!(!run.out.contains(word), "{word}: {}", run.out);
        }
    }
}

#[test]
fn every_command_is_in_the_help_and_has_its_own() {
    let help = maru(&["--help"]).out;
    for name in ["p2p", "layout", "bench", "verify", "doctor", "config"] {
        assert!(help.contains(&format!("  {name} ")), "{name}: {help}");
        assert!(maru(&[name, "--help"]).out.contains("Usage:"), "{name}");
    }
}

#[test]
fn no_arguments_show_the_help_and_fail() {
    let run = maru(&[]);
    assert_eq!((run.code, run.out.as_str()), (Some(2), ""));
    assert!(run.err.contains("Usage:"), "{}", run.err);
}

#[test]
fn arguments_that_are_no_text_do_not_panic() {
    use std::os::unix::ffi::OsStrExt as _;
    let bytes = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    for option in ["--shape", "--dtype"] {
        let mut command = command(&["layout", "--json", option]);
        let run = end(start(command.arg(bytes)));
        assert_eq!(run.error(2).0, "invalid_argument");
    }
    let mut command = command(&["p2p", "--json", "--pool"]);
    assert_eq!(end(start(command.arg(bytes))).error(2).0, "invalid_argument");
}

#[test]
fn a_closed_stdout_is_a_failure_and_no_panic() {
    use std::process::Stdio;
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let child = command(&["layout", "--shape", "6,2,16,2,128"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let run = end(child);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.err.contains("writing the answer") && !run.err.contains("panicked"), "{}", run.err);
}

#[test]
fn the_child_command_needs_a_parent() {
    let (kind, message) = maru(&["p2p-child", "--json"]).error(2);
    assert_eq!(kind, "invalid_argument");
    assert!(message.contains("maru p2p"), "{message}");
}
