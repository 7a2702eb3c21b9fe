//! Rows whose connections exchange small messages all the time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use holdfast_api::Drain;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::counts::Counts;
use super::stats::{Quantiles, Verified};
use super::{HOMES, Row, Sample, hand_over, row};
use crate::cluster::{Cluster, ClusterSpec, Family, Program};

const PORT: u16 = 7;
const MESSAGE: usize = 256;

/// Connections from here on exchange twice a second instead of 20 times.
const MANY: usize = 5_000;

/// Let the load run before the first handoff, and between two.
const PAUSE: Duration = Duration::from_millis(300);

/// How long a connection may be silent before it counts as hung.
const HUNG: Duration = Duration::from_secs(20);

/// What all clients share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    verified: AtomicU64,
    wrong: AtomicU64,
}

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
    let mut streams = connect(&cluster, service, connections)?;
    let shared = Arc::new(Shared::default());
    let probe_stream = streams.pop().context("at least one connection")?;
    let probe = std::thread::spawn({
        let shared = shared.clone();
        move || probe(probe_stream, &shared)
    });
    let interval = Duration::from_millis(if connections >= MANY { 500 } else { 50 });
    let load = std::thread::spawn({
        let shared = shared.clone();
        move || load(streams, interval, &shared)
    });
    std::thread::sleep(PAUSE * 3);
    let before = Counts::read(&cluster)?;
    let measured = measure(&cluster, repeats);
    std::thread::sleep(PAUSE);
    let network = Counts::read(&cluster)?.since(&before);
    shared.stop.store(true, Ordering::Relaxed);
    let trips = probe.join().expect("the probe does not panic")?;
    load.join().expect("the load does not panic")?;
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

fn connect(cluster: &Cluster, service: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    let streams = cluster.lab().in_net("c1", || {
        (0..count)
            .map(|_| {
                let stream = TcpStream::connect(service)?;
                stream.set_nodelay(true)?;
                Ok(stream)
            })
            .collect::<std::io::Result<Vec<TcpStream>>>()
    })?;
    streams.context("connect to the service address")
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
fn probe(mut stream: TcpStream, shared: &Shared) -> Result<Vec<(Instant, Duration)>> {
    stream.set_read_timeout(Some(HUNG))?;
    let mut trips = Vec::new();
    let mut next = Instant::now();
    let (mut message, mut answer) = ([0; MESSAGE], [0; MESSAGE]);
    for turn in 0.. {
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        fill(&mut message, u64::MAX, turn);
        let sent = Instant::now();
        stream.write_all(&message)?;
        if stream.read_exact(&mut answer).is_err() {
            shared.wrong.fetch_add(MESSAGE as u64, Ordering::Relaxed);
            break;
        }
        trips.push((sent, sent.elapsed()));
        compare(&message, &answer, shared);
        next = (next + Duration::from_millis(1)).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    Ok(trips)
}

fn load(streams: Vec<TcpStream>, interval: Duration, shared: &Arc<Shared>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let local = tokio::task::LocalSet::new();
    let count = streams.len().max(1) as u32;
    local.block_on(&runtime, async {
        let mut tasks = tokio::task::JoinSet::new();
        for (number, stream) in (0u32..).zip(streams) {
            stream.set_nonblocking(true)?;
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let delay = interval * number / count;
            tasks.spawn_local(exchange(
                stream,
                u64::from(number),
                delay,
                interval,
                shared.clone(),
            ));
        }
        while tasks.join_next().await.is_some() {}
        Ok(())
    })
}

/// Sends a message and compares the answer, again and again.
async fn exchange(
    mut stream: tokio::net::TcpStream,
    number: u64,
    delay: Duration,
    interval: Duration,
    shared: Arc<Shared>,
) {
    tokio::time::sleep(delay).await;
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut message, mut answer) = ([0; MESSAGE], [0; MESSAGE]);
    for turn in 0.. {
        ticks.tick().await;
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        fill(&mut message, number, turn);
        let trip = async {
            stream.write_all(&message).await?;
            stream.read_exact(&mut answer).await
        };
        match tokio::time::timeout(HUNG, trip).await {
            Ok(Ok(_)) => compare(&message, &answer, &shared),
            _ => {
                shared.wrong.fetch_add(MESSAGE as u64, Ordering::Relaxed);
                return;
            }
        }
    }
}

/// Bytes that no other message has.
fn fill(message: &mut [u8; MESSAGE], number: u64, turn: u64) {
    let mut state = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ turn) | 1;
    for chunk in message.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes());
    }
}

fn compare(message: &[u8; MESSAGE], answer: &[u8; MESSAGE], shared: &Shared) {
    let wrong = message.iter().zip(answer).filter(|(a, b)| a != b).count() as u64;
    shared.wrong.fetch_add(wrong, Ordering::Relaxed);
    shared
        .verified
        .fetch_add(2 * MESSAGE as u64, Ordering::Relaxed);
}
