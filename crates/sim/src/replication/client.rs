//! A client with a script: it sends input, waits for the whole answer, thinks, and goes on.

use super::data_plane::{INITIAL_EDGE, Packet};
use super::endpoint::Endpoint;
use super::program::{DOWNLOAD, Program, QUIT};
use crate::random::Random;
use crate::time::Time;

/// Time to the first repetition of a SYN; doubles with each further one (RFC 6298, section 2).
const SYN_TIMEOUT: Time = Time::from_micros(1_000_000);
const SYN_DOUBLINGS_MAX: u32 = 3;
/// Longest input of one step, in bytes.
const INPUT_MAX: u64 = 40_000;

/// How a client's connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientState {
    /// The SYN is unanswered.
    Connecting,
    Open,
    /// The client has read everything.
    Done,
    /// The output has ended early.
    Cut,
    /// The client was reset.
    Reset,
}

/// A part of the script.
#[derive(Debug, Clone)]
struct Step {
    think: Time,
    input: Vec<u8>,
    /// Length of the output after which the step is over.
    expected_end: usize,
}

/// A scripted client of the replicated service, with its one connection.
#[derive(Debug)]
pub(super) struct Client {
    pub state: ClientState,
    pub endpoint: Endpoint,
    steps: Vec<Step>,
    /// Number of steps whose input was sent.
    begun: usize,
    /// Time of the next step, or of the next SYN.
    next_at: Option<Time>,
    syn_attempts: u32,
    /// The whole output that the client expects.
    expected: Vec<u8>,
    checked: usize,
    packets: Vec<Packet>,
}

impl Client {
    /// Returns a client with a random script, which connects at a time.
    pub fn new(random: &mut Random, connect_at: Time) -> Client {
        let count = 1 + random.below(5);
        let mut steps = Vec::new();
        let mut input = Vec::new();
        for index in 0..count {
            let think = Time::from_micros(match random.chance(0.3) {
                true => random.between(100_000, 600_000),
                false => random.between(0, 30_000),
            });
            let mut part = random_input(random);
            if index + 1 == count && random.chance(0.3) {
                part.push(QUIT);
            }
            input.extend_from_slice(&part);
            steps.push(Step {
                think,
                input: part,
                expected_end: Program::answer_to(&input).len(),
            });
        }
        Client {
            state: ClientState::Connecting,
            endpoint: Endpoint::new(INITIAL_EDGE),
            steps,
            begun: 0,
            next_at: Some(connect_at),
            syn_attempts: 0,
            expected: Program::answer_to(&input),
            checked: 0,
            packets: Vec::new(),
        }
    }

    /// Returns true if the client waits for nothing more.
    pub fn has_ended(&self) -> bool {
        !matches!(self.state, ClientState::Connecting | ClientState::Open)
    }

    pub fn timer(&self) -> Option<Time> {
        match self.state {
            ClientState::Connecting => self.next_at,
            ClientState::Open => [self.next_at, self.endpoint.timer()]
                .into_iter()
                .flatten()
                .min(),
            // The acknowledgement of the last FIN may be lost.
            ClientState::Done => self.endpoint.timer(),
            ClientState::Cut | ClientState::Reset => None,
        }
    }

    pub fn handle_timer(&mut self, now: Time) {
        self.endpoint.handle_timer(now);
        let is_due = self.next_at.is_some_and(|at| at <= now);
        match self.state {
            ClientState::Connecting if is_due => {
                let doublings = self.syn_attempts.min(SYN_DOUBLINGS_MAX);
                self.syn_attempts += 1;
                self.next_at = Some(now + Time(SYN_TIMEOUT.0 << doublings));
                self.packets.push(Packet::Syn);
            }
            ClientState::Open if is_due => {
                self.next_at = None;
                let input = &self.steps[self.begun].input;
                self.endpoint.write(input);
                self.begun += 1;
                self.endpoint.send(now);
                self.go_on(now);
            }
            _ => {}
        }
    }

    pub fn handle(&mut self, now: Time, packet: &Packet) {
        match packet {
            Packet::SynAck if self.state == ClientState::Connecting => {
                self.state = ClientState::Open;
                self.next_at = Some(now + self.steps[0].think);
            }
            Packet::Reset if !self.has_ended() => self.state = ClientState::Reset,
            Packet::Segment(segment) if self.state != ClientState::Connecting => {
                self.endpoint.handle(now, segment);
                let unread = self.endpoint.unread().len();
                self.endpoint.consume(unread);
                self.go_on(now);
            }
            _ => {}
        }
    }

    /// Begins the next step, or ends the connection, when the answer is complete.
    fn go_on(&mut self, now: Time) {
        if self.state != ClientState::Open {
            return;
        }
        let have = self.endpoint.input().len();
        let has_ended = self.endpoint.is_input_ended();
        if has_ended && have < self.expected.len() {
            self.state = ClientState::Cut;
            return;
        }
        let is_answered = self.begun > 0 && have >= self.steps[self.begun - 1].expected_end;
        if is_answered && self.begun < self.steps.len() && self.next_at.is_none() {
            self.next_at = Some(now + self.steps[self.begun].think);
        }
        if self.begun == self.steps.len() && (is_answered || has_ended) {
            self.endpoint.close();
            self.endpoint.send(now);
            if has_ended {
                self.state = ClientState::Done;
            }
        }
    }

    /// Returns the first new byte of the output that is not the expected one.
    pub fn next_wrong_byte(&mut self) -> Option<u64> {
        let input = self.endpoint.input();
        while self.checked < input.len() {
            let at = self.checked;
            self.checked += 1;
            if self.expected.get(at) != Some(&input[at]) {
                return Some(at as u64);
            }
        }
        None
    }

    pub fn take_packets(&mut self) -> Vec<Packet> {
        let segments = self.endpoint.take_segments();
        self.packets
            .extend(segments.into_iter().map(Packet::Segment));
        std::mem::take(&mut self.packets)
    }
}

/// Returns an upload, some downloads, or a request with a short answer.
fn random_input(random: &mut Random) -> Vec<u8> {
    // Two lower bits choose a length of answer; see the program.
    let silent = |random: &mut Random| (random.below(120) * 2 + 1) as u8;
    match random.below(4) {
        0 => {
            let length = random.between(2_000, INPUT_MAX);
            let mut input: Vec<u8> = (0..length).map(|_| silent(random)).collect();
            input.push(2);
            input
        }
        1 => vec![DOWNLOAD; 1 + random.below(12)],
        _ => (0..=random.below(40))
            .map(|_| (random.below(120) * 2) as u8)
            .collect(),
    }
}
