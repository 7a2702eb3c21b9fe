//! Rows in which the connections exchange small messages all the time.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use holdfast_api::Drain;

use super::{HandoffRow, HandoffSample, SERVER_NODES, build_row, hand_off_pool};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, ExampleServer, IpFamily};
use holdfast_testbed::connection_load::{ConnectionLoad, message_interval, open_connections};
use holdfast_testbed::latency_probe::{ProbeGaps, TimeSpan, ping_pong, run_control_period};
use holdfast_testbed::network_counters::NetworkCounters;
use holdfast_testbed::stats::VerifiedBytes;

const PORT: u16 = 7;

/// Time under load before the first handoff, and between two.
const LOAD_PAUSE: Duration = Duration::from_millis(300);

/// Measures one row; one of the connections is the probe.
pub fn run(connections: usize, repeats: usize) -> Result<HandoffRow> {
    let mut spec =
        ClusterSpec::new(format!("bench{connections}")).program(ExampleServer::Echo { port: PORT });
    spec.log = "warn".into();
    spec.program_log = "warn".into();
    for service in &mut spec.services {
        service.weights = [("n1".into(), 0), ("n2".into(), 1), ("n3".into(), 0)].into();
    }
    let cluster = Cluster::up(spec)?;
    let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
    let mut streams = open_connections(cluster.lab(), "c1", service, connections)?;
    let probe_stream = streams.pop().context("--connections must be at least 1")?;
    let load = ConnectionLoad::start(streams, message_interval(connections))?;
    let shared = load.compared.clone();
    let probe = std::thread::spawn({
        let shared = shared.clone();
        move || ping_pong(probe_stream, &shared)
    });
    std::thread::sleep(LOAD_PAUSE * 3);
    let before = NetworkCounters::read(&cluster)?;
    let measured = measure_handoffs(&cluster, repeats);
    std::thread::sleep(LOAD_PAUSE);
    let network = NetworkCounters::read(&cluster)?.since(&before);
    load.stop()?;
    let trips = probe.join().expect("the probe does not panic")?;
    let (samples, times, controls) = measured?;
    let verified = VerifiedBytes {
        verified: shared.verified.load(Ordering::Relaxed),
        wrong: shared.wrong.load(Ordering::Relaxed),
    };
    let gaps = ProbeGaps::from_round_trips(&trips, times, &controls);
    Ok(build_row(&samples, gaps, false, &network, &verified))
}

/// The handoffs, their periods, and their control periods.
type MeasuredHandoffs = (Vec<HandoffSample>, Vec<TimeSpan>, Vec<TimeSpan>);

fn measure_handoffs(cluster: &Cluster, repeats: usize) -> Result<MeasuredHandoffs> {
    let mut samples = Vec::with_capacity(repeats);
    let mut times = Vec::with_capacity(repeats);
    let mut controls = Vec::with_capacity(repeats);
    for round in 0..repeats {
        let (from, to) = (SERVER_NODES[round % 2], SERVER_NODES[(round + 1) % 2]);
        let begin = Instant::now();
        let sample = hand_off_pool(cluster, "echo", from, to, Drain::None);
        samples.push(sample.map_err(|error| cluster.with_logs(error))?);
        let time = (begin, Instant::now());
        times.push(time);
        controls.push(run_control_period(time));
        std::thread::sleep(LOAD_PAUSE);
    }
    Ok((samples, times, controls))
}
