//! The host of a leg: a kernel with the leg's connections, and the server process.

use super::data_plane::Packet;
use super::endpoint::Endpoint;
use super::program::Program;
use crate::time::Time;
use std::collections::BTreeMap;

/// State of the server process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Process {
    Running,
    /// The process does not run (SIGSTOP).
    Stopped,
    /// The process has died; nothing listens.
    Killed,
}

/// One connection at a host.
#[derive(Debug)]
struct Connection {
    endpoint: Endpoint,
    program: Program,
    /// True if the process has died: the kernel sends a FIN, and resets the connection when data arrives.
    is_orphan: bool,
}

/// A wrong byte of a server's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrongByte {
    pub client: usize,
    pub position: u64,
}

/// A leg's host: the server process, and the kernel's end of its connections.
#[derive(Debug)]
pub(super) struct Host {
    pub process: Process,
    /// True if the host is gone.
    pub is_lost: bool,
    /// True if the link to the host is cut.
    pub is_cut: bool,
    /// True if the process reads one byte at a time.
    pub is_slow: bool,
    /// True if the next output of the process has a wrong byte.
    pub differs_next: bool,
    connections: BTreeMap<usize, Connection>,
    /// Received bytes and acknowledged positions of connections that were reset.
    ended: BTreeMap<usize, (u64, u64)>,
    packets: Vec<(usize, Packet)>,
    pub wrong_bytes: Vec<WrongByte>,
}

impl Host {
    pub fn new() -> Host {
        Host {
            process: Process::Running,
            is_lost: false,
            is_cut: false,
            is_slow: false,
            differs_next: false,
            connections: BTreeMap::new(),
            ended: BTreeMap::new(),
            packets: Vec::new(),
            wrong_bytes: Vec::new(),
        }
    }

    /// Returns true if packets reach the host.
    pub fn is_reachable(&self) -> bool {
        !self.is_lost && !self.is_cut
    }

    /// Returns true if nothing can come from the leg any more.
    pub fn is_dead(&self) -> bool {
        self.is_lost || self.process == Process::Killed
    }

    /// Returns the number of input bytes that the kernel has, or had, of a client, without its FIN.
    fn received(&self, client: usize) -> u64 {
        match self.connections.get(&client) {
            Some(connection) => connection.endpoint.input().len() as u64,
            None => self.ended.get(&client).map_or(0, |(received, _)| *received),
        }
    }

    /// Returns the position that the kernel has, or had, acknowledged.
    pub fn acknowledged(&self, client: usize) -> u64 {
        match self.connections.get(&client) {
            Some(connection) => connection.endpoint.acknowledged(),
            None => self.ended.get(&client).map_or(0, |(_, position)| *position),
        }
    }

    pub fn take_packets(&mut self) -> Vec<(usize, Packet)> {
        std::mem::take(&mut self.packets)
    }

    /// Returns the time of the next retransmission of any connection.
    pub fn timer(&self) -> Option<Time> {
        let timers = self.connections.values();
        timers.filter_map(|c| c.endpoint.timer()).min()
    }

    pub fn handle_timer(&mut self, now: Time) {
        for connection in self.connections.values_mut() {
            connection.endpoint.handle_timer(now);
        }
        self.collect();
    }

    /// Takes a packet for the connection of a client.
    pub fn handle(&mut self, now: Time, client: usize, packet: &Packet) {
        match packet {
            Packet::Syn if self.process == Process::Killed => {
                self.packets.push((client, Packet::Reset));
            }
            Packet::Syn => {
                self.connections
                    .entry(client)
                    .or_insert_with(|| Connection {
                        endpoint: Endpoint::new(LEG_EDGE),
                        program: Program::default(),
                        is_orphan: false,
                    });
                self.packets.push((client, Packet::SynAck));
            }
            Packet::Segment(segment) => {
                let Some(connection) = self.connections.get_mut(&client) else {
                    return self.packets.push((client, Packet::Reset));
                };
                let new_data = segment.seq + segment.data.len() as u64;
                if connection.is_orphan && new_data > connection.endpoint.input().len() as u64 {
                    return self.reset(client);
                }
                connection.endpoint.handle(now, segment);
                self.run(now, client);
            }
            Packet::SynAck | Packet::Reset => {}
        }
        self.collect();
    }

