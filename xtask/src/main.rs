//! Development tasks. `cargo xtask --help` lists them.

mod licences;

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
    /// Check that every dependency's licence is one we accept.
    Licences,
}

fn main() -> ExitCode {
    let outcome = match Args::parse().task {
        Task::Licences => licences::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}
