//! The command line: what may be written, and what the parser's own failures look like.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand, ValueEnum};

use maru::transfer::profile::Profile;

use crate::error::CliError;
use crate::layouts::{LAYOUTS, Layout};

#[derive(Debug, Parser)]
#[command(
    name = "maru",
    version,
    about = "Moves an LLM server's KV cache between paged memory and slabs in shared CXL memory",
    after_help = "Exit status: 0 success, 1 the work failed (a miss, a mismatch, a time-out), 2 bad input or \
                  configuration.\nLogs go to stderr; RUST_LOG=info (or debug) shows more of them.",
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
struct Cli {
    /// Print one JSON object on stdout and nothing else there, errors included.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

/// What can be asked for.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Main job: one process stores a prompt's KV cache in a pool, another one loads and checks every byte.
    P2p(P2pArgs),
    /// Explain what detection reads from a tensor's shape and strides.
    Layout(LayoutArgs),
    /// Time backends and strategies on model shapes and layouts beside one flat copy of the same bytes.
    Bench(BenchArgs),
    /// Check every layout, mover and direction on this machine byte by byte, for new hardware.
    Verify(VerifyArgs),
    /// Look at this machine: what will not work or be slow, and what to do about it.
    Doctor(DoctorArgs),
    /// Look at configuration files.
    Config(ConfigArgs),
    /// One side of `p2p`, started by it; takes its orders from stdin.
    #[command(hide = true)]
    P2pChild,
}

/// Which side of the main job this command plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    /// Both, as two child processes.
    Both,
    /// Store and exit, leaving the pool.
    Producer,
    /// Find, load and check.
    Consumer,
}

/// How the paged cache of `p2p` lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CacheLayout {
    /// `(blocks, 2, tokens, heads, dim)`, heads side by side.
    Nhd,
    /// The same shape with every head's tokens side by side.
    Hnd,
    /// `(blocks, heads, tokens, 2*dim)`: K and V side by side in each head.
    Fused,
}

#[derive(Debug, Args)]
pub(crate) struct P2pArgs {
    /// Play both sides as two processes, or one side only (for two hosts that share the pool).
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) role: RoleArg,
    /// Device or file that holds the pool [default: a file of its own in /dev/shm, else in $TMPDIR, removed at
    /// the end; or the first pool of --config].
    #[arg(long, value_name = "PATH")]
    pub(crate) pool: Option<PathBuf>,
    /// Make a new pool even where PATH holds another one or foreign data; that data is lost.
    #[arg(long)]
    pub(crate) force: bool,
    /// Model shape: a built-in profile's name or the path of a .toml file.
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b")]
    pub(crate) profile: String,
    /// Length of the prompt in tokens; a last chunk that is not full is moved as a shorter slab.
    #[arg(long, value_name = "N", default_value_t = 1024, allow_hyphen_values = true,
          value_parser = |text: &str| within(text, 1, MOST_TOKENS))]
    pub(crate) tokens: u64,
    /// What the prompt says; equal texts of equal length are the same prompt [default: a new one each run, or
    /// with a single role always the same].
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// Where the paged caches live: auto, host or cuda:N.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Which mover: auto, native or fallback.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,
    /// Configuration file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How the paged caches of this command lie in memory; the slab does not depend on it.
    #[arg(long, value_enum, default_value = "nhd")]
    pub(crate) layout: CacheLayout,
    /// Let the consumer ask for another prompt, so that it finds nothing: exit 1.
    #[arg(long, conflicts_with = "corrupt")]
    pub(crate) miss: bool,
    /// Flip one byte of the pool between store and load, so that the check fails: exit 1.
    #[arg(long)]
    pub(crate) corrupt: bool,
    /// Give up when nothing happens for that long.
    #[arg(long, value_name = "SECS", default_value_t = 30, allow_hyphen_values = true,
          value_parser = |text: &str| within(text, 1, 86_400))]
    pub(crate) timeout: u64,
    /// Rest that long before each chunk is stored or loaded: gives tests time to interfere.
    #[arg(long, value_name = "MS", default_value_t = 0, hide = true,
          value_parser = |text: &str| within(text, 0, 600_000))]
    pub(crate) test_pause: u64,
}

/// A whole number in a range.
fn within(text: &str, least: u64, most: u64) -> Result<u64, String> {
    let wanted = || format!("a whole number from {least} to {most} is needed");
    text.trim().parse().ok().filter(|n| (least..=most).contains(n)).ok_or_else(wanted)
}

