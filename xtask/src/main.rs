//! Development tasks. `cargo xtask --help` lists them.

mod dax_vm;
mod gpu_bundle;
mod licences;
mod miri;
mod plots;
mod ptx;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What every task returns.
type Outcome = Result<(), Box<dyn std::error::Error>>;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Development tasks of the Maru data plane")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the device-dax tests in virtual machines that have a real device node; `dax-vm help` lists the modes.
    #[command(disable_help_flag = true)]
    DaxVm {
        /// What to run; nothing means everything.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Pack device tests, benches and the CLI into target/gpu-bundle for a GPU machine without Rust.
    GpuBundle,
    /// Compile the kernel's portable image anew.
    Ptx {
        /// Only compare with the one in the repository; fail if it is stale.
        #[arg(long)]
        check: bool,
    },
    /// Draw a record's CSV files as SVG, beside them.
    Plots {
        /// Such as benches/record/h200.
        folder: PathBuf,
    },
    /// Check that every dependency's licence is one we accept.
    Licences,
    /// Run the pure parts and the host mover in Miri, which is installed if need be. Exit status 77: it cannot be
    /// installed; MARU_REQUIRE_MIRI=1 makes that a failure.
    Miri,
}

fn main() -> ExitCode {
    let outcome = match Args::parse().task {
        Task::DaxVm { args } => dax_vm::run(&args),
        Task::GpuBundle => gpu_bundle::run(&[]),
        Task::Plots { folder } => plots::run(&folder),
        Task::Licences => licences::run(),
        Task::Miri => match miri::run() {
            Ok(()) => Ok(()),
            Err(miri::Failure::Failed(e)) => Err(e),
            Err(miri::Failure::Unavailable(reason)) => {
                eprintln!("xtask: no Miri: {reason}");
                return ExitCode::from(miri::UNAVAILABLE);
            }
        },
        Task::Ptx { check } => ptx::run(&if check { vec!["--check".to_owned()] } else { Vec::new() }),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}
