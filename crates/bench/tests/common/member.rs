//! A compromised group member: has a node's certificate and address, and sends any frames that a test chooses.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail, ensure};
use holdfast_bench::cluster::{Cluster, Family};
use holdfast_node::config::{DEFAULT_PORT, TlsConfig};
use holdfast_node::tls::Tls;
use holdfast_wire::migration::MoveFrame;
use holdfast_wire::{Decoder, Frame, MoveId, NodeId, encode};
use rustls::{ClientConnection, StreamOwned};

/// Longest wait for an answer, with a margin for a heavily loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the group in a [`Cluster`].
const GROUP: &str = "lab";

/// The compromised member: its identity, and its TLS connections to and from its peers.
pub struct Member {
    number: NodeId,
    boot: u64,
    moves: u64,
    /// Outgoing connections, one per peer.
    to: Vec<StreamOwned<ClientConnection, TcpStream>>,
    heard: Receiver<Frame>,
}

impl Member {
    /// Takes over node `own` with number `number`, stops that node's daemon for good, and connects to the daemons of
    /// `peers`.
    pub fn take_over(
        cluster: &Cluster,
        (own, number): (&str, u16),
        peers: &[&str],
    ) -> Result<Member> {
        cluster.restart_daemon(own, false);
        cluster.kill_daemon(own)?;
        let address = |node: &str| -> Result<SocketAddr> {
            Ok((cluster.address(node, Family::V4)?, DEFAULT_PORT).into())
        };
        let here = address(own)?;
        let deadline = Instant::now() + PATIENCE;
        let bind = || loop {
            match TcpListener::bind(here) {
                // The old daemon's listener is still closing.
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                other => return other,
            }
        };
        let listener = cluster.lab().in_net(own, bind)??;
        let ca = cluster.directory().join("ca");
        let files = TlsConfig {
            ca: ca.join("ca.pem"),
            cert: ca.join(format!("{own}.pem")),
            key: ca.join(format!("{own}.key")),
            crl: None,
        };
        let tls = Tls::from_files(&files, own)?;
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let (number, boot) = (NodeId(number), since_1970.as_nanos() as u64);
        let (teller, heard) = mpsc::channel();
        let hello = bytes(&Frame::Hello {
            node: number,
            boot,
            group: GROUP.to_owned(),
        })?;
        let (mut to, mut heeded) = (Vec::new(), Vec::new());
        for peer in peers {
            let there = address(peer)?;
            let socket = cluster.lab().in_net(own, || TcpStream::connect(there))??;
            socket.set_read_timeout(Some(PATIENCE))?;
            let mut stream = StreamOwned::new(tls.dial(peer)?, socket);
            stream.write_all(&hello)?;
            let answer = next(&mut stream, &mut Decoder::new())?;
            ensure!(matches!(answer, Frame::Hello { .. }), "{answer:?}");
            to.push(stream);
            heeded.push(there.ip());
        }
        // All daemons of the group connect back to the member; only frames from `peers` are recorded.
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let (tls, hello, teller) = (tls.accept(), hello.clone(), teller.clone());
                let from = socket.peer_addr().map(|address| address.ip());
                let is_heeded = from.is_ok_and(|ip| heeded.contains(&ip));
                std::thread::spawn(move || {
                    let mut stream = StreamOwned::new(tls?, socket);
                    let mut decoder = Decoder::new();
                    next(&mut stream, &mut decoder)?;
                    stream.write_all(&hello)?;
                    loop {
                        match next(&mut stream, &mut decoder)? {
                            Frame::Ping { token } => {
                                stream.write_all(&bytes(&Frame::Pong { token })?)?;
                            }
                            frame if is_heeded => {
                                teller.send(frame)?;
                            }
                            _ => {}
                        }
                    }
                    #[allow(unreachable_code, reason = "says what a thread gives")]
                    anyhow::Ok(())
                });
            }
        });
        let mut member = Member {
            number,
            boot,
            moves: 0,
            to,
            heard,
        };
        for peer in 0..peers.len() {
            member.wait_for_answers(peer)?;
        }
        Ok(member)
    }

    /// Returns a move ID that this member has not used.
    pub fn new_move(&mut self) -> MoveId {
        self.moves += 1;
        MoveId {
            donor: self.number,
            boot: self.boot,
            seq: self.moves,
        }
    }

    /// Returns the member's boot number, part of the name of each move that it starts.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// Sends a frame to the first peer.
    pub fn say(&mut self, frame: &Frame) -> Result<()> {
        self.say_to(0, frame)
    }

    /// Sends a frame to the peer at an index, counted from 0.
    pub fn say_to(&mut self, peer: usize, frame: &Frame) -> Result<()> {
        Ok(self.to[peer].write_all(&bytes(frame)?)?)
    }

    /// Sends a frame about a move to the first peer.
    pub fn say_of(&mut self, id: MoveId, frame: MoveFrame) -> Result<()> {
        self.say(&Frame::Move { id, frame })
    }

    /// Waits for a frame that `look` accepts.
    pub fn hear<T>(&self, what: &str, mut look: impl FnMut(Frame) -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok(frame) = self.heard.recv_timeout(left) else {
                bail!("exceeded time: {what}");
            };
            if let Some(found) = look(frame) {
                return Ok(found);
            }
        }
    }

    /// Waits until the peer has connected back: the peer's denial of an unknown move arrives over that connection.
    fn wait_for_answers(&mut self, peer: usize) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let id = self.new_move();
        loop {
            let reason = "nothing was moved".to_owned();
            let frame = MoveFrame::Abort { reason };
            self.say_to(peer, &Frame::Move { id, frame })?;
            let heard = self.heard.recv_timeout(Duration::from_millis(200));
            if matches!(heard, Ok(Frame::Move { id: of, .. }) if of == id) {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "exceeded time: the peer does not connect"
            );
        }
    }
}

fn bytes(frame: &Frame) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    encode(frame, &mut bytes)?;
    Ok(bytes)
}

fn next(stream: &mut impl Read, decoder: &mut Decoder) -> Result<Frame> {
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = decoder.next_frame()? {
            return Ok(frame);
        }
        let length = stream.read(&mut buffer)?;
        ensure!(length > 0, "the peer hung up");
        decoder.feed(&buffer[..length]);
    }
}
