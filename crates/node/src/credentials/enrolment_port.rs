//! The port at which new hosts ask for certificates: TLS 1.3, on which only this node shows a certificate.
//!
//! Nothing of a host is trusted before its token is proved. So connections are few, short, and each has one bounded
//! message; the port takes at most [`ACCEPTS_PER_SECOND_MAX`] connections a second.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use holdfast_api::ca::CertificateRequest;
use holdfast_api::enrolment::{
    ALPN_PROTOCOL, ANSWER_BYTES_MAX, EXPORTER_LABEL, EnrolmentAnswer, EnrolmentRefusal,
    EnrolmentRequest, MessageError, REQUEST_MESSAGE_BYTES_MAX, TimedStream, decode, encode,
    read_message, verify_proof, write_message,
};
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::log_limit::LogLimit;
use holdfast_daemon::tls::enrolment_server_config;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use super::WorkerCommand;

/// Time limit of a connection, from its first byte to its last.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(5);
/// Most connections at a time: in total, and from one source. In total, a new connection takes the place of the oldest whose
/// request has not arrived.
const CONNECTIONS_MAX: usize = 16;
const CONNECTIONS_PER_SOURCE_MAX: usize = 4;
/// Bits of an IPv6 address that stand for one source, since a site has all addresses of such a prefix (RFC 6177).
const IPV6_PREFIX_BITS: u32 = 48;
/// Most connections that are accepted in a second, since each costs a TLS handshake.
const ACCEPTS_PER_SECOND_MAX: u32 = 50;

/// The TLS configuration in force; a renewed certificate replaces it.
pub(super) type SharedServerConfig = Arc<RwLock<Arc<ServerConfig>>>;

/// A host that has sent a complete request, and waits for the answer.
#[derive(Debug)]
pub struct Applicant {
    /// Address of the host.
    pub source: IpAddr,
    /// Public key of the token that the host claims to have.
    pub token: [u8; 32],
    /// True if the host has proved that it has the token.
    pub is_proven: bool,
    /// The certificate request, whose signature is verified.
    pub request: CertificateRequest,
    /// Channel for the answer to the host.
    pub reply: SyncSender<EnrolmentAnswer>,
}

/// The open enrolment port. Dropping the value closes the port; connections end by themselves.
pub struct EnrolmentPort {
    address: SocketAddr,
    is_closing: Arc<AtomicBool>,
    server_config: SharedServerConfig,
}

impl EnrolmentPort {
    /// Opens the port, with the node's certificate of `tls`.
    ///
    /// # Errors
    /// The address cannot be listened on, the certificate cannot be used, or no thread can be started.
    pub fn open(
        address: SocketAddr,
        tls: &TlsConfig,
        commands: Sender<WorkerCommand>,
    ) -> io::Result<EnrolmentPort> {
        let config = enrolment_server_config(tls).map_err(io::Error::other)?;
        let listener = TcpListener::bind(address).map_err(|error| {
            let text = format!("{address} (port of [joining]): {error}");
            io::Error::new(error.kind(), text)
        })?;
        let port = EnrolmentPort {
            address: listener.local_addr()?,
            is_closing: Arc::default(),
            server_config: Arc::new(RwLock::new(config)),
        };
        let acceptor = Acceptor {
            commands,
            server_config: port.server_config(),
            is_closing: port.is_closing.clone(),
            connections: Arc::default(),
            log: LogLimit::default(),
        };
        thread::Builder::new()
            .name("enrolment".to_owned())
            .spawn(move || acceptor.run(&listener))?;
        Ok(port)
    }

    /// Returns the TLS configuration, which may be replaced.
    pub(super) fn server_config(&self) -> SharedServerConfig {
        self.server_config.clone()
    }
}

impl Drop for EnrolmentPort {
    fn drop(&mut self) {
        self.is_closing.store(true, Ordering::Relaxed);
        // Wakes the thread, which then sees that the port closes.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(100));
    }
}

/// The open connections, the oldest first.
type OpenConnections = Arc<Mutex<Vec<OpenConnection>>>;

struct OpenConnection {
    source: IpAddr,
    socket: Arc<TcpStream>,
    has_request: bool,
}

