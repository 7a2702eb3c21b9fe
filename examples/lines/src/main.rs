//! A pool element that numbers the lines of each session. After each line it gives its user the session's state to
//! store, so that another element continues with the next number when this one dies.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use holdfast_api::pool::{self, Element, ElementEvent, Registration, Service};

/// A pool element that numbers the lines of each session.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: holdfastd --role pool & lines --handle lines & holdfast pool connect lines"
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
    let service = Service::Sessions {
        addresses: flags.address,
        port: flags.port,
    };
    let mut registration = Registration::new(&flags.handle, service);
    match &flags.key {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            registration.cookie_keys = vec![key(text.trim())?];
        }
        None => eprintln!("lines: no --key: whatever state a user brings is believed"),
    }
    let element = Element::register(&flags.socket, registration).with_context(|| {
        let path = flags.socket.display();
        format!("no pool daemon at {path}; start one with `holdfastd --role pool`")
    })?;
    serve(&element)
}

fn key(text: &str) -> Result<[u8; 32]> {
    let wrong = "a key has 64 hexadecimal digits";
    if text.len() != 64 || !text.is_ascii() {
        bail!(wrong);
    }
    let mut key = [0; 32];
    for (index, byte) in key.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).context(wrong)?;
    }
    Ok(key)
}

/// A session: the state from which another element continues.
#[derive(Debug, Default, PartialEq, Eq)]
struct Session {
    count: u64,
    /// The start of an incomplete line.
    begun: Vec<u8>,
}

impl Session {
    fn state(&self) -> Vec<u8> {
        let mut state = self.count.to_be_bytes().to_vec();
        state.extend(&self.begun);
        state
    }

    fn from_state(state: &[u8]) -> Option<Session> {
        let (count, begun) = state.split_first_chunk()?;
        Some(Session {
            count: u64::from_be_bytes(*count),
            begun: begun.to_vec(),
        })
    }

    /// Handles received bytes; returns the answer.
    fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut answer = Vec::new();
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend(part);
            if part.ends_with(b"\n") {
                self.count += 1;
                answer.extend(format!("{} ", self.count).into_bytes());
                answer.append(&mut self.begun);
            }
        }
        answer
    }
}

fn serve(element: &Element) -> Result<()> {
    let mut sessions: HashMap<u64, Session> = HashMap::new();
    while let Some(event) = element.next()? {
        match event {
            ElementEvent::Registered { id, .. } => println!("registered as {id}"),
            ElementEvent::Refused { reason } => bail!("{reason}"),
            ElementEvent::Connected { session, .. } => {
                sessions.insert(session, Session::default());
            }
            ElementEvent::Resumed { session, state } => {
                if let Some(known) = Session::from_state(&state) {
                    println!("session {session} goes on after line {}", known.count);
                    sessions.insert(session, known);
                }
            }
            ElementEvent::Data { session, bytes } => {
                let known = sessions.entry(session).or_default();
                let answer = known.take(&bytes);
                // Store the state first: then a user that has the answer also has the state that includes it.
                element.keep(session, &known.state())?;
                for part in answer.chunks(pool::DATA_BYTES_MAX) {
                    element.send(session, part)?;
                }
            }
            ElementEvent::Closed { session } => drop(sessions.remove(&session)),
            ElementEvent::HomeLost => println!("the registrar is lost"),
            ElementEvent::Home { .. }
            | ElementEvent::NoRegistrar
            | ElementEvent::Expired
            | ElementEvent::Left(_) => {}
        }
    }
    bail!("the pool daemon has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_goes_on_from_its_state_wherever_it_is_cut() {
        let text = b"a\nbb\n\nccc\nd";
        let mut whole = Session::default();
        let answer = whole.take(text);
        assert_eq!(answer, b"1 a\n2 bb\n3 \n4 ccc\n");
        for cut in 0..=text.len() {
            let mut first = Session::default();
            let mut answers = first.take(&text[..cut]);
            let mut second = Session::from_state(&first.state()).unwrap();
            answers.extend(second.take(&text[cut..]));
            assert_eq!((answers, &second), (answer.clone(), &whole), "{cut}");
        }
        assert_eq!(Session::from_state(b"short"), None);
    }

    #[test]
    fn keys_are_64_digits() {
        assert_eq!(key(&"0f".repeat(32)).unwrap(), [15; 32]);
        for wrong in ["", "0f", &"zz".repeat(32), &"é".repeat(32)] {
            assert!(key(wrong).is_err(), "{wrong}");
        }
    }
}
