//! Clients, served by one thread with epoll: received bytes are sent back.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use anyhow::Result;
use rustix::event::epoll;
use rustix::fd::{AsRawFd, OwnedFd};

use crate::status::{Counts, add, subtract};

/// Maximum size of one read, in bytes.
const BUFFER_BYTES: usize = 16 * 1024;
/// Maximum number of events per wait.
const EVENTS_MAX: usize = 1024;
const LISTENER_KEY: u64 = u64::MAX;

/// A listener with its epoll descriptor.
pub struct Clients {
    listener: TcpListener,
    epoll: OwnedFd,
}

struct Client {
    stream: TcpStream,
    /// Bytes read and not yet written back.
    pending: Vec<u8>,
}

impl Clients {
    /// Starts to listen.
    pub fn listen(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(LISTENER_KEY);
        epoll::add(&epoll, &listener, data, epoll::EventFlags::IN)?;
        Ok(Self { listener, epoll })
    }

    /// Serves forever.
    pub fn serve(self, counts: &Counts) -> Result<()> {
        let mut clients: HashMap<u64, Client> = HashMap::new();
        let mut events = Vec::with_capacity(EVENTS_MAX);
        loop {
            events.clear();
            match epoll::wait(
                &self.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            for event in &events {
                let key = event.data.u64();
                if key == LISTENER_KEY {
                    self.accept(&mut clients, counts)?;
                    continue;
                }
                let Some(client) = clients.get_mut(&key) else {
                    continue;
                };
                let was_empty = client.pending.is_empty();
                match client.serve(counts) {
                    Ok(true) => self.update_interest(key, client, was_empty)?,
                    // Closing removes the socket from epoll. A broken connection is handled like an ended one.
                    Ok(false) | Err(_) => {
                        clients.remove(&key);
                        subtract(&counts.connections, 1);
                    }
                }
            }
        }
    }

    fn accept(&self, clients: &mut HashMap<u64, Client>, counts: &Counts) -> io::Result<()> {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                // A client that left before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            let key = stream.as_raw_fd() as u64;
            let data = epoll::EventData::new_u64(key);
            epoll::add(&self.epoll, &stream, data, epoll::EventFlags::IN)?;
            let pending = Vec::new();
            clients.insert(key, Client { stream, pending });
            add(&counts.connections, 1);
        }
    }

    /// Waits for space in the send buffer while bytes are pending, otherwise for input.
    fn update_interest(&self, key: u64, client: &Client, was_empty: bool) -> io::Result<()> {
        if client.pending.is_empty() == was_empty {
            return Ok(());
        }
        let flags = match client.pending.is_empty() {
            true => epoll::EventFlags::IN,
            false => epoll::EventFlags::OUT,
        };
        let data = epoll::EventData::new_u64(key);
        Ok(epoll::modify(&self.epoll, &client.stream, data, flags)?)
    }
}

impl Client {
    /// Sends back pending or received bytes; returns false at the end of the stream.
    fn serve(&mut self, counts: &Counts) -> io::Result<bool> {
        let mut buffer = [0; BUFFER_BYTES];
        if self.pending.is_empty() {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(length) => self.pending.extend(&buffer[..length]),
                Err(error) => return is_transient(error),
            }
        }
        match self.stream.write(&self.pending) {
            Ok(length) => {
                self.pending.drain(..length);
                add(&counts.bytes, length as u64);
                Ok(true)
            }
            Err(error) => is_transient(error),
        }
    }
}

/// Accepts the errors of a socket without data or buffer space, or of an interrupted thread.
fn is_transient(error: io::Error) -> io::Result<bool> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(true),
        _ => Err(error),
    }
}
