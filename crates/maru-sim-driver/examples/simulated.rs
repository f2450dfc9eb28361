//! Runs a command as if this machine had GPUs: `cargo run -p maru-sim-driver --example simulated -- COMMAND …`.
//!
//! The command finds the simulated `libcuda.so` before any other. `MARU_SIM_CUDA` scripts it, see
//! [`maru_sim_driver::VARIABLE`]; `missing=…` leaves functions out. The conformance suite, for instance:
//!
//! ```text
//! MARU_REQUIRE_GPU=1 cargo run -p maru-sim-driver --example simulated -- cargo test --test conformance
//! ```

use std::env;
use std::ffi::OsString;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut words = env::args_os().skip(1);
    let Some(program) = words.next() else {
        eprintln!("usage: simulated COMMAND [ARGUMENT]…");
        return ExitCode::from(2);
    };
    match run(program, words) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(
    program: OsString,
    words: impl Iterator<Item = OsString>,
) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let script = env::var(maru_sim_driver::VARIABLE).unwrap_or_default();
    let missing: Vec<&str> = script
        .split(';')
        .filter_map(|word| word.strip_prefix("missing="))
        .flat_map(|names| names.split('+'))
        .filter(|name| !name.is_empty())
        .collect();
    let directory = env::temp_dir().join(format!("maru-simulated-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    maru_sim_driver::write_library(&directory, &missing)?;
    let mut path = directory.clone().into_os_string();
    if let Some(before) = env::var_os("LD_LIBRARY_PATH").filter(|p| !p.is_empty()) {
        path.push(":");
        path.push(before);
    }
    let status = Command::new(program).args(words).env("LD_LIBRARY_PATH", path).status();
    std::fs::remove_dir_all(&directory)?;
    let code = status?.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}
