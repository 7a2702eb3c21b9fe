//! The product, shown: a stock client moves bytes through the service address while its connection goes round.

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

/// What happens, as it happens.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step begins.
    Step(String),
    /// The measured transfer's connection exists.
    Connected {
        /// The flow.
        flow: String,
        /// The node that serves it.
        owner: String,
        /// The names of all nodes.
        nodes: Vec<String>,
    },
    /// So much has arrived.
    Progress {
        /// Bytes until now.
        bytes: u64,
        /// Of so many.
        total: u64,
        /// Seconds since the transfer began.
        elapsed_s: f64,
    },
    /// The connection has moved.
    Moved(Handoff),
    /// The connection stayed where it was.
    Kept {
        /// Where it is.
        at: String,
        /// Why.
        reason: String,
    },
    /// A transfer has ended.
    Ended,
}

/// Who is told.
pub type Watch<'a> = &'a (dyn Fn(&Event) + Sync);

/// Runs the demonstration: a control transfer without handoffs, then the measured one.
///
/// # Errors
/// Something kept it from coming to a result: no lab, no daemon, no transfer. A result that is not as promised is no error:
/// [`Report::problems`] tells.
pub fn run(spec: &DemoSpec, watch: Watch<'_>) -> Result<Report> {
    let started = Instant::now();
    spec.check()?;
    thread::scope(|scope| {
        // Made here, from the definition of the stream, and not with the server's code.
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

/// One transfer, and what the capture says about it.
pub struct Passage {
    transfer: Transfer,
    connection: Connection,
    /// SYNs of all connections to the service while it ran.
    syns: u64,
    round: round::Round,
    /// What to add to CLOCK_MONOTONIC for the capture's time, nanoseconds.
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
        // A thread of its own, since it has a priority of its own.
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

/// CLOCK_REALTIME less CLOCK_MONOTONIC.
fn clock_offset_ns() -> Result<i128> {
    let read = |clock| -> Result<i128> {
        let time = clock_gettime(clock)?;
        Ok(i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec()))
    };
    Ok(read(ClockId::CLOCK_REALTIME)? - read(ClockId::CLOCK_MONOTONIC)?)
}
