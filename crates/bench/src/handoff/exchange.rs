//! Rows in which the connections exchange small messages all the time.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use holdfast_api::Drain;

use super::counts::Counts;
use super::probe::{Gaps, Span, control, ping_pong};
use super::stats::Verified;
use super::{HOMES, Row, Sample, hand_over, row};
use crate::cluster::{Cluster, ClusterSpec, Family, Program};
use crate::load::{Load, connect, interval};

const PORT: u16 = 7;

/// Time under load before the first handoff, and between two.
const PAUSE: Duration = Duration::from_millis(300);

/// Measures one row; one of the connections is the probe.
pub fn run(connections: usize, repeats: usize) -> Result<Row> {
    let mut spec =
        ClusterSpec::new(format!("bench{connections}")).program(Program::Echo { port: PORT });
    spec.log = "warn".into();
    spec.program_log = "warn".into();
    for service in &mut spec.services {
        service.weights = [("n1".into(), 0), ("n2".into(), 1), ("n3".into(), 0)].into();
    }
    let cluster = Cluster::up(spec)?;
    let service = SocketAddr::new(cluster.service_address(Family::V4), PORT);
    let mut streams = connect(cluster.lab(), "c1", service, connections)?;
    let probe_stream = streams.pop().context("at least one connection")?;
    let load = Load::start(streams, interval(connections))?;
    let shared = load.compared.clone();
    let probe = std::thread::spawn({
        let shared = shared.clone();
        move || ping_pong(probe_stream, &shared)
    });
    std::thread::sleep(PAUSE * 3);
    let before = Counts::read(&cluster)?;
    let measured = measure(&cluster, repeats);
    std::thread::sleep(PAUSE);
    let network = Counts::read(&cluster)?.since(&before);
    load.stop()?;
    let trips = probe.join().expect("the probe does not panic")?;
    let (samples, times, controls) = measured?;
    let verified = Verified {
        verified: shared.verified.load(Ordering::Relaxed),
        wrong: shared.wrong.load(Ordering::Relaxed),
    };
    let gaps = Gaps::of(&trips, times, &controls);
    Ok(row(&samples, gaps, false, &network, &verified))
}

/// The handoffs, their periods, and their control periods.
type Measured = (Vec<Sample>, Vec<Span>, Vec<Span>);

fn measure(cluster: &Cluster, repeats: usize) -> Result<Measured> {
    let mut samples = Vec::with_capacity(repeats);
    let mut times = Vec::with_capacity(repeats);
    let mut controls = Vec::with_capacity(repeats);
    for round in 0..repeats {
        let (from, to) = (HOMES[round % 2], HOMES[(round + 1) % 2]);
        let begin = Instant::now();
        let sample = hand_over(cluster, "echo", from, to, Drain::None);
        samples.push(sample.map_err(|error| cluster.with_logs(error))?);
        let time = (begin, Instant::now());
        times.push(time);
        controls.push(control(time));
        std::thread::sleep(PAUSE);
    }
    Ok((samples, times, controls))
}
