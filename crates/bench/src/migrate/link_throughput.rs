//! Throughput of the link between two nodes.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use holdfast_lab::{Lab, LabSpec, Topology};

/// Duration of the measurement.
const MEASURE_DURATION: Duration = Duration::from_millis(500);
const CHUNK_BYTES: usize = 1 << 18;

/// Returns the throughput of one TCP connection between two nodes of such a lab, Mbit/s.
pub fn measure_throughput(topology: &Topology) -> Result<f64> {
    let name = format!("link-{}", std::process::id());
    let spec = LabSpec::new(&name).nodes(2).topology(topology.clone());
    let lab = Lab::up(&spec).context("bring the lab up")?;
    let address = SocketAddr::new(lab.address("n2")?.0.into(), 7200);
    let listener = lab.run_in_net_namespace("n2", || TcpListener::bind(address))??;
    let sender = lab.run_in_net_namespace("n1", || TcpStream::connect(address))??;
    let (receiver, _) = listener.accept()?;
    let sending = std::thread::spawn(move || send(sender));
    let rate = measure_receive_rate(receiver);
    sending.join().expect("the sender does not panic");
    rate
}

fn send(mut stream: TcpStream) {
    let begin = Instant::now();
    let chunk = vec![0; CHUNK_BYTES];
    while begin.elapsed() < MEASURE_DURATION {
        if stream.write_all(&chunk).is_err() {
            return;
        }
    }
}

fn measure_receive_rate(mut stream: TcpStream) -> Result<f64> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let (begin, mut bytes) = (Instant::now(), 0);
    loop {
        match stream.read(&mut chunk)? {
            0 => return Ok(bytes as f64 * 8.0 / begin.elapsed().as_secs_f64() / 1e6),
            length => bytes += length,
        }
    }
}
