//! The thread that asks the kernel for the sockets of servers. The dumps would delay the engine's other work.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use holdfast_proto::health::{ListenerSample, QueueSample};
use holdfast_sys::netlink::Netlink;
use holdfast_sys::sock_diag::{
    self, ListedConnection, ListedServerSocket, established_connection, tcp_listeners,
    udp_receivers,
};
use holdfast_wire::health_frames::ServiceEndpoint;
use holdfast_wire::{Flow, Protocol};

use super::{Observation, ObservationSender};

/// Sockets to inspect.
#[derive(Debug)]
pub(crate) struct InspectionRequest {
    /// Services, with the number of handshakes completed before the inspection.
    pub services: Vec<(ServiceEndpoint, Option<u64>)>,
    /// Connections of the services.
    pub connections: Vec<Flow>,
}

/// Thread that inspects the servers' sockets; ends when this value is dropped.
#[derive(Debug)]
pub(crate) struct SocketObserverThread {
    requests: SyncSender<InspectionRequest>,
}

impl SocketObserverThread {
    /// Starts the thread that inspects the servers' sockets.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for its netlink socket.
    pub fn start(observations: ObservationSender) -> io::Result<SocketObserverThread> {
        let netlink = sock_diag::open()?;
        let (requests, receiver) = sync_channel(1);
        std::thread::Builder::new()
            .name("server-sockets".to_owned())
            .spawn(move || run(netlink, &receiver, &observations))?;
        Ok(SocketObserverThread { requests })
    }

    /// Requests an inspection. While two wait already, the request is dropped.
    pub fn request(&self, request: InspectionRequest) {
        let _ = self.requests.try_send(request);
    }
}

fn run(
    mut netlink: Netlink,
    requests: &Receiver<InspectionRequest>,
    observations: &ObservationSender,
) {
    let mut is_failing = false;
    while let Ok(request) = requests.recv() {
        match inspect(&mut netlink, &request) {
            Ok(results) => {
                is_failing = false;
                for observation in results {
                    let _ = observations.try_send(observation);
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(%error, "cannot list the sockets of servers: their health is unknown");
                }
            }
        }
        if observations.is_closed() {
            return;
        }
    }
}

fn inspect(netlink: &mut Netlink, request: &InspectionRequest) -> io::Result<[Observation; 2]> {
    let has_tcp = (request.services.iter()).any(|(service, _)| service.protocol == Protocol::Tcp);
    let listeners = match has_tcp {
        true => tcp_listeners(netlink)?,
        false => Vec::new(),
    };
    let mut samples = Vec::with_capacity(request.services.len());
    for (service, handshakes) in &request.services {
        let queues = match service.protocol {
            Protocol::Tcp => queues_of(service, &listeners),
            _ => queues_of(service, &udp_receivers(netlink, service.address.port())?),
        };
        let sample = ListenerSample {
            queues,
            handshakes: *handshakes,
        };
        samples.push((*service, sample));
    }
    let mut unread = Vec::new();
    for flow in &request.connections {
        let connection = established_connection(netlink, flow.local, flow.remote)?;
        if connection.is_some_and(|connection| is_unread(&connection)) {
            unread.push(*flow);
        }
    }
    Ok([
        Observation::Listeners(samples),
        Observation::UnreadConnections(unread),
    ])
}

/// Returns the queues of the sockets that receive a service's clients: those bound to its address, else wildcards.
fn queues_of(service: &ServiceEndpoint, sockets: &[ListedServerSocket]) -> Vec<QueueSample> {
    let receiving: Vec<&ListedServerSocket> = sockets
        .iter()
        .filter(|socket| socket.receives(service.address))
        .collect();
    let is_exact = |socket: &&ListedServerSocket| socket.local.ip() == service.address.ip();
    let has_exact = receiving.iter().any(is_exact);
    receiving
        .into_iter()
        .filter(|socket| is_exact(socket) || !has_exact)
        .map(|socket| QueueSample {
            socket: socket.cookie,
            waiting: socket.waiting,
        })
        .collect()
}

