//! SCTP endpoints of the kernel.

mod abi;
mod message_send_queue;
mod receive;
mod send;
mod socket;
mod timer;

use super::event_assembler::EventAssembler;
use super::{AssocId, MessageToSend, TransportConfig, TransportEndpoint, TransportEvent};
use holdfast_sys::sockopt::check;
use holdfast_sys::sysctl;
use message_send_queue::{MessageSendQueue, SendBatch};
use receive::MessageReceiveBuffers;
use send::{QueuedMessage, SendOutcome};
use socket::KernelSocket;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;
use timer::RetryTimer;

/// Most sockets read in one turn.
const READY_MAX: usize = 64;
/// Sysctl with the UDP port at which the kernel receives encapsulated packets.
const UDP_PORT_SYSCTL: &str = "net/sctp/udp_port";
/// Sysctl that gives each association of a new socket its own send buffer, instead of one for all.
const SEND_BUFFER_POLICY_SYSCTL: &str = "net/sctp/sndbuf_policy";
/// Event number of the timer, in the place of a port number.
const TIMER_EVENT: u32 = u32::MAX;

/// Returns true if the kernel has SCTP in this network namespace.
pub fn is_available() -> bool {
    KernelSocket::new(false).is_ok()
}

/// A one-to-many socket, and the sockets of additional local ports.
pub struct KernelEndpoint {
    config: TransportConfig,
    /// Sockets by port number; 0 is the endpoint's own.
    sockets: HashMap<u32, KernelSocket>,
    last_port: u32,
    epoll: OwnedFd,
    assembler: EventAssembler,
    inbox: MessageReceiveBuffers,
    outbox: MessageSendQueue,
    timer: RetryTimer,
    encapsulation: Option<u16>,
}

impl KernelEndpoint {
    pub fn open(config: &TransportConfig) -> io::Result<Self> {
        let encapsulation = config.encapsulation.map(configure_udp_port).transpose()?;
        // Without permission to set the sysctl, all associations share one buffer: a peer that does not read then slows
        // the others down.
        if sysctl::read(SEND_BUFFER_POLICY_SYSCTL).is_ok_and(|value| value == "0") {
            let _ = sysctl::write(SEND_BUFFER_POLICY_SYSCTL, "1");
        }
        // SAFETY: no pointers are passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        check(epoll)?;
        let mut endpoint = Self {
            config: config.clone(),
            sockets: HashMap::new(),
            last_port: 0,
            // SAFETY: the descriptor was just opened and belongs to nobody else.
            epoll: unsafe { OwnedFd::from_raw_fd(epoll) },
            assembler: EventAssembler::new(abi::STACK_CONSTANTS, config.message_len_max),
            inbox: MessageReceiveBuffers::default(),
            outbox: MessageSendQueue::new(config.send_buffer as usize),
            timer: RetryTimer::new()?,
            encapsulation,
        };
        endpoint.watch_socket(TIMER_EVENT, endpoint.timer.as_fd().as_raw_fd())?;
        endpoint.add_socket(0, KernelSocket::open(config)?)?;
        Ok(endpoint)
    }

    fn add_socket(&mut self, port: u32, socket: KernelSocket) -> io::Result<()> {
        self.watch_socket(port, socket.as_fd().as_raw_fd())?;
        self.sockets.insert(port, socket);
        Ok(())
    }

    fn watch_socket(&self, port: u32, fd: RawFd) -> io::Result<()> {
        let mut interest = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: port.into(),
        };
        let (epoll, add) = (self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD);
        // SAFETY: the event outlives the call.
        check(unsafe { libc::epoll_ctl(epoll, add, fd, &raw mut interest) })
    }

    fn socket_of(&self, assoc: AssocId) -> io::Result<&KernelSocket> {
        let socket = self.sockets.get(&assoc.port());
        socket.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Passes queued messages to the kernel, as far as each association's send buffer has space.
    fn send_queued(&mut self) {
        while let Some(batch) = self.outbox.next_batch() {
            let Some(socket) = self.sockets.get(&batch.port) else {
                self.drop_refused(&batch);
                continue;
            };
            match send::send(socket.as_fd(), self.outbox.queue_of(&batch), batch.count) {
                SendOutcome::Sent(count) => self.outbox.remove_sent(&batch, count),
                SendOutcome::Refused => self.drop_refused(&batch),
                SendOutcome::Full => self.outbox.block_first(&batch),
            }
        }
    }

    fn drop_refused(&mut self, batch: &SendBatch) {
        if let Some(queued) = self.outbox.take_first(batch) {
            self.report_failed(queued);
        }
    }

    fn report_failed(&mut self, queued: QueuedMessage) {
        self.assembler.events.push(TransportEvent::SendFailed {
            assoc: queued.assoc,
            message: queued.message,
            was_sent: false,
        });
    }

    /// Drops the messages to an association that has ended, and its additional port.
    fn remove_association(&mut self, ended: AssocId) {
        for queued in self.outbox.remove_association(ended) {
            self.report_failed(queued);
        }
        if ended.port() != 0 {
            self.sockets.remove(&ended.port());
        }
    }

    fn ready_ports(&self) -> Vec<u32> {
        let mut ready = [libc::epoll_event { events: 0, u64: 0 }; READY_MAX];
        // SAFETY: the array is writable for its length.
        let count = unsafe {
            let max = READY_MAX as i32;
            libc::epoll_wait(self.epoll.as_raw_fd(), ready.as_mut_ptr(), max, 0)
        };
        let ready = ready.iter().take(usize::try_from(count).unwrap_or(0));
        ready.map(|event| event.u64 as u32).collect()
    }
}

