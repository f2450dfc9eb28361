//! `maru config check FILE`.

use maru::Config;
use maru::transfer::config::ConfigError;
use serde_json::Value;

use crate::args::{ConfigArgs, ConfigCommand};
use crate::error::CliError;
use crate::output::{Line, Outcome};

pub(crate) fn run(args: &ConfigArgs) -> Result<Outcome, CliError> {
    match &args.command {
        ConfigCommand::Check { file } => {
            let config = Config::from_file(file)?;
            config.log_warnings();
            outcome(&config)
        }
    }
}

/// The effective configuration: TOML for people, the same keys and values as an object for programs.
fn outcome(config: &Config) -> Result<Outcome, CliError> {
    let text = config.to_toml()?;
    let unwritable = |message: String| CliError::Config(unwritable(message));
    let table: toml::Table = toml::from_str(&text).map_err(|e| unwritable(e.to_string()))?;
    let json: Value = serde_json::to_value(table).map_err(|e| unwritable(e.to_string()))?;
    let human = text.trim_end().lines().map(Line::plain).collect();
    Ok(Outcome { json, human, success: true })
}

fn unwritable(message: String) -> ConfigError {
    ConfigError::Unwritable { message }
}