/// Returns true if the client has sent data and the server has read none of it. A server that has read a part is alive,
/// and may wait for the client to read its answer.
fn is_unread(connection: &ListedConnection) -> bool {
    let received = connection.info.as_ref().map(|info| info.bytes_received);
    connection.receive_queue > 0 && received == Some(u64::from(connection.receive_queue))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
    use std::time::{Duration, Instant};

    fn endpoint(protocol: Protocol, address: SocketAddr) -> ServiceEndpoint {
        ServiceEndpoint { protocol, address }
    }

    fn inspect_until(
        request: &InspectionRequest,
        is_done: impl Fn(&[(ServiceEndpoint, ListenerSample)], &[Flow]) -> bool,
    ) {
        let mut netlink = sock_diag::open().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let results = inspect(&mut netlink, request).unwrap();
            let [
                Observation::Listeners(samples),
                Observation::UnreadConnections(unread),
            ] = results
            else {
                panic!("other observations");
            };
            if is_done(&samples, &unread) {
                return;
            }
            assert!(Instant::now() < deadline, "{samples:?} {unread:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn unaccepted_and_unread_connections_are_seen() {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let service = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut client = TcpStream::connect(service).unwrap();
        let flow = Flow::new(Protocol::Tcp, service, client.local_addr().unwrap()).unwrap();
        let request = InspectionRequest {
            services: vec![(endpoint(Protocol::Tcp, service), Some(1))],
            connections: vec![flow],
        };
        inspect_until(&request, |samples, unread| {
            let queues = &samples[0].1.queues;
            queues.len() == 1 && queues[0].waiting == 1 && unread.is_empty()
        });
        std::io::Write::write_all(&mut client, b"request").unwrap();
        inspect_until(&request, |_, unread| unread == [flow]);
        let (mut accepted, _) = listener.accept().unwrap();
        std::io::Read::read_exact(&mut accepted, &mut [0; 3]).unwrap();
        inspect_until(&request, |samples, unread| {
            samples[0].1.queues[0].waiting == 0 && unread.is_empty()
        });
        drop(listener);
        inspect_until(&request, |samples, _| samples[0].1.queues.is_empty());
    }

    #[test]
    fn unread_datagrams_are_seen() {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = server.local_addr().unwrap();
        let request = InspectionRequest {
            services: vec![(endpoint(Protocol::Udp, address), None)],
            connections: Vec::new(),
        };
        inspect_until(&request, |samples, _| {
            samples[0].1.queues.len() == 1 && samples[0].1.queues[0].waiting == 0
        });
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.send_to(b"datagram", address).unwrap();
        inspect_until(&request, |samples, _| samples[0].1.queues[0].waiting > 0);
    }

    #[test]
    fn exact_listener_hides_the_wildcard() {
        let socket = |text: &str, cookie| ListedServerSocket {
            local: text.parse().unwrap(),
            is_ipv6_only: false,
            cookie,
            inode: 0,
            waiting: 0,
        };
        let service = endpoint(Protocol::Tcp, "10.0.0.1:80".parse().unwrap());
        let cookies = |sockets: &[ListedServerSocket]| -> Vec<u64> {
            let queues = queues_of(&service, sockets);
            queues.into_iter().map(|queue| queue.socket).collect()
        };
        let any = socket("0.0.0.0:80", 1);
        let dual = socket("[::]:80", 2);
        let exact = socket("10.0.0.1:80", 3);
        let other = socket("10.0.0.1:81", 4);
        assert_eq!(cookies(&[any, other]), [1]);
        assert_eq!(cookies(&[dual, other]), [2]);
        assert_eq!(cookies(&[any, dual, exact, other]), [3]);
        let only = ListedServerSocket {
            is_ipv6_only: true,
            ..dual
        };
        assert_eq!(cookies(&[only]), [] as [u64; 0]);
    }
}