/// Names that `--layout` takes, the usual ones marked.
fn layout_names(mark: &str) -> String {
    let name = |layout: &Layout| format!("{}{}", layout.name, if layout.usual { mark } else { "" });
    LAYOUTS.iter().map(name).collect::<Vec<_>>().join(" ")
}

fn bench_help() -> String {
    format!(
        "Rounds are interleaved: in each one the flat copy and every mover run once, in turn. Times are medians over \
         the rounds, ratios are medians of (time of the flat copy / time of the mover) within a round. Every mover is \
         checked byte by byte before it is timed.\n\n\
         Profiles: {}\n\
         Layouts (* the usual ones): {}\n\n\
         Exit status: 0 timed, 1 a byte was wrong or nothing could be timed, 2 bad input.",
        Profile::names().collect::<Vec<_>>().join(" "),
        layout_names("*")
    )
}

fn verify_help() -> String {
    format!(
        "Every trial moves random bytes and compares the whole memory of both sides with a naive mover that copies \
         byte by byte.\n\n\
         Layouts: {}\n\n\
         Exit status: 0 no byte differs, 1 some do, 2 bad input.",
        layout_names("")
    )
}

/// Longest prompt; its token ids are kept in memory.
pub(crate) const MOST_TOKENS: u64 = 1 << 24;

#[derive(Debug, Args)]
pub(crate) struct LayoutArgs {
    /// Lengths of the axes, such as 6,2,16,2,128.
    #[arg(long, value_name = "N,N,...", allow_hyphen_values = true)]
    pub(crate) shape: String,
    /// Strides in elements, one per axis [default: C-contiguous].
    #[arg(long, value_name = "N,N,...", allow_hyphen_values = true)]
    pub(crate) stride: Option<String>,
    /// Element type: f32 f16 bf16 u8 i8 fp8_e4m3 fp8_e5m2 raw8 raw16 raw32 raw64.
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    pub(crate) dtype: String,
    /// Tokens of a block, as the scheduler counts them.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) block_size: Option<String>,
    /// KV heads of this rank.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) kv_heads: Option<String>,
    /// Elements of a head (of K alone), or of MLA's latent row.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) head_size: Option<String>,
    /// Blocks of the cache.
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) num_blocks: Option<String>,
    /// Order of the axes, if known: block kv token head dim kv_dim content heads_dim slot layer.
    #[arg(long, value_name = "WORD,WORD,...", allow_hyphen_values = true)]
    pub(crate) axes: Option<String>,
    /// The cache keeps one latent row per token (MLA).
    #[arg(long)]
    pub(crate) mla: bool,
    /// Bytes from a 16-byte border to the tensor's first element; decides how wide accesses can be.
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true)]
    pub(crate) base_offset: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = bench_help()
)]
pub(crate) struct BenchArgs {
    /// Model shape: a built-in profile's name or the path of a .toml file; can be given several times
    /// [default: llama-3.1-8b].
    #[arg(long, value_name = "NAME")]
    pub(crate) profile: Vec<String>,
    /// Layout of the paged cache, one of those below; can be given several times [default: the usual ones].
    #[arg(long, value_name = "NAME")]
    pub(crate) layout: Vec<String>,
    /// Tokens moved at once, in slabs of 256.
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "16,256,1024",
          value_parser = |text: &str| within(text, 1, 1 << 20))]
    pub(crate) tokens: Vec<u64>,
    /// Where the paged caches live: host or cuda:N [default: the host and every GPU].
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Only this backend: native or fallback [default: both].
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,
    /// Rounds of each measurement [default: as many as take half a second, at least 5].
    #[arg(long, value_name = "N", value_parser = |text: &str| within(text, 1, 1_000_000))]
    pub(crate) rounds: Option<u64>,
    /// Write the numbers there, each as soon as it is measured.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Draw bars of GB/s there.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Spoil a byte after each transfer that is checked: shows that differences are found.
    #[arg(long, hide = true)]
    pub(crate) test_fault: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = verify_help()
)]
pub(crate) struct VerifyArgs {
    /// Only this layout, one of those below; can be given several times [default: all].
    #[arg(long, value_name = "NAME")]
    pub(crate) layout: Vec<String>,
    /// Where the paged caches live: host or cuda:N [default: the host and every GPU].
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Only this backend: native or fallback [default: both].
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,
    /// Other random bytes and slots.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Spoil a byte after each transfer of this layout: shows that differences are found.
    #[arg(long, value_name = "LAYOUT", hide = true)]
    pub(crate) test_fault: Option<String>,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Nothing is changed. With a GPU, its primary context is opened for a moment (a few hundred MiB of \
                        its memory) and 64 MiB of shared memory are registered and unregistered; --no-probe leaves \
                        that out.\nExit status: 0 when it could look, whatever it found."
)]
pub(crate) struct DoctorArgs {
    /// Look at the pools of this configuration too.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Only ask; open no GPU and register no memory.
    #[arg(long)]
    pub(crate) no_probe: bool,
    /// What is normally /sys.
    #[arg(long, value_name = "DIR", default_value = "/sys", hide = true)]
    pub(crate) sys: PathBuf,
    /// What is normally /dev.
    #[arg(long, value_name = "DIR", default_value = "/dev", hide = true)]
    pub(crate) dev: PathBuf,
    /// What is normally /proc.
    #[arg(long, value_name = "DIR", default_value = "/proc", hide = true)]
    pub(crate) proc: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: ConfigCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Read a configuration file and print what it means; opens no device, touches no pool.
    Check {
        /// The TOML file.
        file: PathBuf,
    },
}