    fn reset(&mut self, client: usize) {
        let counts = (self.received(client), self.acknowledged(client));
        self.ended.insert(client, counts);
        self.connections.remove(&client);
        self.packets.push((client, Packet::Reset));
    }

    /// Lets the process work on all connections.
    pub fn run_all(&mut self, now: Time) {
        let clients: Vec<usize> = self.connections.keys().copied().collect();
        for client in clients {
            self.run(now, client);
        }
        self.collect();
    }

    fn run(&mut self, now: Time, client: usize) {
        if self.process == Process::Running && !self.is_slow {
            self.read(now, client, usize::MAX);
        }
    }

    /// Lets a slow process read one byte of each connection.
    pub fn run_slowly(&mut self, now: Time) {
        if self.process == Process::Running && self.is_slow && !self.is_lost {
            let clients: Vec<usize> = self.connections.keys().copied().collect();
            for client in clients {
                self.read(now, client, 1);
            }
            self.collect();
        }
    }

    fn read(&mut self, now: Time, client: usize, most: usize) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        if connection.is_orphan || connection.endpoint.is_closed() {
            let unread = connection.endpoint.unread().len();
            connection.endpoint.consume(unread);
            return;
        }
        let unread = connection.endpoint.unread();
        let input = unread[..unread.len().min(most)].to_vec();
        for byte in &input {
            let mut answer = connection.program.run(*byte);
            if self.differs_next && !answer.is_empty() {
                self.differs_next = false;
                let middle = answer.len() / 2;
                answer[middle] ^= 0x10;
                self.wrong_bytes.push(WrongByte {
                    client,
                    position: connection.endpoint.written() + middle as u64,
                });
            }
            connection.endpoint.write(&answer);
        }
        connection.endpoint.consume(input.len());
        let is_all_read = connection.endpoint.unread().is_empty();
        let is_ended = connection.endpoint.is_input_ended() && is_all_read;
        if is_ended || connection.program.has_quit() {
            connection.endpoint.close();
        }
        connection.endpoint.send(now);
    }

    /// Kills the process: its kernel ends all connections, and resets connections with unread input.
    pub fn kill(&mut self, now: Time) {
        self.process = Process::Killed;
        let clients: Vec<usize> = self.connections.keys().copied().collect();
        for client in clients {
            self.kill_connection(now, client);
        }
        self.collect();
    }

    /// Kills the worker process of one connection; returns its client.
    pub fn kill_worker(&mut self, now: Time, draw: u64) -> Option<usize> {
        let index = draw.checked_rem(self.connections.len() as u64)?;
        let client = self.connections.keys().copied().nth(index as usize)?;
        self.kill_connection(now, client);
        self.collect();
        Some(client)
    }

    fn kill_connection(&mut self, now: Time, client: usize) {
        let Some(connection) = self.connections.get_mut(&client) else {
            return;
        };
        if !connection.endpoint.unread().is_empty() {
            return self.reset(client);
        }
        connection.is_orphan = true;
        connection.endpoint.close();
        connection.endpoint.send(now);
    }

    fn collect(&mut self) {
        for (client, connection) in &mut self.connections {
            let segments = connection.endpoint.take_segments();
            let packets = segments.into_iter().map(Packet::Segment);
            self.packets.extend(packets.map(|packet| (*client, packet)));
        }
    }
}

/// A leg may send nothing before the replicator has told it how far: a replica's output would be ahead of the primary's.
const LEG_EDGE: u64 = 0;