impl TransportEndpoint for KernelEndpoint {
    fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn recv_batch(&mut self, events: &mut Vec<TransportEvent>) -> io::Result<()> {
        for port in self.ready_ports() {
            if port == TIMER_EVENT {
                self.timer.stop()?;
                self.outbox.retry_all();
            } else if let Some(socket) = self.sockets.get(&port) {
                self.inbox.read(socket.as_fd(), port, &mut self.assembler)?;
            }
        }
        for assoc in std::mem::take(&mut self.assembler.oversized) {
            // An association that has ended already is reported by an event.
            let _ = self.abort(assoc);
        }
        let ended = self
            .assembler
            .events
            .iter()
            .filter_map(|event| match event {
                TransportEvent::Down { assoc, .. } => Some(*assoc),
                _ => None,
            });
        for assoc in ended.collect::<Vec<_>>() {
            self.remove_association(assoc);
        }
        events.append(&mut self.assembler.events);
        Ok(())
    }

    fn send(&mut self, assoc: AssocId, message: &MessageToSend) -> io::Result<()> {
        self.socket_of(assoc)?;
        self.outbox.push(assoc, 0, message, false)
    }

    fn send_bundles(
        &mut self,
        assocs: &[AssocId],
        messages: &[MessageToSend],
        taken: &mut Vec<usize>,
    ) {
        let last = messages.len().saturating_sub(1);
        for &assoc in assocs {
            let is_available = self.socket_of(assoc).is_ok();
            let is_full = |(index, message): (usize, &MessageToSend)| {
                is_available && self.outbox.push(assoc, 0, message, index < last).is_err()
            };
            let fitting = messages.iter().enumerate().position(is_full);
            taken.push(fitting.unwrap_or(messages.len()));
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send_queued();
        match self.outbox.retry_pause() {
            Some(pause) => self.timer.start(pause),
            None => Ok(()),
        }
    }

    fn connect(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        let socket = self.socket_of(AssocId(0))?;
        Ok(AssocId::new(0, socket.connect(remote, encapsulation)?))
    }

    fn connect_from_new_port(
        &mut self,
        remote: &[SocketAddr],
        encapsulation: Option<u16>,
    ) -> io::Result<AssocId> {
        let config = TransportConfig {
            listen: false,
            local: abi::with_port(&self.config.local, 0),
            ..self.config.clone()
        };
        let socket = KernelSocket::open(&config)?;
        let id = socket.connect(remote, encapsulation)?;
        self.last_port += 1;
        self.add_socket(self.last_port, socket)?;
        Ok(AssocId::new(self.last_port, id))
    }

    fn round_trip(&self, assoc: AssocId) -> io::Result<Duration> {
        self.socket_of(assoc)?.round_trip(assoc.id())
    }

    fn remote_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let socket = self.socket_of(assoc)?;
        socket.addresses(abi::GET_PEER_ADDRS, assoc.id())
    }

    fn confirmed_addresses(&self, assoc: AssocId) -> io::Result<Vec<SocketAddr>> {
        let socket = self.socket_of(assoc)?;
        let mut addresses = socket.addresses(abi::GET_PEER_ADDRS, assoc.id())?;
        // A lone address has answered, or the association would not exist.
        if addresses.len() > 1 {
            addresses.retain(|address| socket.is_confirmed(assoc.id(), *address));
        }
        Ok(addresses)
    }

    fn local_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let socket = self.socket_of(AssocId(0))?;
        socket.addresses(abi::GET_LOCAL_ADDRS, 0)
    }

    fn encapsulation_port(&self) -> Option<u16> {
        self.encapsulation
    }

    fn is_raw(&self) -> bool {
        true
    }

    fn shutdown(&mut self, assoc: AssocId) -> io::Result<()> {
        self.socket_of(assoc)?;
        self.outbox
            .push(assoc, abi::EOF, &MessageToSend::new(0, "".into()), false)
    }

    fn abort(&mut self, assoc: AssocId) -> io::Result<()> {
        // Earlier messages are sent first, as far as there is buffer space. The abort itself needs none.
        self.send_queued();
        self.outbox.remove_association(assoc);
        send::abort(self.socket_of(assoc)?.as_fd(), assoc)
    }
}

impl Drop for KernelEndpoint {
    fn drop(&mut self) {
        // Queued messages are sent, as far as the kernel has buffer space.
        let _ = self.flush();
    }
}

/// Makes the kernel receive encapsulated packets at UDP port `wanted`, and returns the port; 0 means the port already
/// set, or else the standard one.
fn configure_udp_port(wanted: u16) -> io::Result<u16> {
    let current = sysctl::read(UDP_PORT_SYSCTL).map_err(|error| {
        let text =
            format!("the kernel's SCTP has no UDP encapsulation ({UDP_PORT_SYSCTL}): {error}");
        io::Error::new(io::ErrorKind::Unsupported, text)
    })?;
    let current = current.parse().unwrap_or(0);
    if current != 0 && (wanted == 0 || wanted == current) {
        return Ok(current);
    }
    if current != 0 {
        let text = format!(
            "the kernel's SCTP uses UDP port {current} for encapsulation in this network namespace already"
        );
        return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
    }
    let port = if wanted == 0 {
        super::ENCAPSULATION_PORT
    } else {
        wanted
    };
    sysctl::write(UDP_PORT_SYSCTL, &port.to_string())?;
    Ok(port)
}
