//! Rows with full send queues: downloads limited by the client's link move over links of 100 Mbit/s between the nodes,
//! at once or after a drain (paper 000, Figure 2).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use holdfast_api::Drain;
use holdfast_lab::{LinkEntry, Topology};
use holdfast_sys::sysctl;
use sha2::{Digest, Sha256};
use socket2::{Domain, Socket, Type};

use super::{HandoffRow, SERVER_NODES, build_row, hand_off_pool};
use holdfast_testbed::cluster::{Cluster, ClusterSpec, ExampleServer, IpFamily};
use holdfast_testbed::latency_probe::ProbeGaps;
use holdfast_testbed::network_counters::NetworkCounters;
use holdfast_testbed::stats::VerifiedBytes;

const PORT: u16 = 80;
/// Rate of the nodes' links, as in the paper.
const NODE_MBIT: f64 = 100.0;

/// Rate of the client's link: data queues up here and in the servers' send queues, not on the links that transfer the
/// state.
const CLIENT_MBIT: f64 = 50.0;

/// Packets that the client's link queues: more than all windows, so that no packet is lost.
const CLIENT_QUEUE_PACKETS: usize = 4096;

/// Size of the servers' send buffers in bytes, by the kernel's accounting: for slightly more than the paper's 90 kB of
/// data.
const SEND_BUFFER_BYTES: usize = 192 << 10;

/// Sysctl that limits the send buffers.
const SEND_BUFFER_SYSCTL: &str = "net/ipv4/tcp_wmem";

/// Size of the clients' receive buffers, bytes: windows that a send buffer fills.
const RECEIVE_BUFFER_BYTES: usize = 32 << 10;

/// Handoffs during the downloads.
const HANDOFFS: usize = 4;

/// Bytes of all downloads together: about 10 s of the client's link.
const TOTAL_BYTES: usize = 60_000_000;

/// Longest wait for a queue, milliseconds.
const DRAIN_MS_MAX: u32 = 10_000;

fn start_cluster(connections: usize) -> Result<Cluster> {
    let mut client = LinkEntry::for_host("c1");
    client.rate_mbit = Some(CLIENT_MBIT);
    client.queue_packets = Some(CLIENT_QUEUE_PACKETS);
    let mut topology = Topology::default().with_entry(client);
    for node in SERVER_NODES {
        let mut link = LinkEntry::for_host(node);
        link.rate_mbit = Some(NODE_MBIT);
        topology = topology.with_entry(link);
    }
    let mut spec =
        ClusterSpec::new(format!("queue{connections}")).program(ExampleServer::FileServer {
            port: PORT,
            rate_mbit: None,
        });
    spec.topology = topology;
    spec.log = "warn".into();
    spec.program_log = "warn".into();
    for service in &mut spec.services {
        service.weights = [("n1".into(), 0), ("n2".into(), 1), ("n3".into(), 0)].into();
    }
    let cluster = Cluster::up(spec)?;
    for node in SERVER_NODES {
        let limit = || {
            sysctl::write(
                SEND_BUFFER_SYSCTL,
                &format!("4096 16384 {SEND_BUFFER_BYTES}"),
            )
        };
        cluster
            .lab()
            .run_in_net_namespace(node, limit)?
            .context(SEND_BUFFER_SYSCTL)?;
    }
    Ok(cluster)
}

/// Measures handoffs of connections with full send queues.
pub fn run(connections: usize, drained: bool) -> Result<HandoffRow> {
    let cluster = start_cluster(connections)?;
    let service = SocketAddr::new(cluster.service_address(IpFamily::V4), PORT);
    let size = TOTAL_BYTES / connections;
    let expected = measure_download(
        connect(&cluster, service)?,
        &format!("/synthetic/{size}.sha256"),
    )?;
    let expected = String::from_utf8_lossy(&expected.body)
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned();
    let streams = (0..connections)
        .map(|_| connect(&cluster, service))
        .collect::<Result<Vec<_>>>()?;
    let before = NetworkCounters::read(&cluster)?;
    let downloads: Vec<_> = streams
        .into_iter()
        .map(|stream| {
            std::thread::spawn(move || measure_download(stream, &format!("/synthetic/{size}")))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(1500));
    let drain = if drained {
        Drain::First {
            max_wait_ms: DRAIN_MS_MAX,
        }
    } else {
        Drain::None
    };
    let mut samples = Vec::new();
    for round in 0..HANDOFFS {
        let (from, to) = (SERVER_NODES[round % 2], SERVER_NODES[(round + 1) % 2]);
        samples.push(
            hand_off_pool(&cluster, "files", from, to, drain)
                .map_err(|error| cluster.with_logs(error))?,
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    let network = NetworkCounters::read(&cluster)?.since(&before);
    let mut verified = VerifiedBytes::default();
    let mut gaps = Vec::new();
    for download in downloads {
        let got = download.join().expect("a download does not panic")?;
        verified.verified += got.body_bytes as u64;
        if got.digest != expected {
            verified.wrong += size as u64;
        }
        gaps.push(got.gap.as_secs_f64() * 1e6);
    }
    let gaps = ProbeGaps {
        moves_us: gaps,
        control_us: Vec::new(),
    };
    Ok(build_row(&samples, gaps, drained, &network, &verified))
}

fn connect(cluster: &Cluster, service: SocketAddr) -> Result<TcpStream> {
    let open = || {
        let socket = Socket::new(Domain::for_address(service), Type::STREAM, None)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.connect(&service.into())?;
        Ok::<TcpStream, std::io::Error>(socket.into())
    };
    cluster
        .lab()
        .run_in_net_namespace("c1", open)?
        .context("connect to the service address")
}

struct Download {
    /// Beginning of the body.
    body: Vec<u8>,
    body_bytes: usize,
    digest: String,
    /// Longest time without data.
    gap: Duration,
}

/// Fetches a path over HTTP/1.1; hashes the body, and keeps its first bytes.
fn measure_download(mut stream: TcpStream, path: &str) -> Result<Download> {
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n"
    )?;
    let mut buffer = vec![0; 1 << 16];
    let mut head = Vec::new();
    let body_at = loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            bail!("the server closed the connection before the body of {path}");
        }
        head.extend_from_slice(&buffer[..count]);
        if let Some(at) = head.windows(4).position(|four| four == b"\r\n\r\n") {
            break at + 4;
        }
    };
    if !head.starts_with(b"HTTP/1.1 200") {
        bail!(
            "{path}: {}",
            String::from_utf8_lossy(&head)
                .lines()
                .next()
                .unwrap_or_default()
        );
    }
    let mut digest = Sha256::new();
    let body = head.split_off(body_at);
    digest.update(&body);
    let (mut body_bytes, mut gap, mut last) = (body.len(), Duration::ZERO, Instant::now());
    loop {
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        gap = gap.max(last.elapsed());
        last = Instant::now();
        digest.update(&buffer[..count]);
        body_bytes += count;
    }
    let digest = digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(Download {
        body,
        body_bytes,
        digest,
        gap,
    })
}
