//! SCTP by libusrsctp in this process.
//!
//! The library runs without threads. Its packets are sent by [`packet_send_queue`] and received by [`packet_receive_buffers`], both in batches, on
//! sockets that [`hooks`] opens. So real addresses, multihoming, and both encapsulations work as in the library, at one
//! system call for dozens of packets. A process has one stack ([`stack`]) with one lock.

mod checksum;
mod endpoint_queue;
mod ffi;
mod hash_tables;
mod hooks;
mod options;
mod packet_receive_buffers;
mod packet_send_queue;
mod prefetch;
mod readiness;
mod socket;
mod source_address;
mod stack;
mod stack_allocator;
mod timers;

use super::{AssocId, MessageToSend, TransportConfig, TransportEndpoint, TransportEvent};
use endpoint_queue::EndpointQueue;
use readiness::StackPoller;
use socket::{AssocEnd, Socket};
use stack::{LockedStack, StackSettings};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// A one-to-many socket of the process's stack, and the sockets of additional local ports.
pub struct UsrsctpEndpoint {
    config: TransportConfig,
    socket: Option<Socket>,
    /// Sockets of additional ports, by number from 1.
    extra_sockets: HashMap<u32, Socket>,
    last_port: u32,
    queue: u32,
    readiness: StackPoller,
    encapsulation: Option<u16>,
    is_raw: bool,
}

impl UsrsctpEndpoint {
    /// Opens an endpoint, and starts the stack if it is the first.
    pub fn open(config: &TransportConfig) -> io::Result<Self> {
        let stack = LockedStack::lock();
        stack.start(StackSettings {
            raw: config.raw,
            udp_port: config.encapsulation,
        })?;
        for local in &config.local {
            stack.state().sources.borrow_mut().add_local(local.ip());
        }
        let wake = readiness::event_fd()?;
        let ready = StackPoller::new(stack.fds().into_iter(), wake.as_raw_fd())?;
        let queue = stack.add_queue(EndpointQueue::new(wake, config.message_len_max));
        let mut endpoint = Self {
            config: config.clone(),
            socket: None,
            extra_sockets: HashMap::new(),
            last_port: 0,
            queue,
            readiness: ready,
            encapsulation: stack.udp_port(),
            is_raw: stack.is_raw(),
        };
        hash_tables::set_many_associations(true);
        let socket = Socket::open(&stack, config, 0, queue);
        hash_tables::set_many_associations(false);
        drop(stack);
        endpoint.socket = Some(socket?);
        Ok(endpoint)
    }

    fn socket_of(&self, assoc: AssocId) -> io::Result<&Socket> {
        let socket = match assoc.port() {
            0 => self.socket.as_ref(),
            port => self.extra_sockets.get(&port),
        };
        socket.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn send_with_flags(
        &self,
        assoc: AssocId,
        flags: u16,
        message: &MessageToSend,
    ) -> io::Result<()> {
        self.socket_of(assoc)?.send(assoc.id(), flags, message)
    }

    /// Lets the stack process all readable sockets and due timers.
    fn process_ready(&self, stack: &LockedStack) -> io::Result<()> {
        for fd in self.readiness.ready_fds() {
            stack.read(fd)?;
        }
        stack.tick();
        Ok(())
    }

    /// Aborts associations with messages over the limit, and closes additional ports with an ended association.
    fn close_ended(
        &mut self,
        stack: &LockedStack,
        events: &[TransportEvent],
        oversized: &[AssocId],
    ) {
        for &assoc in oversized {
            let _ = self.send_with_flags(
                assoc,
                ffi::SEND_ABORT,
                &MessageToSend::new(0, "too long".into()),
            );
        }
        if self.extra_sockets.is_empty() {
            return;
        }
        for event in events {
            if let TransportEvent::Down { assoc, .. } = event
                && let Some(socket) = self.extra_sockets.remove(&assoc.port())
            {
                socket.close(stack);
            }
        }
    }
}

impl TransportEndpoint for UsrsctpEndpoint {
    fn fd(&self) -> BorrowedFd<'_> {
        self.readiness.fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<TransportEvent>) -> io::Result<()> {
        let stack = LockedStack::lock();
        self.process_ready(&stack)?;
        let before = events.len();
        let oversized = stack.collect_events(self.queue, events);
        self.close_ended(&stack, &events[before..], &oversized);
        Ok(())
    }

    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()> {
        let _stack = LockedStack::lock();
        self.send_with_flags(assoc, 0, message)
    }

    fn send_bundles(
        &mut self,
        assocs: &[AssocId],
        messages: &[MessageToSend],
        taken: &mut Vec<usize>,
    ) {
        let stack = LockedStack::lock();
        let unsent_max = self.config.send_buffer as usize / 4;
        taken.extend(assocs.iter().map(|assoc| match self.socket_of(*assoc) {
            Ok(socket) => socket.send_bundle(&stack, assoc.id(), messages, unsent_max),
            Err(_) => messages.len(),
        }));
    }

    fn flush(&mut self) -> io::Result<()> {
        LockedStack::lock().flush();
        Ok(())
    }

    fn connect(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        let _stack = LockedStack::lock();
        let socket = self.socket_of(AssocId(0))?;
        Ok(AssocId::new(0, socket.connect(remote, encapsulation)?))
    }

    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        let stack = LockedStack::lock();
        let mut config = self.config.clone();
        config.listen = false;
        for local in &mut config.local {
            local.set_port(0);
        }
        let port = self.last_port + 1;
        let socket = Socket::open(&stack, &config, port, self.queue)?;
        match socket.connect(remote, encapsulation) {
            Ok(id) => {
                self.last_port = port;
                self.extra_sockets.insert(port, socket);
                Ok(AssocId::new(port, id))
            }
            Err(error) => {
                socket.close(&stack);
                Err(error)
            }
        }
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        let _stack = LockedStack::lock();
        self.socket_of(assoc)?.round_trip(assoc.id())
    }

    fn measure_round_trip(&mut self, assoc: AssocId) {
        let _stack = LockedStack::lock();
        if let Ok(socket) = self.socket_of(assoc) {
            socket.measure(assoc.id());
        }
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let _stack = LockedStack::lock();
        self.socket_of(assoc)?
            .addresses(AssocEnd::Remote, assoc.id())
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let _stack = LockedStack::lock();
        let socket = self.socket_of(assoc)?;
        let mut addresses = socket.addresses(AssocEnd::Remote, assoc.id())?;
        // A lone address has answered, or the association would not exist.
        if addresses.len() > 1 {
            addresses.retain(|address| socket.is_confirmed(assoc.id(), *address));
        }
        Ok(addresses)
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let _stack = LockedStack::lock();
        self.socket_of(AssocId(0))?.addresses(AssocEnd::Local, 0)
    }

    fn encapsulation_port(&self) -> Option<u16> {
        self.encapsulation
    }

    fn is_raw(&self) -> bool {
        self.is_raw
    }

    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()> {
        let _stack = LockedStack::lock();
        self.send_with_flags(assoc, ffi::SEND_EOF, &MessageToSend::new(0, "".into()))
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        let _stack = LockedStack::lock();
        self.send_with_flags(assoc, ffi::SEND_ABORT, &MessageToSend::new(0, "".into()))
    }
}

impl Drop for UsrsctpEndpoint {
    fn drop(&mut self) {
        let stack = LockedStack::lock();
        let extra_sockets = self.extra_sockets.drain().map(|(_, socket)| socket);
        for socket in extra_sockets.chain(self.socket.take()) {
            socket.close(&stack);
        }
        stack.flush();
        stack.remove_queue(self.queue);
    }
}