/// What the arguments came to.
pub(crate) enum Parsed {
    /// Work to do.
    Command(Box<Command>),
    /// Help or version was printed; exit with this.
    Text(u8),
}

/// Whether failures are to be JSON, decided before (and regardless of whether) the arguments parse.
pub(crate) fn wants_json(arguments: &[OsString]) -> bool {
    let words = arguments.iter().skip(1).take_while(|a| *a != "--");
    words.into_iter().any(|a| a == "--json" || a.as_encoded_bytes().starts_with(b"--json="))
}

/// Parses. Help and version are printed here, as is the parser's advice to a human.
pub(crate) fn parse(arguments: &[OsString], json: bool) -> Result<Parsed, CliError> {
    let error = match Cli::try_parse_from(arguments) {
        Ok(cli) => return Ok(Parsed::Command(Box::new(cli.command))),
        Err(error) => error,
    };
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if asked_for || !json {
        // A closed stdout or stderr leaves nobody to tell.
        let _ = error.print();
        return Ok(Parsed::Text(if asked_for { 0 } else { 2 }));
    }
    let missing = matches!(
        error.kind(),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand
    );
    if missing {
        return Err(CliError::invalid("a command is missing; see maru --help"));
    }
    Err(CliError::invalid(first_paragraph(&error.to_string())))
}

/// The parser's complaint without its "error:" and the usage that follows.
fn first_paragraph(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let complaint = text.split("\n\nUsage:").next().unwrap_or(text);
    let complaint = complaint.split("\n\nFor more information").next().unwrap_or(complaint);
    complaint.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn os(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_parser_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn json_is_seen_anywhere_before_a_double_dash() {
        assert!(wants_json(&os(&["maru", "--json"])));
        assert!(wants_json(&os(&["maru", "layout", "--nonsense", "--json"])));
        assert!(wants_json(&os(&["maru", "--json=yes"])));
        assert!(!wants_json(&os(&["maru", "layout", "--", "--json"])));
        assert!(!wants_json(&os(&["--json", "layout"])));
    }

    #[test]
    fn a_complaint_is_one_line_without_usage() {
        let Err(error) = parse(&os(&["maru", "layout", "--json", "--shpe", "1"]), true) else {
            panic!("must be refused");
        };
        let message = error.to_string();
        assert!(
            message.contains("--shpe") && !message.contains("Usage") && !message.contains('\n'),
            "{message}"
        );
    }

    proptest! {
        /// Words of the command line and noise, in any order: an answer, never a panic.
        #[test]
        fn no_arguments_panic(words in prop::collection::vec(
            prop_oneof![
                prop::sample::select(vec![
                    "p2p", "layout", "config", "check", "doctor", "verify", "bench", "--no-probe", "--rounds", "--json", "--shape", "--stride", "--dtype", "--axes",
                    "--mla", "--base-offset", "--num-blocks", "6,2,16,2,128", "--tokens", "--timeout", "-1", "0",
                    "--role", "consumer", "--miss", "--corrupt", "--", "18446744073709551616", "--device", "",
                ]).prop_map(str::to_owned),
                "[ -~]{0,12}",
                "\\PC{0,6}",
            ], 0..9))
        {
            let arguments: Vec<OsString> =
                std::iter::once("maru".to_owned()).chain(words).map(OsString::from).collect();
            let parsed = Cli::try_parse_from(&arguments);
            if let Err(error) = &parsed {
                let _ = first_paragraph(&error.to_string());
            }
            if let Ok(Cli { command: Command::Layout(args), .. }) = parsed {
                let _ = crate::layout::run(&args);
            }
        }
    }
}
