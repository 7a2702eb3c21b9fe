//! Rows whose connections exchange small messages all the time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use holdfast_api::Drain;

use super::counts::Counts;
use super::stats::{Quantiles, Verified};
use super::{HOMES, Row, Sample, hand_over, row};
use crate::cluster::{Cluster, ClusterSpec, Family, Program};
use crate::load::{Compared, HUNG, Load, MESSAGE, connect, fill, interval};

const PORT: u16 = 7;

/// Let the load run before the first handoff, and between two.
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
        move || probe(probe_stream, &shared)
    });
    std::thread::sleep(PAUSE * 3);
    let before = Counts::read(&cluster)?;
    let measured = measure(&cluster, repeats);
    std::thread::sleep(PAUSE);
    let network = Counts::read(&cluster)?.since(&before);
    load.stop()?;
    let trips = probe.join().expect("the probe does not panic")?;
    let (samples, times) = measured?;
    let verified = Verified {
        verified: shared.verified.load(Ordering::Relaxed),
        wrong: shared.wrong.load(Ordering::Relaxed),
    };
    Ok(row(
        &samples,
        gaps(&trips, &times),
        false,
        &network,
        &verified,
    ))
}

type Span = (Instant, Instant);

fn measure(cluster: &Cluster, repeats: usize) -> Result<(Vec<Sample>, Vec<Span>)> {
    let mut samples = Vec::with_capacity(repeats);
    let mut times = Vec::with_capacity(repeats);
    for round in 0..repeats {
        let (from, to) = (HOMES[round % 2], HOMES[(round + 1) % 2]);
        let begin = Instant::now();
        let sample = hand_over(cluster, "echo", from, to, Drain::None);
        samples.push(sample.map_err(|error| cluster.with_logs(error))?);
        times.push((begin, Instant::now()));
        std::thread::sleep(PAUSE);
    }
    Ok((samples, times))
}

/// The longest round trip around each handoff, less the median one, microseconds.
fn gaps(trips: &[(Instant, Duration)], times: &[Span]) -> Vec<f64> {
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let median = Quantiles::of(trips.iter().map(|(_, trip)| us(*trip)).collect()).median();
    times
        .iter()
        .map(|(begin, end)| {
            let during = trips
                .iter()
                .filter(|(sent, trip)| *sent <= *end && *sent + *trip >= *begin);
            during.map(|(_, trip)| us(*trip)).fold(0.0, f64::max) - median
        })
        .collect()
}

/// Ping-pongs every millisecond.
fn probe(mut stream: TcpStream, shared: &Compared) -> Result<Vec<(Instant, Duration)>> {
    stream.set_read_timeout(Some(HUNG))?;
    let mut trips = Vec::new();
    let mut next = Instant::now();
    let (mut message, mut answer) = ([0; MESSAGE], [0; MESSAGE]);
    for turn in 0.. {
        if shared.is_stopped() {
            break;
        }
        fill(&mut message, u64::MAX, turn);
        let sent = Instant::now();
        stream.write_all(&message)?;
        if stream.read_exact(&mut answer).is_err() {
            shared.lost();
            break;
        }
        trips.push((sent, sent.elapsed()));
        shared.compare(&message, &answer);
        next = (next + Duration::from_millis(1)).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(trips)
}