struct Acceptor {
    commands: Sender<WorkerCommand>,
    server_config: SharedServerConfig,
    is_closing: Arc<AtomicBool>,
    connections: OpenConnections,
    log: LogLimit,
}

/// A place among the open connections of the enrolment port.
struct ConnectionSlot {
    connections: OpenConnections,
    socket: Arc<TcpStream>,
}

impl ConnectionSlot {
    /// Returns a place for the connection `socket` from `source`, none if there is no room. May close the oldest connection
    /// whose request has not arrived.
    fn reserve(
        connections: &OpenConnections,
        source: IpAddr,
        socket: TcpStream,
    ) -> Option<ConnectionSlot> {
        let source = source_key(source);
        let socket = Arc::new(socket);
        let mut open = connections.lock().unwrap_or_else(PoisonError::into_inner);
        let of_source = open.iter().filter(|other| other.source == source).count();
        if of_source >= CONNECTIONS_PER_SOURCE_MAX {
            return None;
        }
        if open.len() >= CONNECTIONS_MAX {
            let oldest = open.iter().position(|other| !other.has_request)?;
            // The thread of that connection reads the end of the stream, and ends.
            let _ = open.remove(oldest).socket.shutdown(Shutdown::Both);
        }
        open.push(OpenConnection {
            source,
            socket: socket.clone(),
            has_request: false,
        });
        let connections = connections.clone();
        Some(ConnectionSlot {
            connections,
            socket,
        })
    }

    /// Notes that the request has arrived: the connection keeps its place to the end.
    fn note_request(&self) {
        let mut open = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut own = open.iter_mut();
        if let Some(own) = own.find(|other| Arc::ptr_eq(&other.socket, &self.socket)) {
            own.has_request = true;
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut open = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        open.retain(|other| !Arc::ptr_eq(&other.socket, &self.socket));
    }
}

fn source_key(source: IpAddr) -> IpAddr {
    match source.to_canonical() {
        IpAddr::V6(address) => {
            let mask = u128::MAX << (u128::BITS - IPV6_PREFIX_BITS);
            IpAddr::V6((u128::from(address) & mask).into())
        }
        v4 => v4,
    }
}

impl Acceptor {
    fn run(self, listener: &TcpListener) {
        super::worker::drop_all_capabilities();
        loop {
            let accepted = listener.accept();
            if self.is_closing.load(Ordering::Relaxed) {
                return;
            }
            match accepted {
                Ok((socket, from)) => self.serve(socket, from.ip()),
                Err(error) if self.log.admits() => {
                    tracing::warn!(%error, "cannot accept a connection of a new host");
                }
                Err(_) => {}
            }
            thread::sleep(Duration::from_secs(1) / ACCEPTS_PER_SECOND_MAX);
        }
    }

