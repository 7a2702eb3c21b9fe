//! A pool element that numbers the lines of each session. After each line it gives its user the session's state to
//! store, so that another element continues with the next number when this one dies.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use holdfast_api::pool::{self, Element, ElementEvent, ElementService, RegistrationRequest};

/// A pool element that numbers the lines of each session.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: rserpoold pool & lines --handle lines & holdfast pool connect lines"
)]
struct Flags {
    /// The pool's handle.
    #[arg(long, default_value = "lines")]
    handle: String,
    /// The pool daemon's socket for programs.
    #[arg(long, value_name = "PATH", default_value = pool::SOCKET_PATH)]
    socket: PathBuf,
    /// Address for users; repeatable [default: the address used towards the registrar].
    #[arg(long, value_name = "ADDRESS")]
    address: Vec<IpAddr>,
    /// SCTP port for users [default: the system chooses].
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// A file with the 64 hexadecimal digits of the key that signs states: the same for all elements of the pool.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

fn main() -> Result<()> {
    let flags = Flags::parse();
    let service = ElementService::Sessions {
        addresses: flags.address,
        port: flags.port,
    };
    let mut registration = RegistrationRequest::new(&flags.handle, service);
    match &flags.key {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            registration.cookie_keys = vec![parse_key(text.trim())?];
        }
        None => eprintln!("lines: no --key: states from users are accepted without a signature"),
    }
    let element = Element::register(&flags.socket, registration).with_context(|| {
        let path = flags.socket.display();
        format!("no pool daemon at {path}; start one with `rserpoold pool`")
    })?;
    serve(&element)
}

fn parse_key(text: &str) -> Result<[u8; 32]> {
    let error = "a key has 64 hexadecimal digits";
    if text.len() != 64 || !text.is_ascii() {
        bail!(error);
    }
    let mut key = [0; 32];
    for (index, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).context(error)?;
    }
    Ok(key)
}

/// A session: the state from which another element continues.
#[derive(Debug, Default, PartialEq, Eq)]
struct Session {
    count: u64,
    /// The start of an incomplete line.
    partial_line: Vec<u8>,
}

impl Session {
    fn state(&self) -> Vec<u8> {
        let mut state = self.count.to_be_bytes().to_vec();
        state.extend(&self.partial_line);
        state
    }

    fn from_state(state: &[u8]) -> Option<Session> {
        let (count, begun) = state.split_first_chunk()?;
        Some(Session {
            count: u64::from_be_bytes(*count),
            partial_line: begun.to_vec(),
        })
    }

    /// Handles received bytes; returns the answer.
    fn receive(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut answer = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial_line.extend(part);
            if part.ends_with(b"\n") {
                self.count += 1;
                answer.extend(format!("{} ", self.count).into_bytes());
                answer.append(&mut self.partial_line);
            }
        }
        answer
    }
}

fn serve(element: &Element) -> Result<()> {
    let mut sessions: HashMap<u64, Session> = HashMap::new();
    while let Some(event) = element.next_event()? {
        match event {
            ElementEvent::Registered { id, .. } => println!("registered as {id}"),
            ElementEvent::Refused { reason } => bail!("{reason}"),
            ElementEvent::Connected { session, .. } => {
                sessions.insert(session, Session::default());
            }
            ElementEvent::Resumed { session, state } => {
                if let Some(known) = Session::from_state(&state) {
                    println!("session {session} resumes after line {}", known.count);
                    sessions.insert(session, known);
                }
            }
            ElementEvent::Data { session, bytes } => {
                let session_state = sessions.entry(session).or_default();
                let answer = session_state.receive(&bytes);
                // Store the state first: then a user that has the answer also has the state that includes it.
                element.store_state(session, &session_state.state())?;
                for part in answer.chunks(pool::DATA_BYTES_MAX) {
                    element.send(session, part)?;
                }
            }
            ElementEvent::Closed { session } => drop(sessions.remove(&session)),
            ElementEvent::HomeLost => println!("lost the registrar"),
            ElementEvent::Home { .. }
            | ElementEvent::NoRegistrar
            | ElementEvent::Expired
            | ElementEvent::Deregistered(_) => {}
        }
    }
    bail!("the pool daemon has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_continues_from_its_state_after_any_cut() {
        let text = b"a\nbb\n\nccc\nd";
        let mut uncut = Session::default();
        let answer = uncut.receive(text);
        assert_eq!(answer, b"1 a\n2 bb\n3 \n4 ccc\n");
        for cut in 0..=text.len() {
            let mut first = Session::default();
            let mut answers = first.receive(&text[..cut]);
            let mut second = Session::from_state(&first.state()).unwrap();
            answers.extend(second.receive(&text[cut..]));
            assert_eq!((answers, &second), (answer.clone(), &uncut), "{cut}");
        }
        assert_eq!(Session::from_state(b"short"), None);
    }

    #[test]
    fn key_needs_64_hexadecimal_digits() {
        assert_eq!(parse_key(&"0f".repeat(32)).unwrap(), [15; 32]);
        for wrong in ["", "0f", &"zz".repeat(32), &"é".repeat(32)] {
            assert!(parse_key(wrong).is_err(), "{wrong}");
        }
    }
}
