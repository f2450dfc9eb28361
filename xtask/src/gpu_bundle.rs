//! Everything that wants a GPU, for a machine with a driver but no Rust: `target/gpu-bundle/` with the device
//! tests, the device benches, the command line and a runner.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::ptx::target_dir;

type Error = Box<dyn std::error::Error>;

/// Packages and their tests that have something to do on a device. Those of the command line drive a binary
/// that is elsewhere.
const TESTS: [(&str, &str); 6] = [
    ("maru", "conformance"),
    ("maru", "faults"),
    ("maru-cxl", "cuda"),
    ("maru-fallback", "device_gpu"),
    ("maru-kernel-cuda", "gpu"),
    ("maru-transfer", "calibration_gpu"),
];
/// Benches by name, in whichever package has them.
const BENCHES: [&str; 6] = ["direct", "staged", "interference", "fallback_device", "transfer", "host"];
/// Most bytes of the bundle.
const LIMIT: u64 = 60_000_000;

/// `gpu-bundle`, without arguments.
pub(crate) fn run(args: &[String]) -> Result<(), Error> {
    if !args.is_empty() {
        return Err(format!("gpu-bundle takes no arguments, not {args:?}").into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask has no parent folder")?;
    let bundle = target_dir(root).join("gpu-bundle");
    let _ = fs::remove_dir_all(&bundle);
    for folder in ["tests", "benches", "bin"] {
        fs::create_dir_all(bundle.join(folder))?;
    }
    let mut size = 0;
    for (package, kind, name) in targets()? {
        let (folder, choose): (_, [&str; 3]) = match kind.as_str() {
            "test" => ("tests", ["test", "--test", &name]),
            "bench" => ("benches", ["bench", "--bench", &name]),
            _ => ("bin", ["build", "--bin", &name]),
        };
        let built = build(&package, choose)?;
        let to = bundle.join(folder).join(match folder {
            "bin" => name,
            _ => format!("{package}-{name}"),
        });
        size += fs::copy(&built, &to)?;
        println!("{} <- {}", to.display(), built.display());
    }
    let runner = bundle.join("run.sh");
    fs::write(&runner, RUNNER)?;
    executable(&runner)?;
    println!("{}: {:.1} MB", bundle.display(), size as f64 / 1e6);
    match size <= LIMIT {
        true => Ok(()),
        false => Err(format!("the bundle has {size} bytes; at most {LIMIT} can be carried").into()),
    }
}

/// `(package, kind, name)` of everything that belongs into the bundle.
fn targets() -> Result<Vec<(String, String, String)>, Error> {
    let output =
        Command::new(env!("CARGO")).args(["metadata", "--format-version", "1", "--no-deps"]).output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let mut found = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        for target in package["targets"].as_array().into_iter().flatten() {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (package, kind, name) =
                (text(&package["name"]), text(&target["kind"][0]), text(&target["name"]));
            let wanted = match kind.as_str() {
                "test" => TESTS.contains(&(package.as_str(), name.as_str())),
                "bench" => BENCHES.contains(&name.as_str()),
                "bin" => name == "maru",
                _ => false,
            };
            if wanted {
                found.push((package, kind, name));
            }
        }
    }
    Ok(found)
}

/// Builds one target, optimised and stripped, and returns the binary.
fn build(package: &str, [verb, flag, name]: [&str; 3]) -> Result<PathBuf, Error> {
    let mut command = Command::new(env!("CARGO"));
    command.args([verb, flag, name, "--package", package, "--message-format", "json-render-diagnostics"]);
    // `bench` is optimised anyway.
    command.args(if verb == "bench" { &[] } else { &["--release"][..] });
    command.args(if verb == "build" { &[] } else { &["--no-run"][..] });
    for profile in ["RELEASE", "BENCH"] {
        command.env(format!("CARGO_PROFILE_{profile}_STRIP"), "symbols");
        command.env(format!("CARGO_PROFILE_{profile}_DEBUG"), "false");
    }
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("{package} {name} does not build").into());
    }
    let messages = String::from_utf8_lossy(&output.stdout).into_owned();
    let binaries = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    binaries
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .ok_or_else(|| format!("cargo reported no binary for {package} {name}").into())
}

fn executable(path: &Path) -> Result<(), Error> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

const RUNNER: &str = r#"#!/bin/sh
# Runs the device tests: run.sh [filter]. Set MARU_REQUIRE_GPU=1 to fail where there is no usable GPU.
# The last line is "N passed, N failed, N ignored"; the exit status is 0 if none failed.
here=$(cd "$(dirname "$0")" && pwd) || exit 1
cd "$here" || exit 1
PATH="$here/bin:$PATH"
export PATH
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
passed=0 failed=0 ignored=0
for test in tests/*; do
    echo "== $test"
    "$test" "$@" >"$log" 2>&1
    status=$?
    cat "$log"
    counts=$(sed -n 's/^test result: [^.]*\. \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 \2 \3/p' "$log" | tail -n 1)
    if [ -z "$counts" ]; then
        echo "$test ended with status $status and no result"
        failed=$((failed + 1))
        continue
    fi
    set_counts() { p=$1 f=$2 i=$3; }
    # shellcheck disable=SC2086
    set_counts $counts
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then f=1; fi
    passed=$((passed + p)) failed=$((failed + f)) ignored=$((ignored + i))
done
echo "$passed passed, $failed failed, $ignored ignored"
[ "$failed" -eq 0 ]
"#;
