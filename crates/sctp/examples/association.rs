//! An SCTP association between two endpoints of this process, encapsulated in UDP over loopback: connects, sends a
//! message, receives the answer, and ends. Uses the kernel's SCTP if there is one, or else libusrsctp.
//!
//! `cargo run -p holdfast-sctp --example association`

use bytes::Bytes;
use holdfast_sctp::{
    MessageToSend, TransportConfig, TransportEndpoint, TransportEvent, open, provider,
};
use std::error::Error;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Payload protocol identifier of the messages (RFC 9260, section 3.3.1).
const PPID: u32 = 7;
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    println!("SCTP: {:?}", provider());
    let config = || TransportConfig {
        encapsulation: Some(0),
        raw: false,
        ..TransportConfig::new(vec![([127, 0, 0, 1], 0).into()])
    };
    let mut server = open(&config())?;
    let mut client = open(&config())?;
    let port = server.encapsulation_port();
    let assoc = client.connect(&server.local_addresses()?[..1], port)?;
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        for event in wait_for_events(server.as_mut())? {
            if let TransportEvent::Message { assoc, message } = event {
                println!("server: {:?}", message.data);
                let answer = Bytes::from_static(b"answer");
                server.send(assoc, &MessageToSend::new(PPID, answer))?;
            }
        }
        for event in wait_for_events(client.as_mut())? {
            match event {
                TransportEvent::Up { .. } => {
                    println!("client: associated");
                    let question = Bytes::from_static(b"question");
                    client.send(assoc, &MessageToSend::new(PPID, question))?;
                }
                TransportEvent::Message { message, .. } => {
                    println!("client: {:?}", message.data);
                    client.shutdown(assoc)?;
                }
                TransportEvent::Down { reason, .. } => {
                    println!("client: ended ({reason:?})");
                    return Ok(());
                }
                _ => {}
            }
        }
    }
    Err("no answer".into())
}

/// Sends what is queued, waits a moment for packets, and returns what has happened.
fn wait_for_events(
    endpoint: &mut dyn TransportEndpoint,
) -> Result<Vec<TransportEvent>, Box<dyn Error>> {
    endpoint.flush()?;
    let mut poll = libc::pollfd {
        fd: endpoint.fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: the call gets one structure, and the structure outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 5) };
    let mut events = Vec::new();
    endpoint.recv_batch(&mut events)?;
    Ok(events)
}
