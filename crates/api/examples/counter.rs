//! Numbers the bytes that a client sends. The smallest server behind Holdfast; docs/handoff.md explains it.
#![forbid(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::thread;

use holdfast_api::blocking::{TcpConnection, WaitResult};
use holdfast_api::{Arrival, Session, app};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args()
        .nth(1)
        .ok_or("usage: counter ADDRESS:PORT")?;
    let session = Session::connect(app::SOCKET_PATH).unwrap_or_else(|error| {
        eprintln!("{error}; serving without Holdfast");
        Session::detached()
    });
    let service = session.serve("counter", TcpListener::bind(&address)?)?;
    loop {
        let (connection, count) = match service.accept()? {
            Arrival::New(connection) => (connection, 0),
            Arrival::HandedOff { connection, state } => (
                connection,
                u64::from_be_bytes(state.try_into().unwrap_or_default()),
            ),
        };
        thread::spawn(move || serve(connection, count));
    }
}

fn serve(mut connection: TcpConnection, mut count: u64) -> io::Result<()> {
    loop {
        if let WaitResult::HandoffRequested(destination) = connection.wait(None)? {
            // A safe point: `count` is all that another process needs to go on.
            match connection.hand_off(destination, count.to_be_bytes().to_vec()) {
                Ok(_moved) => return Ok(()),
                Err(kept) => connection = kept.connection,
            }
            continue;
        }
        let read = connection.read(&mut [0; 80])?;
        if read == 0 {
            return Ok(());
        }
        count += read as u64;
        writeln!(connection, "{count} bytes so far")?;
    }
}