    /// Starts a thread for a connection, if there is room. Otherwise the connection is closed.
    fn serve(&self, socket: TcpStream, source: IpAddr) {
        let Some(slot) = ConnectionSlot::reserve(&self.connections, source, socket) else {
            if self.log.admits() {
                tracing::warn!(%source, "too many connections of new hosts at once: closed one");
            }
            return;
        };
        let config = self
            .server_config
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        let (config, commands) = (config.clone(), self.commands.clone());
        let serve = move || {
            if let Err(error) = exchange(&slot, source, config, &commands) {
                tracing::debug!(%source, %error, "an enrolment broke off");
            }
        };
        let thread = thread::Builder::new().name("enrolment".to_owned());
        if let Err(error) = thread.spawn(serve)
            && self.log.admits()
        {
            tracing::error!(%error, "no thread for a new host");
        }
    }
}

/// Reads one enrolment request from a host, and answers the host.
fn exchange(
    slot: &ConnectionSlot,
    source: IpAddr,
    config: Arc<ServerConfig>,
    commands: &Sender<WorkerCommand>,
) -> io::Result<()> {
    slot.socket.set_nodelay(true)?;
    let mut stream = TimedStream::new(slot.socket.try_clone()?, EXCHANGE_LIMIT);
    let mut tls = ServerConnection::new(config).map_err(io::Error::other)?;
    while tls.is_handshaking() {
        tls.complete_io(&mut stream)?;
    }
    if tls.alpn_protocol() != Some(ALPN_PROTOCOL) {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let exported = tls
        .export_keying_material([0; 32], EXPORTER_LABEL, None)
        .map_err(io::Error::other)?;
    let mut stream = StreamOwned::new(tls, stream);
    let message = read_message(&mut stream, REQUEST_MESSAGE_BYTES_MAX)?;
    slot.note_request();
    let refused = |reason| EnrolmentAnswer::Refused { reason };
    let answer = match read_request(&message) {
        Err(reason) => refused(reason),
        Ok((message, request)) => {
            let (reply, answer) = sync_channel(1);
            let applicant = Applicant {
                source,
                is_proven: verify_proof(
                    &message.token,
                    &message.proof,
                    &exported,
                    &message.request,
                ),
                token: message.token,
                request,
                reply,
            };
            let sent = commands.send(WorkerCommand::Enrol(applicant));
            sent.map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
            let time_left = stream.sock.time_left()?;
            let late = |_| refused(EnrolmentRefusal::Failed("its disk is slow".to_owned()));
            answer.recv_timeout(time_left).unwrap_or_else(late)
        }
    };
    let bytes = encode(&answer, ANSWER_BYTES_MAX).map_err(io::Error::other)?;
    write_message(&mut stream, &bytes)?;
    stream.conn.send_close_notify();
    stream.conn.complete_io(&mut stream.sock)?;
    Ok(())
}

fn read_request(bytes: &[u8]) -> Result<(EnrolmentRequest, CertificateRequest), EnrolmentRefusal> {
    let message: EnrolmentRequest =
        decode(bytes, REQUEST_MESSAGE_BYTES_MAX).map_err(|error| match error {
            MessageError::Version(_) => {
                EnrolmentRefusal::OtherRelease(env!("CARGO_PKG_VERSION").to_owned())
            }
            other => EnrolmentRefusal::Request(other.to_string()),
        })?;
    let request = CertificateRequest::from_der(&message.request)
        .map_err(|error| EnrolmentRefusal::Request(error.to_string()))?;
    Ok((message, request))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns both ends of a connection.
    fn connection(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn connections_are_limited_by_source() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connections = OpenConnections::default();
        let reserve = |host: u8| {
            let socket = connection(&listener).1;
            ConnectionSlot::reserve(&connections, [10, 0, 0, host].into(), socket)
        };
        let mut slots: Vec<_> = (0..4).map(|_| reserve(1).unwrap()).collect();
        assert!(reserve(1).is_none());
        slots.pop();
        slots.push(reserve(1).unwrap());
        slots.push(reserve(2).unwrap());
        let first: IpAddr = "fd00::1".parse().unwrap();
        assert_eq!(
            source_key(first),
            source_key("fd00:0:0:1::2".parse().unwrap())
        );
        assert_ne!(
            source_key(first),
            source_key("fd00:0:1::1".parse().unwrap())
        );
        drop(slots);
        assert!(connections.lock().unwrap().is_empty());
    }

    #[test]
    fn oldest_unfinished_connection_gives_way() {
        use std::io::Read;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connections = OpenConnections::default();
        let mut clients = Vec::new();
        let mut reserve = |host: u8| {
            let (client, socket) = connection(&listener);
            client.set_nonblocking(true).unwrap();
            clients.push(client);
            ConnectionSlot::reserve(&connections, [10, 0, 0, host].into(), socket)
        };
        let mut slots: Vec<_> = (0..16).map(|host| reserve(host).unwrap()).collect();
        slots[0].note_request();
        let newest = reserve(16).unwrap();
        slots.push(newest);
        assert_eq!(connections.lock().unwrap().len(), CONNECTIONS_MAX);
        // The second one was the oldest without a request.
        for slot in &slots {
            slot.note_request();
        }
        assert!(reserve(17).is_none(), "all places are in use");
        let mut is_closed = |host: usize| clients[host].read(&mut [0]).is_ok();
        let closed: Vec<usize> = (0..17).filter(|host| is_closed(*host)).collect();
        assert_eq!(closed, [1]);
        drop(slots);
        assert!(connections.lock().unwrap().is_empty());
    }
}
