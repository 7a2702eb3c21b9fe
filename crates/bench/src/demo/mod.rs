//! Demonstration of the product: a stock client transfers bytes through the service address while its connection moves
//! from node to node.

mod display;
pub mod drain;
mod handoffs;
pub mod migrate;
pub mod pool;
mod report;
mod report_checks;
mod report_text;
mod spec;
mod synthetic_stream;
mod transfer;

use std::net::SocketAddr;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use nix::time::{ClockId, clock_gettime};

use holdfast_testbed::capture::{CapturedConnection, RunningCapture, analyse, read_capture_file};
use holdfast_testbed::cluster::Cluster;

pub use display::{DemoDisplay, format_bytes};
pub use report::{DemoReport, HandoffResult, WireStatistics};
pub use report_checks::RETRANSMISSIONS;
pub use spec::DemoSpec;
use transfer::TransferResult;

/// An event of the running demonstration.
#[derive(Clone, Debug)]
pub enum DemoEvent {
    /// A step of the demonstration begins, with this text.
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
    HandedOff(HandoffResult),
    /// A handoff failed, and the connection stayed at its node.
    HandoffFailed {
        /// Node that owns the connection.
        owner: String,
        /// Reason of the failure.
        reason: String,
    },
    /// A transfer has ended.
    Ended,
}

/// A function that receives the events.
pub type EventHandler<'a> = &'a (dyn Fn(&DemoEvent) + Sync);

/// Runs the demonstration: a control transfer without handoffs, then the measured one.
///
/// # Errors
/// The demonstration came to no result: no lab, no daemon, or no transfer. A result that breaks a promise is no error:
/// [`DemoReport::problems`] lists it.
pub fn run(spec: &DemoSpec, watch: EventHandler<'_>) -> Result<DemoReport> {
    let started = Instant::now();
    spec.validate()?;
    thread::scope(|scope| {
        // The digest comes from the definition of the stream, not from the server's code.
        let digest = scope.spawn(|| synthetic_stream::stream_sha256(spec.bytes));
        watch(&DemoEvent::Step(format!(
            "starting a group of {}",
            spec.describe()
        )));
        let cluster = Cluster::up(spec.cluster_spec())?;
        let digest = digest
            .join()
            .ok()
            .context("the thread that computes the source's digest panicked")?;
        let passages =
            run_transfers(&cluster, spec, watch).map_err(|error| cluster.with_logs(error))?;
        Ok(DemoReport::new(spec, digest, passages, started.elapsed()))
    })
}

/// One transfer and the analysis of its capture.
pub struct MeasuredTransfer {
    transfer: TransferResult,
    connection: CapturedConnection,
    /// Number of SYNs to the service during the transfer, of all connections.
    syns: u64,
    round: handoffs::HandoffResults,
    /// Difference of the capture's clock to CLOCK_MONOTONIC, nanoseconds.
    clock_offset_ns: i128,
}

fn run_transfers(
    cluster: &Cluster,
    spec: &DemoSpec,
    watch: EventHandler<'_>,
) -> Result<(MeasuredTransfer, MeasuredTransfer)> {
    let words = if spec.upload { "upload" } else { "download" };
    let size = format_bytes(spec.control_bytes);
    watch(&DemoEvent::Step(format!(
        "control: {words} of {size} without handoffs"
    )));
    let control =
        run_transfer(cluster, spec, spec.control_bytes, None, watch).context("the control run")?;
    let size = format_bytes(spec.bytes);
    watch(&DemoEvent::Step(format!(
        "{words} of {size} through {}, with handoffs",
        service_socket_address(cluster, spec)
    )));
    let measured = run_transfer(
        cluster,
        spec,
        spec.bytes,
        Some(handoffs::HandoffSchedule::new(spec)),
        watch,
    )?;
    Ok((control, measured))
}

fn service_socket_address(cluster: &Cluster, spec: &DemoSpec) -> SocketAddr {
    SocketAddr::new(cluster.service_address(spec.family), spec::PORT)
}

fn run_transfer(
    cluster: &Cluster,
    spec: &DemoSpec,
    bytes: u64,
    plan: Option<handoffs::HandoffSchedule>,
    watch: EventHandler<'_>,
) -> Result<MeasuredTransfer> {
    let server = service_socket_address(cluster, spec);
    let name = if plan.is_some() {
        "handoffs.pcap"
    } else {
        "control.pcap"
    };
    let file = cluster.directory().join(name);
    let filter = format!("tcp and host {} and port {}", server.ip(), server.port());
    let capture = RunningCapture::start(cluster.lab(), "c1", &filter, &file)?;
    let clock_offset_ns = clock_offset_ns()?;
    let known_flows = handoffs::known_flows(cluster)?;
    let running = transfer::start_transfer(cluster, spec, server, bytes)?;
    let end_flag = handoffs::TransferEndFlag::default();
    let (transfer, round) = thread::scope(|scope| {
        let (over, known) = (&end_flag, &known_flows);
        let handoff_thread =
            plan.map(|plan| scope.spawn(move || handoffs::run(cluster, &plan, known, over, watch)));
        // The transfer has a thread of its own because the thread has its own priority.
        let transfer = scope.spawn(|| running.finish(watch)).join();
        over.set();
        let round = handoff_thread.map(|handle| handle.join());
        (transfer, round)
    });
    let recorded = capture.finish()?;
    watch(&DemoEvent::Ended);
    let transfer = transfer
        .ok()
        .context("the thread of the transfer panicked")??;
    let round = match round {
        Some(Ok(round)) => round?,
        Some(Err(_)) => bail!("the thread that requests handoffs panicked"),
        None => handoffs::HandoffResults::default(),
    };
    let connections = analyse(&read_capture_file(&recorded.file)?);
    let syns = connections.iter().map(|connection| connection.syns).sum();
    let largest = connections
        .into_iter()
        .max_by_key(|connection| connection.to_client.bytes + connection.to_server.bytes);
    let connection = largest.context("the capture has no connection to the service")?;
    Ok(MeasuredTransfer {
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
