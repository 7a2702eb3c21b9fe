//! Corpus of Reliable Server Pooling: messages, streams of them, a registrar's life cycle, and messages between
//! programs and the pool daemon.

use crate::write_input;
use bytes::BytesMut;
use holdfast_api::app;
use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{
    DeregistrationResult, ElementEvent, ElementService, FromPool, RegistrationRequest,
    SessionEvent, SessionOptions, ToPool,
};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{ElementId, PoolHandle};
use std::path::Path;

pub fn write_pool_messages() -> std::io::Result<()> {
    let service = ElementService::Sctp(vec!["10.0.0.1:80".parse().expect("an address")]);
    let mut registration = RegistrationRequest::new("web", service);
    registration.policy.weight = Some(3);
    registration.cookie_keys.push([7; 32]);
    let load = PolicyDetail {
        name: "LU".to_owned(),
        load: Some(0.5),
        ..PolicyDetail::default()
    };
    let (session, handle) = (1, "web".to_owned());
    let to_pool = [
        ToPool::Register(registration),
        ToPool::Policy(load),
        ToPool::Open {
            handle,
            options: SessionOptions::default(),
        },
        ToPool::Data {
            receiver: session,
            bytes: b"data".to_vec(),
        },
        ToPool::StoreState {
            session,
            state: b"state".to_vec(),
        },
        ToPool::Finish {
            connection: session,
        },
    ];
    for (index, message) in to_pool.iter().enumerate() {
        let bytes = app::encode(message).expect("small");
        write_input("pool", &format!("to-{index}"), &bytes)?;
    }
    let reason = "why".to_owned();
    let up = SessionEvent::Up {
        connection: session,
        element: "00000011".to_owned(),
        transport: "tcp".to_owned(),
        addresses: vec!["[fd00::1]:80".parse().expect("an address")],
        resumed: true,
    };
    let from_pool = [
        FromPool::Element(ElementEvent::Deregistered(DeregistrationResult::Refused {
            reason,
        })),
        FromPool::Element(ElementEvent::Data {
            session,
            bytes: b"data".to_vec(),
        }),
        FromPool::Session(up),
        FromPool::Error("why".to_owned()),
    ];
    for (index, message) in from_pool.iter().enumerate() {
        let bytes = app::encode(message).expect("small");
        write_input("pool", &format!("from-{index}"), &bytes)?;
    }
    Ok(())
}

/// Writes a life cycle, and streams of rsplib's messages from the folders `asap` and `enrp`.
pub fn write_registrar_streams() -> std::io::Result<()> {
    write_input(
        "registrar",
        "life",
        &holdfast_fuzz::registrar::element_life_cycle(),
    )?;
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (protocol, from) in [("asap", 1), ("enrp", 5)] {
        let mut files = std::fs::read_dir(corpus.join(protocol))?
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()?;
        files.sort();
        for (index, chunk) in files.chunks(8).enumerate() {
            let mut stream = Vec::new();
            for file in chunk {
                let message = std::fs::read(file)?;
                stream.extend(holdfast_fuzz::registrar::record(from, 7, &message));
            }
            write_input("registrar", &format!("{protocol}-{index}"), &stream)?;
        }
    }
    Ok(())
}

/// Writes streams of rsplib's messages, to be read in pieces of different lengths.
pub fn write_asap_streams() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/asap");
    let mut files = std::fs::read_dir(corpus)?
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<Vec<_>>>()?;
    files.sort();
    for (index, some) in files.chunks(8).enumerate() {
        let mut stream = vec![index as u8 * 7];
        for file in some {
            stream.extend(std::fs::read(file)?);
        }
        write_input("stream", &format!("{index}"), &stream)?;
    }
    Ok(())
}

/// Writes the first of rsplib's messages of each type, flags and length, and Holdfast's own messages.
pub fn write_rserpool_messages() -> std::io::Result<()> {
    let (handle, id) = (PoolHandle::from("web"), ElementId(0x1234_5678));
    let answer = |latency_us| Message::ProbeAnswer {
        handle: handle.clone(),
        id,
        in_flight: 3,
        latency_us,
    };
    let probe = Message::Probe {
        handle: handle.clone(),
        id,
    };
    for message in [probe, answer(None), answer(Some(1500))] {
        let mut bytes = BytesMut::new();
        message.encode(&mut bytes).expect("small");
        let name = format!("{:02x}-{}-{}", bytes[0], bytes[1], bytes.len());
        write_input("asap", &name, &bytes)?;
    }
    let vectors = include_str!("../../../crates/wire/tests/vectors/rserpool.jsonl");
    let mut seen = std::collections::HashSet::new();
    for line in vectors.lines() {
        let protocol = if line.starts_with("{\"ppid\":11,") {
            "asap"
        } else {
            "enrp"
        };
        let hex = line
            .split('"')
            .rfind(|text| text.len() >= 16)
            .expect("a message");
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let name = format!("{:02x}-{}-{}", bytes[0], bytes[1], bytes.len());
        if seen.insert((protocol, name.clone())) {
            write_input(protocol, &name, &bytes)?;
        }
    }
    Ok(())
}
