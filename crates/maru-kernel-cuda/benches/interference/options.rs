//! The command line.

use crate::grid::{LOADS, LoadKind};

pub(crate) const USAGE: &str = "\
interference [--load L[,L]] [--direction h2d|d2h] [--only WORD[,WORD]] [--layout NAME] [--seconds S]
             [--bytes N[M|G]] [--in-flight N] [--one-stream] [--no-graph] [--cublas PATH] [--csv FILE] [--list]
  --load        products, memory, decode (all three if not given), stall (without cuBLAS), none (movers alone)
  --only        movers whose name contains one of the words; the flat copy is always measured
  --layout      a layout of the conformance tests, such as blocks_first_nhd (default), blocks_first_hnd, fused_lbnhc
  --seconds     a cell (default 0.7)
  --bytes       a batch (default 512000000)
  --in-flight   batches on their way at most (default 3)
  --one-stream  staged batches all on one stream, so that each drains the ring before the next
  --no-graph    compute launch by launch, not as graphs
  --cublas      libcublas.so.*, its folder, or the site-packages folder of a Python with it (also: MARU_CUBLAS)
  --list        name loads and movers, measure nothing";

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Options {
    pub(crate) loads: Vec<LoadKind>,
    /// 0: loads, H2D; 1: stores, D2H.
    pub(crate) directions: Vec<usize>,
    pub(crate) only: Vec<String>,
    pub(crate) layout: String,
    pub(crate) seconds: f64,
    pub(crate) bytes: u64,
    pub(crate) in_flight: usize,
    pub(crate) one_stream: bool,
    pub(crate) graph: bool,
    pub(crate) cublas: Option<String>,
    pub(crate) csv: Option<String>,
    pub(crate) list: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            loads: LOADS.to_vec(),
            directions: vec![0, 1],
            only: Vec::new(),
            layout: "blocks_first_nhd".into(),
            seconds: 0.7,
            bytes: 512_000_000,
            in_flight: 3,
            one_stream: false,
            graph: true,
            cublas: None,
            csv: None,
            list: false,
        }
    }
}

impl Options {
    pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut options = Options::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value"));
            match arg.as_str() {
                "--load" => options.loads = words(&value()?).map(|w| load(&w)).collect::<Result<_, _>>()?,
                "--direction" => options.directions = vec![direction(&value()?)?],
                "--only" => options.only.extend(words(&value()?)),
                "--layout" => options.layout = value()?,
                "--seconds" => options.seconds = seconds(&value()?)?,
                "--bytes" => options.bytes = bytes(&value()?)?,
                "--in-flight" => options.in_flight = in_flight(&value()?)?,
                "--one-stream" => options.one_stream = true,
                "--no-graph" => options.graph = false,
                "--cublas" => options.cublas = Some(value()?),
                "--csv" => options.csv = Some(value()?),
                "--list" => options.list = true,
                // What cargo passes.
                "--bench" => {}
                other => return Err(format!("unknown argument {other:?}")),
            }
        }
        match options.loads.is_empty() {
            true => Err("--load names no load".into()),
            false => Ok(options),
        }
    }
}

fn words(list: &str) -> impl Iterator<Item = String> {
    list.split(',').map(str::trim).filter(|word| !word.is_empty()).map(str::to_owned)
}

fn load(name: &str) -> Result<LoadKind, String> {
    let found = LoadKind::ALL.into_iter().find(|load| load.name() == name);
    found.ok_or_else(|| {
        format!("there is no load {name:?}; there are {}", LoadKind::ALL.map(LoadKind::name).join(", "))
    })
}

fn direction(name: &str) -> Result<usize, String> {
    match name.to_ascii_lowercase().as_str() {
        "h2d" => Ok(0),
        "d2h" => Ok(1),
        _ => Err(format!("--direction is h2d or d2h, not {name:?}")),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|s: &f64| (0.01..=60.0).contains(s));
    found.ok_or_else(|| format!("--seconds is between 0.01 and 60, not {text:?}"))
}

/// Decimal, as throughputs are: 512M is 512000000.
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'M') => (&text[..text.len() - 1], 1_000_000),
        Some(b'G') => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    let found = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(unit));
    let found = found.filter(|n| (1..=16_000_000_000).contains(n));
    found.ok_or_else(|| format!("--bytes is between 1 and 16G, not {text:?}"))
}

fn in_flight(text: &str) -> Result<usize, String> {
    let found = text.parse().ok().filter(|n| (1..=16).contains(n));
    found.ok_or_else(|| format!("--in-flight is between 1 and 16, not {text:?}"))
}
