//! Real programs under their own load in a lab: what migrations are tried with.
//!
//! A [`Program`] of the table [`PROGRAMS`] is started in a host and put under a load in another. Whoever runs it says what happens
//! meanwhile (a migration, or nothing). Then the client must have seen no error: the load itself says so, and so do the
//! client kernel's counts, which no tool can hide. A tool that connects again makes a new connection, which is counted.

mod load;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::handoff::counts::of_host;
use crate::pools::PoolLab;
pub use load::{Load, Tool};
pub use table::PROGRAMS;

/// The host of the program; `n2` is left free to become its next one.
pub const HOME: &str = "n1";
/// The host of its clients.
pub const CLIENTS: &str = "c1";
const PORT: u16 = 7200;
/// How long anything may take; the machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(120);
/// Segments that the clients must get before the load counts as going on.
const PROGRESS: u64 = 40;

/// Counts of the client's kernel that rise when a connection is opened, fails, is reset or resets.
const BREAKS: [&str; 4] = [
    "Tcp.ActiveOpens",
    "Tcp.AttemptFails",
    "Tcp.EstabResets",
    "Tcp.OutRsts",
];

/// A real program and its load.
#[derive(Debug)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// What the kernel calls its processes.
    pub process: &'static str,
    /// Makes what it needs and gives the words of its command.
    pub serve: fn(&Scene) -> Result<Vec<String>>,
    /// Connections of its load.
    pub connections: usize,
    /// Its load.
    pub load: Load,
}

/// A program that runs under its load.
pub struct Scene {
    lab: PoolLab,
    process: &'static str,
    address: SocketAddr,
}

/// What was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How often the program was to be moved.
    pub moves: u32,
    /// Segments that the clients got meanwhile.
    pub segments: u64,
    /// What the load says of itself.
    pub said: String,
}

/// Runs a program under its load, and `go` so often, each time after the load has gone on.
///
/// # Errors
/// The program or its load is not there or does not start, `go` fails, or the client saw an error.
pub fn run(
    program: &Program,
    moves: u32,
    go: &mut dyn FnMut(&Scene) -> Result<()>,
) -> Result<Outcome> {
    let name = format!("program-{}-{}", program.name, std::process::id());
    let lab = PoolLab::up(&name, 2)?;
    let address = SocketAddr::new(lab.address(HOME)?, PORT);
    let process = program.process;
    let mut scene = Scene {
        lab,
        process,
        address,
    };
    let words = (program.serve)(&scene)?;
    scene.lab.run(HOME, program.name, "env".as_ref(), &words)?;
    scene.lab.until("the program accepts", PATIENCE, || {
        let lab = scene.lab.lab();
        let tried = lab.in_net(CLIENTS, || TcpStream::connect(address));
        tried.ok()?.ok()
    })?;
    let load = program.load.start(&scene, program.connections)?;
    let outcome = scene.watch(program.connections, moves, go);
    // The load first: it knows best what went wrong.
    let said = load.end().with_context(|| scene.lab.logs())?;
    let segments = outcome.with_context(|| scene.lab.logs())?;
    Ok(Outcome {
        moves,
        segments,
        said,
    })
}

/// What goes on in a move that is none.
///
/// # Errors
/// Never.
pub fn stay(_: &Scene) -> Result<()> {
    Ok(())
}

impl Scene {
    /// The lab.
    #[must_use]
    pub fn lab(&self) -> &PoolLab {
        &self.lab
    }

    /// Where the program serves.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The program's first process, by the id that the machine knows.
    ///
    /// # Errors
    /// It does not run at that host.
    pub fn root_process(&self, host: &str) -> Result<i32> {
        let mut processes = self.lab.lab().processes(host)?;
        processes.sort_unstable();
        let is_it = |process: &i32| {
            let named = fs::read_to_string(format!("/proc/{process}/comm"));
            named.is_ok_and(|named| named.trim_end() == self.process)
        };
        let found = processes.into_iter().find(is_it);
        found.with_context(|| format!("no {} runs at {host}", self.process))
    }

    /// Lets the load go on before, between and after the moves; gives how many segments came.
    fn watch(
        &self,
        connections: usize,
        moves: u32,
        go: &mut dyn FnMut(&Scene) -> Result<()>,
    ) -> Result<u64> {
        let connections = connections as u64;
        self.lab.until("every connection is there", PATIENCE, || {
            (self.counts().ok()?.get("Tcp.CurrEstab") == Some(&connections)).then_some(())
        })?;
        let before = self.counts()?;
        self.go_on(&before)?;
        for _ in 0..moves {
            go(self)?;
            self.go_on(&before)?;
        }
        Ok(self.counts()?["Tcp.InSegs"] - before["Tcp.InSegs"])
    }

    /// Waits until the load has gone on, and none of its connections broke.
    fn go_on(&self, before: &BTreeMap<String, u64>) -> Result<()> {
        let wanted = self.counts()?["Tcp.InSegs"] + PROGRESS;
        let mut broken = None;
        self.lab.until("the load goes on", PATIENCE, || {
            let now = self.counts().ok()?;
            let changed = |name: &&&str| now[**name] != before[**name];
            broken = BREAKS.iter().find(changed);
            (broken.is_some() || now["Tcp.InSegs"] >= wanted).then_some(())
        })?;
        match broken {
            None => Ok(()),
            Some(name) => bail!("a connection broke: the client's {name} has changed"),
        }
    }

    fn counts(&self) -> Result<BTreeMap<String, u64>> {
        let counts = of_host(self.lab.lab(), CLIENTS)?;
        ensure!(
            BREAKS.iter().all(|name| counts.contains_key(*name)),
            "the kernel does not count connections"
        );
        Ok(counts)
    }
}
