//! Real programs under their own load, moved between the nodes of a group meanwhile.
//!
//! A [`Program`] of the table [`PROGRAMS`] is started at the service address and put under a load from a client. The
//! caller decides on the actions meanwhile, for example [`Scene::move_on`]. The client must not see any error then: the
//! load itself reports errors, and so do the counters of the client's kernel, which no tool can hide. Clients that
//! connect and disconnect are the subject of `churn`.

mod load;
mod table;
mod travel;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use holdfast_api::Protocol;

use crate::cluster::{Cluster, ClusterSpec, Family, Service};
use crate::handoff::counts::of_host;
pub use load::{Load, Tool};
pub use table::PROGRAMS;
use travel::Place;

/// Host of the clients.
pub const CLIENTS: &str = "c1";
const PORT: u16 = 7200;
/// Time limit of every wait; the machine may be very busy.
const PATIENCE: Duration = Duration::from_secs(120);
/// Interval between two checks of a condition.
const LOOK: Duration = Duration::from_millis(20);
/// Segments that the clients must receive before the load counts as running.
const PROGRESS: u64 = 40;

/// Error text if the client's kernel has counted a broken connection.
pub const BROKEN: &str = "a connection broke";

/// Counters of the client's kernel that rise when a connection cannot be opened, is reset or resets.
const BREAKS: [&str; 3] = ["Tcp.AttemptFails", "Tcp.EstabResets", "Tcp.OutRsts"];

/// A real program and its load.
#[derive(Debug)]
pub struct Program {
    /// Name of the program.
    pub name: &'static str,
    /// The kernel's name (comm) of the program's processes.
    pub process: &'static str,
    /// Number of processes.
    pub processes: usize,
    /// Creates the program's files and returns the words of its command.
    pub serve: fn(&Scene) -> Result<Vec<String>>,
    /// Connections of the load.
    pub connections: usize,
    /// Load of the program.
    pub load: Load,
}

/// A program that runs in a group of nodes that migrate processes.
pub struct Scene {
    cluster: Cluster,
    program: &'static Program,
    address: SocketAddr,
    place: Place,
    /// Counters of the client from the start of the load: none of `BREAKS` may differ from them.
    before: BTreeMap<String, u64>,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Segments that the clients received meanwhile.
    pub segments: u64,
    /// Result that the load reports.
    pub said: String,
}

impl Scene {
    /// Brings a group up, and the program in it.
    ///
    /// # Errors
    /// The machine lacks a requirement, or the program is missing or does not start.
    pub fn up(program: &'static Program) -> Result<Scene> {
        let mut spec = ClusterSpec::new(format!("program-{}-{}", program.name, std::process::id()));
        spec.migration = true;
        let mut service = Service::new(program.name, Protocol::Tcp, PORT);
        service.weights = travel::weights();
        spec.services = vec![service];
        let cluster = Cluster::up(spec)?;
        let address = SocketAddr::new(cluster.service_address(Family::V4), PORT);
        let mut scene = Scene {
            cluster,
            program,
            address,
            place: Place::default(),
            before: BTreeMap::new(),
        };
        let words = (program.serve)(&scene)?;
        scene.place = scene.start(&words)?;
        scene.until("the program accepts", || {
            let lab = scene.cluster.lab();
            let tried = lab.in_net(CLIENTS, || TcpStream::connect(address));
            Ok(tried?.is_ok())
        })?;
        Ok(scene)
    }

    /// Returns the group.
    #[must_use]
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns the service address of the program.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Calls `go` while the program is under its load; checks that the load runs before and after the call.
    ///
    /// # Errors
    /// The load does not start, `go` fails, or the client saw an error.
    pub fn under_load(&mut self, go: impl FnOnce(&mut Scene) -> Result<()>) -> Result<Outcome> {
        self.until_established(0)?;
        let load = self.program.load.start(self)?;
        let watched = self.watch(go);
        let said = load.end();
        match (watched, said) {
            (Ok(segments), Ok(said)) => Ok(Outcome { segments, said }),
            (Ok(_), Err(error)) | (Err(error), Ok(_)) => Err(error.context(self.logs())),
            (Err(error), Err(said)) => Err(error.context(format!("{said:#}\n{}", self.logs()))),
        }
    }

    /// Calls `go` with load before and after; returns the number of segments that the clients received.
    fn watch(&mut self, go: impl FnOnce(&mut Scene) -> Result<()>) -> Result<u64> {
        self.until_established(self.program.connections as u64)?;
        self.before = self.counts()?;
        self.goes_on()?;
        go(self)?;
        self.goes_on()?;
        Ok(self.counts()?["Tcp.InSegs"] - self.before["Tcp.InSegs"])
    }

    /// Waits until the clients have received `PROGRESS` more segments; no connection may have broken since the load
    /// began.
    ///
    /// # Errors
    /// The load makes no progress, or a connection has broken.
    pub fn goes_on(&self) -> Result<()> {
        let wanted = self.counts()?["Tcp.InSegs"] + PROGRESS;
        self.until("the load goes on", || {
            let now = self.counts()?;
            let broken = BREAKS
                .iter()
                .find(|name| now[**name] != self.before[**name]);
            if let Some(name) = broken {
                bail!("{BROKEN}: the client's {name} has changed");
            }
            Ok(now["Tcp.InSegs"] >= wanted)
        })
    }

    fn until_established(&self, connections: u64) -> Result<()> {
        self.until(&format!("{connections} connections are there"), || {
            Ok(self.counts()?.get("Tcp.CurrEstab") == Some(&connections))
        })
    }

    fn counts(&self) -> Result<BTreeMap<String, u64>> {
        let counts = of_host(self.cluster.lab(), CLIENTS)?;
        ensure!(
            BREAKS.iter().all(|name| counts.contains_key(*name)),
            "the kernel does not count connections"
        );
        Ok(counts)
    }

    /// Waits until `is_so` returns true.
    fn until(&self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_so().with_context(|| format!("while waiting until {what}"))? {
            ensure!(Instant::now() < deadline, "exceeded time: {what}");
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}
