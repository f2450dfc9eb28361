//! Driving the `maru` binary as a process.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// A binary that has not answered by then hangs.
const PATIENCE: Duration = Duration::from_secs(50);

pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_maru"));
    command.args(arguments).stdin(Stdio::null()).env_remove("RUST_LOG").env_remove("NO_COLOR");
    command
}

/// What a run came to.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) pid: u32,
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// The one JSON object on stdout.
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.out.lines().count(), 1, "one object and nothing else: {self:?}");
        let value: Value = serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert!(value.is_object(), "{self:?}");
        value
    }

    /// Kind and message of the error object, after checking the exit code.
    pub(crate) fn error(&self, code: i32) -> (String, String) {
        let value = self.json();
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(value.as_object().map(|o| o.len()), Some(1), "{self:?}");
        let error = &value["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_else(|| panic!("no {key}: {self:?}")).to_owned();
        assert_eq!(error.as_object().map(|o| o.len()), Some(2), "{self:?}");
        (text("kind"), text("message"))
    }
}

pub(crate) fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts")
}

/// Waits for a process that must end by itself.
pub(crate) fn end(mut child: Child) -> Run {
    let pid = child.id();
    let begun = Instant::now();
    // The answers are far smaller than a pipe, so nothing blocks while nobody reads.
    while child.try_wait().expect("wait").is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().expect("kill");
            let output = child.wait_with_output().expect("output");
            panic!("it hangs: {output:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().expect("output");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Run { pid, code: status.code(), out: text(stdout), err: text(stderr) }
}

pub(crate) fn maru(arguments: &[&str]) -> Run {
    end(start(&mut command(arguments)))
}

/// A directory with a small profile in it: 2 layers, 2 heads of 8 bf16, blocks of 4.
pub(crate) struct Place {
    pub(crate) dir: TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Place { dir: tempfile::tempdir().expect("a temporary directory") };
        place.file(
            "small.toml",
            "name='small'\nmodel='test/small'\nlayers=2\nkv_heads=2\nhead_size=8\ndtype='bf16'\nblock_size=4\n",
        );
        place
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("UTF-8").to_owned()
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).expect("write");
        path
    }

    /// `maru p2p` with the small profile, in host memory unless told otherwise.
    pub(crate) fn p2p(&self, arguments: &[&str]) -> Command {
        let mut command = command(&["p2p", "--profile", &self.path("small.toml")]);
        command.args(arguments);
        // The same answers on a machine with a GPU.
        if !arguments.contains(&"--device") {
            command.args(["--device", "host"]);
        }
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Run {
        end(start(&mut self.p2p(arguments)))
    }
}

/// Pools that a run of its own file left in /dev/shm or the temporary directory.
pub(crate) fn leftovers(pid: u32) -> Vec<PathBuf> {
    let prefix = format!("maru-p2p-{pid}-");
    let list =
        |dir: &Path| std::fs::read_dir(dir).map(|d| d.flatten().collect()).unwrap_or_else(|_| Vec::new());
    [PathBuf::from("/dev/shm"), std::env::temp_dir()]
        .iter()
        .flat_map(|dir| list(dir))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .map(|entry| entry.path())
        .collect()
}

/// The children of a process, in the order in which they were started.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // pid (name) state ppid ... starttime is the 22nd field.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        if fields.get(1).and_then(|f| f.parse().ok()) == Some(parent) && fields.first() != Some(&"Z") {
            let started: u64 = fields.get(19).and_then(|f| f.parse().ok()).unwrap_or(0);
            found.push((started, pid));
        }
    }
    found.sort_unstable();
    found.into_iter().map(|(_, pid)| pid).collect()
}

/// Waits until something is so.
pub(crate) fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).expect("a process id")).expect("not zero");
    rustix::process::kill_process(pid, signal).expect("the process is there");
}

pub(crate) fn alive(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => !stat.contains(") Z "),
        Err(_) => false,
    }
}

/// Runs the binary with a driver library of ours in the place where the real one would be found.
pub(crate) struct Sim {
    lib: TempDir,
}

impl Sim {
    /// With the simulated driver; nothing (and the reason printed) where it could not be built.
    pub(crate) fn new() -> Option<Self> {
        let sim = Sim { lib: tempfile::tempdir().expect("a temporary directory") };
        match maru_sim_driver::write_library(sim.lib.path(), &[]) {
            Ok(_) => Some(sim),
            Err(error) if std::env::var_os("MARU_REQUIRE_CXX").is_none() => {
                println!("ignored: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// As if there were no driver, on machines with a GPU too.
    pub(crate) fn without_driver() -> Self {
        let sim = Sim { lib: tempfile::tempdir().expect("a temporary directory") };
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::fs::write(sim.lib.path().join(name), "no library").expect("write");
        }
        sim
    }

    pub(crate) fn maru(&self, arguments: &[&str], script: &str) -> Run {
        let mut command = command(arguments);
        command.env("LD_LIBRARY_PATH", self.lib.path()).env(maru_sim_driver::VARIABLE, script);
        end(start(&mut command))
    }
}
