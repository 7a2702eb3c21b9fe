//! An SCTP association between two endpoints of this process, encapsulated in UDP over loopback: connects, sends a
//! message, receives the answer, and ends. Uses the kernel's SCTP if there is one, or else libusrsctp.
//!
//! `cargo run -p holdfast-sctp --example association`

use bytes::Bytes;
use holdfast_sctp::{MessageToSend, TransportConfig, TransportEvent, open, provider};
use std::error::Error;
use std::time::{Duration, Instant};

/// Payload protocol identifier of the messages (RFC 9260, section 3.3.1).
const PPID: u32 = 7;
const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait at one of the endpoints before the other one is asked.
const WAIT_LIMIT: Duration = Duration::from_millis(5);

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
    let mut events = Vec::new();
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        server.wait_for_events(WAIT_LIMIT, &mut events)?;
        for event in events.drain(..) {
            if let TransportEvent::Message { assoc, message } = event {
                println!("server: {:?}", message.data);
                let answer = Bytes::from_static(b"answer");
                server.send(assoc, &MessageToSend::new(PPID, answer))?;
            }
        }
        client.wait_for_events(WAIT_LIMIT, &mut events)?;
        for event in events.drain(..) {
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
