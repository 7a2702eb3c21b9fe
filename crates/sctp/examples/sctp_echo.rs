//! An SCTP echo between two hosts, for `scripts/guest/transport.sh`.
//!
//!     sctp_echo serve LOCAL UDP_PORT           answers until a peer says "end" twice
//!     sctp_echo ask LOCAL REMOTE UDP_PORT      raw with port 0; asks, and says "end"

use bytes::Bytes;
use holdfast_sctp::{
    MessageToSend, TransportConfig, TransportEndpoint, TransportEvent, open, provider,
};
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Longest wait for the other host, which may still be starting.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait for events before the time is checked.
const EVENT_WAIT: Duration = Duration::from_millis(100);
const PPID: u32 = 11;
/// Messages of one to many fragments.
const LENGTHS: [usize; 4] = [1, 100, 1400, 100_000];

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    println!("provider {:?}", provider());
    match words[..] {
        ["serve", local, udp] => run_server(local.parse()?, udp.parse()?),
        ["ask", local, remote, udp] => run_client(local.parse()?, remote.parse()?, udp.parse()?),
        _ => Err("serve LOCAL UDP_PORT | ask LOCAL REMOTE UDP_PORT".into()),
    }
}

fn endpoint(local: SocketAddr, udp: u16) -> Result<Box<dyn TransportEndpoint>, Box<dyn Error>> {
    let config = TransportConfig {
        encapsulation: Some(udp),
        ..TransportConfig::new(vec![local])
    };
    Ok(open(&config)?)
}

fn run_server(local: SocketAddr, udp: u16) -> Result<(), Box<dyn Error>> {
    let mut endpoint = endpoint(local, udp)?;
    let (mut events, mut ends) = (Vec::new(), 0);
    while ends < 2 {
        endpoint.wait_for_events(EVENT_WAIT, &mut events)?;
        for event in events.drain(..) {
            if let TransportEvent::Message { assoc, message } = event {
                ends += usize::from(message.data == "end");
                endpoint.send(assoc, &message)?;
            }
        }
    }
    wait_for_end(endpoint.as_mut())
}

fn run_client(local: SocketAddr, remote: SocketAddr, udp: u16) -> Result<(), Box<dyn Error>> {
    let deadline = Instant::now() + TIMEOUT;
    let mut endpoint = endpoint(local, 0)?;
    let mut assoc = endpoint.connect(&[remote], Some(udp).filter(|&port| port > 0))?;
    let mut messages: Vec<MessageToSend> = LENGTHS
        .iter()
        .map(|&len| MessageToSend::new(PPID, Bytes::from(vec![7; len])))
        .collect();
    messages.push(MessageToSend::new(PPID, "end".into()));
    let (mut events, mut answers) = (Vec::new(), 0);
    while answers < messages.len() {
        if Instant::now() > deadline {
            return Err(format!("{remote}: no answer in time").into());
        }
        endpoint.wait_for_events(EVENT_WAIT, &mut events)?;
        for event in events.drain(..) {
            match event {
                TransportEvent::Up { .. } => {
                    for message in &messages {
                        endpoint.send(assoc, message)?;
                    }
                }
                TransportEvent::Down { .. } => {
                    assoc = endpoint.connect(&[remote], Some(udp).filter(|&port| port > 0))?;
                }
                TransportEvent::Message { message, .. } => {
                    assert_eq!(message, messages[answers], "another answer than question");
                    answers += 1;
                }
                _ => {}
            }
        }
    }
    let encapsulation = if udp == 0 { "raw" } else { "inside UDP" };
    let round_trip = endpoint.round_trip(assoc)?;
    println!("{remote} {encapsulation}: {answers} answers, round trip {round_trip:?}");
    endpoint.shutdown(assoc)?;
    wait_for_end(endpoint.as_mut())
}

/// Lets the associations end.
fn wait_for_end(endpoint: &mut dyn TransportEndpoint) -> Result<(), Box<dyn Error>> {
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        let mut events = Vec::new();
        endpoint.wait_for_events(EVENT_WAIT, &mut events)?;
        if events
            .iter()
            .any(|event| matches!(event, TransportEvent::Down { .. }))
        {
            break;
        }
    }
    Ok(())
}
