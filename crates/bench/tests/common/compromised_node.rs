//! A compromised group member: has a node's certificate and address, and sends any frames that a test chooses.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use holdfast_daemon::config::TlsConfig;
use holdfast_daemon::tls::Tls;
use holdfast_node::config::DEFAULT_PORT;
use holdfast_testbed::cluster::{Cluster, IpFamily};
use holdfast_wire::failure::PeerFault;
use holdfast_wire::greeting::NodeFacts;
use holdfast_wire::move_frames::MoveFrame;
use holdfast_wire::{Frame, FrameDecoder, MoveId, NodeId, encode};
use rustls::{ClientConnection, StreamOwned};

/// Longest wait for an answer, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the group in a [`Cluster`].
const GROUP: &str = "lab";

/// The compromised member: its identity, and its TLS connections to and from its peers.
pub struct CompromisedNode {
    number: NodeId,
    boot: u64,
    move_count: u64,
    /// Outgoing connections, one per peer.
    outgoing: Vec<StreamOwned<ClientConnection, TcpStream>>,
    incoming: Receiver<Frame>,
}

impl CompromisedNode {
    /// Takes over node `node` with number `number`, stops that node's daemon for good, and connects to the daemons of
    /// `peers`.
    pub fn take_over(
        cluster: &Cluster,
        (node, number): (&str, u16),
        peers: &[&str],
    ) -> Result<CompromisedNode> {
        cluster.set_daemon_restart(node, false);
        cluster.kill_daemon(node)?;
        let address = |node: &str| -> Result<SocketAddr> {
            Ok((cluster.address(node, IpFamily::V4)?, DEFAULT_PORT).into())
        };
        let own_address = address(node)?;
        let deadline = Instant::now() + PATIENCE;
        let bind = || loop {
            match TcpListener::bind(own_address) {
                // The old daemon's listener is still closing.
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return other,
            }
        };
        let listener = cluster.lab().run_in_net_namespace(node, bind)??;
        let ca = cluster.directory().join("ca");
        let files = TlsConfig {
            ca: ca.join("ca.pem"),
            cert: ca.join(format!("{node}.pem")),
            key: ca.join(format!("{node}.key")),
            crl: None,
        };
        let tls = Tls::from_files(&files, node)?;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let (number, boot) = (NodeId(number), since_1970.as_nanos() as u64);
        let (frame_sender, frame_receiver) = mpsc::channel();
        let hello = encode_frame(&Frame::Hello {
            node: number,
            boot,
            group: GROUP.to_owned(),
            facts: NodeFacts::default(),
        })?;
        let (mut outgoing, mut peer_addresses) = (Vec::new(), Vec::new());
        for peer in peers {
            let peer_address = address(peer)?;
            let socket = cluster
                .lab()
                .run_in_net_namespace(node, || TcpStream::connect(peer_address))??;
            socket.set_read_timeout(Some(PATIENCE))?;
            let mut stream = StreamOwned::new(tls.dial(peer)?, socket);
            stream.write_all(&hello)?;
            let answer = read_frame(&mut stream, &mut FrameDecoder::new())?;
            ensure!(matches!(answer, Frame::Hello { .. }), "{answer:?}");
            outgoing.push(stream);
            peer_addresses.push(peer_address.ip());
        }
        // All daemons of the group connect back to the member; only frames from `peers` are recorded.
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (tls, hello, frame_sender) =
                    (tls.accept(), hello.clone(), frame_sender.clone());
                let from = socket.peer_addr().map(|address| address.ip());
                let is_peer = from.is_ok_and(|ip| peer_addresses.contains(&ip));
                std::thread::spawn(move || {
                    let mut stream = StreamOwned::new(tls?, socket);
                    let mut decoder = FrameDecoder::new();
                    read_frame(&mut stream, &mut decoder)?;
                    stream.write_all(&hello)?;
                    loop {
                        match read_frame(&mut stream, &mut decoder)? {
                            Frame::Ping { token } => {
                                stream.write_all(&encode_frame(&Frame::Pong { token })?)?;
                            }
                            frame if is_peer => {
                                frame_sender.send(frame)?;
                            }
                            _ => {}
                        }
                    }
                    #[allow(unreachable_code, reason = "gives the type of the closure's result")]
                    anyhow::Ok(())
                });
            }
        });
        let mut member = CompromisedNode {
            number,
            boot,
            move_count: 0,
            outgoing,
            incoming: frame_receiver,
        };
        for peer in 0..peers.len() {
            member.wait_until_connected_back(peer)?;
        }
        Ok(member)
    }

    /// Returns a move ID that this member has not used.
    pub fn new_move(&mut self) -> MoveId {
        self.move_count += 1;
        MoveId {
            donor: self.number,
            boot: self.boot,
            seq: self.move_count,
        }
    }

    /// Returns the member's boot number, part of the name of each move that it starts.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// Sends a frame to the first peer.
    pub fn send(&mut self, frame: &Frame) -> Result<()> {
        self.send_to(0, frame)
    }

    /// Sends a frame to the peer at an index, counted from 0.
    pub fn send_to(&mut self, peer: usize, frame: &Frame) -> Result<()> {
        Ok(self.outgoing[peer].write_all(&encode_frame(frame)?)?)
    }

    /// Sends a frame about a move to the first peer.
    pub fn send_move_frame(&mut self, id: MoveId, frame: MoveFrame) -> Result<()> {
        self.send(&Frame::Move { id, frame })
    }

    /// Waits for a frame that `select` accepts.
    pub fn receive<T>(
        &self,
        expected: &str,
        mut select: impl FnMut(Frame) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let time_left = deadline.saturating_duration_since(Instant::now());
            let Ok(frame) = self.incoming.recv_timeout(time_left) else {
                bail!("exceeded time: {expected}");
            };
            if let Some(found) = select(frame) {
                return Ok(found);
            }
        }
    }

    /// Waits until the peer has connected back: the peer's denial of an unknown move arrives over that connection.
    fn wait_until_connected_back(&mut self, peer: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let id = self.new_move();
        loop {
            let reason = PeerFault::MoveAborted.into();
            let frame = MoveFrame::Abort { reason };
            self.send_to(peer, &Frame::Move { id, frame })?;
            let received_frame = self.incoming.recv_timeout(Duration::from_millis(200));
            if matches!(received_frame, Ok(Frame::Move { id: of, .. }) if of == id) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "exceeded time: the peer does not connect"
            );
        }
    }
}

fn encode_frame(frame: &Frame) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    encode(frame, &mut bytes)?;
    Ok(bytes)
}

fn read_frame(stream: &mut impl Read, decoder: &mut FrameDecoder) -> Result<Frame> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = decoder.next_frame()? {
            return Ok(frame);
        }
        let length = stream.read(&mut buffer)?;
        ensure!(length > 0, "the peer closed the connection");
        decoder.feed(&buffer[..length]);
    }
}
