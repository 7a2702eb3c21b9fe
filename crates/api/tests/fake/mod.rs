//! The daemon's end of sessions, controlled by the test: real sockets, real descriptors, no decisions.
#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use holdfast_api::app::{
    Channel, FromDaemon, HandOffItem, IncomingItem, Listener, ToDaemon, decode, encode,
};
use holdfast_api::{FlowText, Session};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Longer than any step takes on a heavily loaded machine; reached only by a failing test.
pub const TIMEOUT: Duration = Duration::from_secs(30);

pub struct FakeDaemon {
    listener: Option<Listener>,
    directory: tempfile::TempDir,
}

/// One session, from the daemon's side.
pub struct DaemonSession {
    channel: Channel,
}

impl FakeDaemon {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = Some(Listener::bind(directory.path().join("app.sock")).unwrap());
        Self {
            listener,
            directory,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("app.sock")
    }

    /// Accepts the next session that connects, up to and including `Open`.
    pub fn accept(&self) -> DaemonSession {
        let channel = self.listener.as_ref().unwrap().accept().unwrap();
        set_socket_timeout(&channel, Timeout::Recv, Some(TIMEOUT)).unwrap();
        let peer = DaemonSession { channel };
        let (ToDaemon::Open { name }, _) = peer.receive() else {
            panic!("a session begins with Open")
        };
        assert!(!name.is_empty());
        peer
    }

    /// Opens a session; returns it and its peer.
    pub fn open(&self, node: &str) -> (Session, DaemonSession) {
        let path = self.path();
        let connecting = thread::spawn(move || Session::connect(path).unwrap());
        let peer = self.accept();
        peer.send(&FromDaemon::Opened { node: node.into() });
        let session = connecting.join().unwrap();
        assert!(session.is_open());
        assert_eq!(session.node().as_deref(), Some(node));
        (session, peer)
    }

    /// Removes the listener, as a crash would.
    pub fn stop(&mut self) {
        self.listener = None;
        std::fs::remove_file(self.path()).unwrap();
    }

    /// Starts a new daemon at the same path.
    pub fn start(&mut self) {
        self.listener = Some(Listener::bind(self.path()).unwrap());
    }
}

impl DaemonSession {
    pub fn send(&self, message: &FromDaemon) {
        self.send_with(message, &[]);
    }

    pub fn send_with(&self, message: &FromDaemon, descriptors: &[OwnedFd]) {
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        self.channel
            .send(&encode(message).unwrap(), &borrowed)
            .unwrap();
    }

    pub fn send_raw(&self, bytes: &[u8]) {
        self.channel.send(bytes, &[]).unwrap();
    }

    /// Receives the next message; fails the test when none arrives.
    pub fn receive(&self) -> (ToDaemon, Vec<OwnedFd>) {
        let packet = self
            .channel
            .receive()
            .expect("exceeded time: a message")
            .expect("the session lives");
        (decode(&packet.bytes).unwrap(), packet.descriptors)
    }

    /// Waits for the end of the session; returns the messages before it.
    pub fn receive_until_end(&self) -> Vec<ToDaemon> {
        let mut messages = Vec::new();
        while let Some(packet) = self.channel.receive().expect("exceeded time: an end") {
            messages.push(decode(&packet.bytes).unwrap());
        }
        messages
    }

    pub fn receive_serve(&self, expected_pool: &str) -> u32 {
        match self.receive().0 {
            ToDaemon::Serve { service, pool, .. } if pool == expected_pool => service,
            other => panic!("Serve expected, not {other:?}"),
        }
    }

    pub fn receive_accepted(&self, count: usize) -> Vec<FlowText> {
        let mut accepted_flows = Vec::new();
        while accepted_flows.len() < count {
            match self.receive().0 {
                ToDaemon::Accepted { flows, .. } => accepted_flows.extend(flows),
                other => panic!("Accepted expected, not {other:?}"),
            }
        }
        accepted_flows
    }

    /// Receives one complete batch.
    pub fn receive_hand_off(&self, expected_to: &str) -> Vec<(HandOffItem, Option<OwnedFd>)> {
        let mut items_received = Vec::new();
        loop {
            let (
                ToDaemon::HandOff {
                    to, items, last, ..
                },
                descriptors,
            ) = self.receive()
            else {
                panic!("HandOff")
            };
            assert_eq!(to, expected_to);
            assert_eq!(
                items.iter().filter(|item| item.descriptor).count(),
                descriptors.len()
            );
            let mut descriptors = descriptors.into_iter();
            items_received.extend(items.into_iter().map(|item| {
                let descriptor = item.descriptor.then(|| descriptors.next().unwrap());
                (item, descriptor)
            }));
            if last {
                return items_received;
            }
        }
    }

    /// Hands one flow to this session, up to `Received`.
    pub fn hand_over(&self, id: u64, service: u32, item: HandOffItem, descriptor: Option<OwnedFd>) {
        let HandOffItem {
            flow,
            application_state,
            descriptor: has,
        } = item;
        let items = vec![IncomingItem {
            id,
            service,
            flow,
            descriptor: has,
        }];
        self.send_with(&FromDaemon::Incoming { items }, descriptor.as_slice());
        self.send(&FromDaemon::State {
            id,
            application_state,
            unread: vec![],
            last: true,
        });
        assert_eq!(self.receive().0, ToDaemon::Received { ids: vec![id] });
    }
}

pub fn loopback_listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Returns a client with a read timeout, so that a read cannot block forever.
pub fn connect_client(address: SocketAddr) -> TcpStream {
    let client = TcpStream::connect(address).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    client
}

pub fn flow_of(client: &TcpStream) -> FlowText {
    FlowText::new(
        holdfast_api::Protocol::Tcp,
        client.peer_addr().unwrap(),
        client.local_addr().unwrap(),
    )
    .unwrap()
}
