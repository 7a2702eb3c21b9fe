//! Demonstration of the product: a stock client transfers bytes through the service address while its connection moves
//! from node to node.

pub mod migrate;
pub mod pool;
mod report;
mod round;
mod screen;
mod source;
mod spec;
mod text;
mod transfer;
mod verdict;

use std::net::SocketAddr;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use nix::time::{ClockId, clock_gettime};

use crate::capture::{Capture, Connection, analyse, segments};
use crate::cluster::Cluster;

pub use report::{Handoff, Report, Wire};
pub use screen::{Screen, megabytes};
pub use spec::DemoSpec;
use transfer::Transfer;

/// An event of the running demonstration.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step begins.
    Step(String),
    /// The connection of the measured transfer is established.
    Connected {
        /// Flow of the connection.
        flow: String,
        /// Owner of the flow.
        owner: String,
        /// Names of all nodes.
        nodes: Vec<String>,
    },
    /// More bytes have arrived.
    Progress {
        /// Bytes that have arrived.
        bytes: u64,
        /// Bytes of the whole transfer.
        total: u64,
        /// Seconds since the transfer began.
        elapsed_s: f64,
    },
    /// The connection has moved.
    Moved(Handoff),
    /// A handoff failed, and the connection stayed at its node.
    Kept {
        /// Node that owns the connection.
        at: String,
        /// Reason of the failure.
        reason: String,
    },
    /// A transfer has ended.
    Ended,
}

/// A function that receives the events.
pub type Watch<'a> = &'a (dyn Fn(&Event) + Sync);

/// Runs the demonstration: a control transfer without handoffs, then the measured one.
///
/// # Errors
/// The demonstration came to no result: no lab, no daemon, or no transfer. A result that breaks a promise is no error:
/// [`Report::problems`] lists it.
pub fn run(spec: &DemoSpec, watch: Watch<'_>) -> Result<Report> {
    let started = Instant::now();
    spec.check()?;
    thread::scope(|scope| {
        // The digest comes from the definition of the stream, not from the server's code.
        let digest = scope.spawn(|| source::sha256(spec.bytes));
        watch(&Event::Step(format!(
            "starting a group of {}",
            spec.describe()
        )));
        let cluster = Cluster::up(spec.cluster())?;
        let digest = digest.join().ok().context("the source's digest")?;
        let passages = passages(&cluster, spec, watch).map_err(|error| cluster.with_logs(error))?;
        Ok(Report::new(spec, digest, passages, started.elapsed()))
    })
}

/// One transfer and the analysis of its capture.
pub struct Passage {
    transfer: Transfer,
    connection: Connection,
    /// SYNs of all connections to the service during the transfer.
    syns: u64,
    round: round::Round,
    /// Difference of the capture's clock to CLOCK_MONOTONIC, nanoseconds.
    clock_offset_ns: i128,
}

fn passages(cluster: &Cluster, spec: &DemoSpec, watch: Watch<'_>) -> Result<(Passage, Passage)> {
    let words = if spec.upload { "upload" } else { "download" };
    let size = megabytes(spec.control_bytes);
    watch(&Event::Step(format!(
        "control: {words} of {size} without handoffs"
    )));
    let control =
        passage(cluster, spec, spec.control_bytes, None, watch).context("the control run")?;
    let size = megabytes(spec.bytes);
    watch(&Event::Step(format!(
        "{words} of {size} through {}, with handoffs",
        service(cluster, spec)
    )));
    let measured = passage(
        cluster,
        spec,
        spec.bytes,
        Some(round::Plan::new(spec)),
        watch,
    )?;
    Ok((control, measured))
}

fn service(cluster: &Cluster, spec: &DemoSpec) -> SocketAddr {
    SocketAddr::new(cluster.service_address(spec.family), spec::PORT)
}

fn passage(
    cluster: &Cluster,
    spec: &DemoSpec,
    bytes: u64,
    plan: Option<round::Plan>,
    watch: Watch<'_>,
) -> Result<Passage> {
    let server = service(cluster, spec);
    let name = if plan.is_some() {
        "handoffs.pcap"
    } else {
        "control.pcap"
    };
    let file = cluster.directory().join(name);
    let filter = format!("tcp and host {} and port {}", server.ip(), server.port());
    let capture = Capture::start(cluster.lab(), "c1", &filter, &file)?;
    let clock_offset_ns = clock_offset_ns()?;
    let known = round::flows(cluster)?;
    let begun = transfer::begin(cluster, spec, server, bytes)?;
    let over = round::Over::default();
    let (transfer, round) = thread::scope(|scope| {
        let (over, known) = (&over, &known);
        let goes_round =
            plan.map(|plan| scope.spawn(move || round::go(cluster, &plan, known, over, watch)));
        // The transfer has a thread of its own because the thread has its own priority.
        let transfer = scope.spawn(|| begun.finish(watch)).join();
        over.set();
        let round = goes_round.map(|handle| handle.join());
        (transfer, round)
    });
    let recorded = capture.finish()?;
    watch(&Event::Ended);
    let transfer = transfer
        .ok()
        .context("the thread that moves the bytes panicked")??;
    let round = match round {
        Some(Ok(round)) => round?,
        Some(Err(_)) => bail!("the thread that asks for handoffs panicked"),
        None => round::Round::default(),
    };
    let connections = analyse(&segments(&recorded.file)?);
    let syns = connections.iter().map(|connection| connection.syns).sum();
    let largest = connections
        .into_iter()
        .max_by_key(|connection| connection.to_client.bytes + connection.to_server.bytes);
    let connection = largest.context("the capture has no connection to the service")?;
    Ok(Passage {
        transfer,
        connection,
        syns,
        round,
        clock_offset_ns,
    })
}

/// Returns CLOCK_REALTIME minus CLOCK_MONOTONIC.
fn clock_offset_ns() -> Result<i128> {
    let read = |clock| -> Result<i128> {
        let time = clock_gettime(clock)?;
        Ok(i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec()))
    };
    Ok(read(ClockId::CLOCK_REALTIME)? - read(ClockId::CLOCK_MONOTONIC)?)
}
