//! The `maru` command: the main job, the layout explainer, diagnosis and the configuration check.
//!
//! Each command is a function from its arguments to an [`output::Outcome`]; everything about text, JSON, colours
//! and exit codes is decided in one place, here and in [`output`].

#![deny(unsafe_code)]

mod args;
mod bench;
mod check;
mod config;
mod device;
mod doctor;
mod error;
mod layout;
mod layouts;
mod memory;
mod movers;
mod output;
mod p2p;
mod progress;
mod rig;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;

use crate::args::{Command, Parsed};
use crate::error::CliError;
use crate::output::{Outcome, Output};

fn main() -> ExitCode {
    output::init_logging();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let output = Output::new(args::wants_json(&arguments));
    match args::parse(&arguments, output.json()) {
        Ok(Parsed::Command(command)) => output.finish(run(*command, &output)),
        Ok(Parsed::Text(code)) => ExitCode::from(code),
        Err(error) => output.finish(Err(error)),
    }
}

fn run(command: Command, output: &Output) -> Result<Outcome, CliError> {
    match command {
        Command::P2p(args) => p2p::run(&args, output),
        Command::Layout(args) => layout::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Config(args) => config::run(&args),
        Command::P2pChild => Err(p2p::run_child()),
    }
}
