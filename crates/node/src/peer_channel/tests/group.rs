//! A group of nodes on loopback addresses, and a rogue node driven by hand.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use holdfast_api::ca::{CertificateAuthority, NODE_DAYS};
use holdfast_daemon::tls::Tls;
use holdfast_wire::greeting::NodeFacts;
use holdfast_wire::{Frame, FrameDecoder, NodeId, encode};
use rustls::{ClientConnection, ServerConnection, StreamOwned};

use holdfast_daemon::config::TlsConfig;

use crate::config::{ChannelConfig, PeerConfig};
use crate::metrics::Metrics;
use crate::peer_channel::{PeerChannel, PeerChannelOptions, PeerEvent, PeerEvents, Peers};

/// Time limit far above any real duration; only a failing test waits so long.
pub(super) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) const PORT: u16 = 7400;

/// Nodes n1 to n3 with certificates of one authority, each at a loopback address that no other test uses.
pub(super) struct Group {
    dir: tempfile::TempDir,
    subnet: u16,
    pub(super) timing: ChannelConfig,
}

/// A started node.
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) peers: Peers,
    pub(super) events: PeerEvents,
    pub(super) metrics: Metrics,
}

impl Group {
    pub(super) fn new() -> Group {
        static TESTS: AtomicU16 = AtomicU16::new(0);
        let group = Group {
            dir: tempfile::tempdir().unwrap(),
            // Differs between processes and between tests in a process; 127.0/16 is left to other uses.
            subnet: (std::process::id() as u16)
                .wrapping_mul(31)
                .wrapping_add(TESTS.fetch_add(1, Ordering::Relaxed))
                | 0x0100,
            timing: ChannelConfig {
                ping_interval: Duration::from_millis(50),
                dead_after: TEST_TIMEOUT,
                silent_after: Duration::from_millis(200),
                queue_bytes: 32 << 20,
            },
        };
        let authority = CertificateAuthority::init(&group.ca(), "files").unwrap();
        for node in 1..=3 {
            let name = format!("n{node}");
            authority.issue(&name, &[], NODE_DAYS).unwrap();
        }
        group
    }

    pub(super) fn ca(&self) -> PathBuf {
        self.dir.path().join("ca")
    }

    pub(super) fn authority(&self) -> CertificateAuthority {
        CertificateAuthority::open(&self.ca()).unwrap()
    }

    pub(super) fn address(&self, node: u16) -> SocketAddr {
        let [high, low] = self.subnet.to_be_bytes();
        let ip = Ipv4Addr::new(127, high, low, node as u8);
        SocketAddr::new(IpAddr::V4(ip), PORT)
    }

    pub(super) fn tls(&self, name: &str) -> Tls {
        Tls::from_files(&tls_files(&self.ca(), name), name).unwrap()
    }

    pub(super) fn options(&self, node: u16, boot: u64) -> PeerChannelOptions {
        let others = (1..=3).filter(|other| *other != node);
        PeerChannelOptions {
            name: format!("n{node}"),
            node: NodeId(node),
            boot,
            group: "files".to_owned(),
            address: self.address(node),
            peers: others
                .map(|other| PeerConfig {
                    name: format!("n{other}"),
                    id: NodeId(other),
                    address: self.address(other),
                })
                .collect(),
            timing: self.timing,
            membership: None,
            mode: None,
        }
    }

    pub(super) fn start(&self, node: u16) -> Node {
        self.start_with(self.options(node, u64::from(node)))
    }

    pub(super) fn start_with(&self, options: PeerChannelOptions) -> Node {
        let tls = self.tls(&format!("n{}", options.node));
        self.start_as(options, tls)
    }

    pub(super) fn start_as(&self, options: PeerChannelOptions, tls: Tls) -> Node {
        let metrics = Metrics::new();
        let id = options.node;
        let (peers, events) = PeerChannel::start(options, tls, metrics.clone()).unwrap();
        Node {
            id,
            peers,
            events,
            metrics,
        }
    }
}

pub(super) fn tls_files(ca: &Path, name: &str) -> TlsConfig {
    TlsConfig {
        ca: ca.join("ca.pem"),
        cert: ca.join(format!("{name}.pem")),
        key: ca.join(format!("{name}.key")),
        crl: Some(ca.join("ca.crl")),
    }
}

impl Node {
    pub(super) async fn next_event(&mut self) -> PeerEvent {
        let next = tokio::time::timeout(TEST_TIMEOUT, self.events.recv()).await;
        next.unwrap_or_else(|_| panic!("node {}: no event", self.id))
    }

