//! Echo over TCP. The state of a connection is the data that was read and not yet written back.

use std::io;
use std::time::Duration;

use holdfast_api::{Arrival, Service, TcpConnection};

/// Maximum size of one read, in bytes.
const BUFFER_BYTES: usize = 16 * 1024;

/// Serves forever.
pub async fn serve(service: Service) {
    loop {
        match service.accept().await {
            Ok(Arrival::New(connection)) => tokio::spawn(echo(connection, Vec::new())),
            Ok(Arrival::HandedOff { connection, state }) => tokio::spawn(echo(connection, state)),
            Err(error) => {
                // Out of descriptors, or a client that left before it was accepted: the listener is still usable.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
    }
}

async fn echo(mut connection: TcpConnection, mut pending: Vec<u8>) {
    loop {
        match echo_until_handoff(&connection, &mut pending).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                return tracing::debug!(flow = %connection.flow(), %error, "the connection broke");
            }
        }
        let Some(destination) = connection.handoff_request() else {
            continue;
        };
        match connection.hand_off(destination, pending.clone()).await {
            Ok(_) => return,
            Err(kept) => {
                tracing::debug!(flow = %kept.connection.flow(), reason = %kept.reason, "handoff failed");
                connection = kept.connection;
            }
        }
    }
}

/// Echoes until the operator requests a handoff (true) or the client has ended the connection (false).
async fn echo_until_handoff(connection: &TcpConnection, pending: &mut Vec<u8>) -> io::Result<bool> {
    let stream = connection.stream();
    loop {
        let ready = async {
            if pending.is_empty() {
                stream.readable().await
            } else {
                stream.writable().await
            }
        };
        tokio::select! {
            biased;
            _ = connection.wait_handoff_request() => return Ok(true),
            ready = ready => ready?,
        }
        if pending.is_empty() {
            let mut buffer = [0; BUFFER_BYTES];
            match stream.try_read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(length) => pending.extend(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
        }
        match stream.try_write(pending) {
            Ok(length) => drop(pending.drain(..length)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        if pending.is_empty() {
            // Most connections are idle most of the time: many thousands should not each keep a buffer.
            pending.shrink_to_fit();
        }
    }
}