    pub(super) async fn wait_up(&mut self, peer: u16) -> u64 {
        loop {
            match self.next_event().await {
                PeerEvent::Up { peer: other, boot } if other == NodeId(peer) => return boot,
                PeerEvent::Up { .. } => {}
                other => panic!("node {}: {other:?} instead of Up", self.id),
            }
        }
    }

    /// Waits until `peer` is lost. Returns the reason.
    pub(super) async fn wait_lost(
        &mut self,
        peer: u16,
    ) -> crate::peer_channel::PeerConnectionError {
        loop {
            match self.next_event().await {
                PeerEvent::Lost {
                    peer: other,
                    reason: why,
                } if other == NodeId(peer) => return why,
                PeerEvent::Lost { peer, reason: why } => {
                    panic!("node {}: {peer} lost: {why}", self.id)
                }
                _ => {}
            }
        }
    }

    pub(super) async fn wait_frame(&mut self) -> (NodeId, Frame) {
        match self.next_event().await {
            PeerEvent::Frame { from, frame } => (from, frame),
            other => panic!("node {}: {other:?} instead of a frame", self.id),
        }
    }
}

/// Runs `test` in the daemon's way: on one thread, with local tasks.
pub(super) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

pub(super) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !condition() {
        assert!(start.elapsed() < TEST_TIMEOUT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Runs `work` on another thread, while this one continues to serve the channel.
pub(super) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

pub(super) fn hello_bytes(node: u16, group: &str) -> Vec<u8> {
    let (boot, group) = (u64::from(node), group.to_owned());
    let node = NodeId(node);
    frame_bytes(&Frame::Hello {
        node,
        boot,
        group,
        facts: NodeFacts::default(),
    })
}

pub(super) fn frame_bytes(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(frame, &mut bytes).unwrap();
    bytes
}

pub(super) type Dialled = StreamOwned<ClientConnection, TcpStream>;
pub(super) type Accepted = StreamOwned<ServerConnection, TcpStream>;

/// A node driven by hand, with plain blocking TLS: it writes any bytes, and closes without a close notification.
pub(super) struct Rogue {
    pub(super) dialled: Dialled,
    pub(super) accepted: Accepted,
}

pub(super) fn dial(tls: &Tls, to: SocketAddr, name: &str) -> Dialled {
    let socket = TcpStream::connect(to).unwrap();
    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    StreamOwned::new(tls.dial(name).unwrap(), socket)
}

/// Reads until the other side closes in any way.
pub(super) fn read_to_end(stream: &mut impl Read) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "not closed");
                return;
            }
        }
    }
}

pub(super) fn read_frame(stream: &mut impl Read) -> Frame {
    let mut decoder = FrameDecoder::new();
    let mut byte = [0];
    loop {
        stream.read_exact(&mut byte).unwrap();
        decoder.feed(&byte);
        if let Some(frame) = decoder.next_frame().unwrap() {
            return frame;
        }
    }
}

impl Rogue {
    /// Connects as `node` to n1, in both directions.
    pub(super) fn connect(group: &Group, node: u16) -> impl FnOnce() -> Rogue + Send + 'static {
        let (own, n1) = (group.address(node), group.address(1));
        let tls = group.tls(&format!("n{node}"));
        move || {
            let listener = TcpListener::bind(own).unwrap();
            let mut dialled = dial(&tls, n1, "n1");
            dialled.write_all(&hello_bytes(node, "files")).unwrap();
            assert!(matches!(read_frame(&mut dialled), Frame::Hello { .. }));
            loop {
                let (socket, _) = listener.accept().unwrap();
                let mut accepted = StreamOwned::new(tls.accept().unwrap(), socket);
                match read_frame(&mut accepted) {
                    // Other nodes dial too, and are turned away.
                    Frame::Hello { node, .. } if node != NodeId(1) => continue,
                    Frame::Hello { .. } => {}
                    other => panic!("{other:?}"),
                }
                accepted.write_all(&hello_bytes(node, "files")).unwrap();
                return Rogue { dialled, accepted };
            }
        }
    }
}

/// Opens another greeted connection from `node` to n1.
pub(super) fn second_connection(
    group: &Group,
    node: u16,
) -> impl FnOnce() -> Dialled + Send + 'static {
    let (tls, n1) = (group.tls(&format!("n{node}")), group.address(1));
    move || {
        let mut dialled = dial(&tls, n1, "n1");
        dialled.write_all(&hello_bytes(node, "files")).unwrap();
        assert!(matches!(read_frame(&mut dialled), Frame::Hello { .. }));
        dialled
    }
}
