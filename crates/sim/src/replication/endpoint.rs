//! A TCP endpoint with what replication depends on: windows, acknowledgements, retransmission, probes of a closed window.
//!
//! Positions count the bytes of a stream from 0; the FIN takes one position. Differences of initial sequence numbers are left
//! out.

use crate::time::Time;
use std::collections::BTreeMap;

/// Maximum payload of a segment, in bytes.
pub(super) const MSS: u64 = 1_000;
/// Size of a receive buffer, in bytes.
const ROOM: u64 = 16_000;
/// Time to the first retransmission, as by a tail loss probe.
const FIRST_TIMEOUT: Time = Time::from_micros(50_000);
/// Time to the second retransmission; doubles with each further one.
const TIMEOUT: Time = Time::from_micros(200_000);
const TIMEOUT_DOUBLINGS_MAX: u32 = 3;
/// Number of duplicate acknowledgements that show a loss.
const DUPLICATES: u32 = 3;

/// A segment without SYN and RST.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segment {
    /// Position of the first byte.
    pub seq: u64,
    pub data: Vec<u8>,
    pub fin: bool,
    pub ack: u64,
    /// Right edge of the sender's receive window.
    pub edge: u64,
    /// True for a probe of a closed window, and for a keep-alive: a position below the receiver's makes it answer.
    pub is_probe: bool,
}

impl Segment {
    /// Returns the position after the segment.
    pub fn end(&self) -> u64 {
        self.seq + self.data.len() as u64 + u64::from(self.fin)
    }

    /// Returns true if the segment takes part of the stream.
    pub fn has_content(&self) -> bool {
        self.fin || !self.data.is_empty()
    }
}

/// One end of a connection.
#[derive(Debug, Default)]
pub(super) struct Endpoint {
    output: Vec<u8>,
    is_closed: bool,
    una: u64,
    nxt: u64,
    /// Largest position that was sent.
    sent_max: u64,
    /// Right edge of the peer's window.
    edge: u64,
    timer: Option<Time>,
    attempts: u32,
    duplicates: u32,
    /// Position that duplicate acknowledgements have already sent again.
    recovered: Option<u64>,
    input: Vec<u8>,
    early: BTreeMap<u64, Vec<u8>>,
    fin_at: Option<u64>,
    /// Number of bytes that the program has read.
    read: usize,
    told_edge: u64,
    segments: Vec<Segment>,
}

impl Endpoint {
    /// Returns an endpoint whose peer lets it send `edge` bytes at first.
    pub fn new(edge: u64) -> Endpoint {
        Endpoint {
            edge,
            told_edge: ROOM,
            ..Endpoint::default()
        }
    }

    /// Window that an endpoint grants at first.
    pub const INITIAL_EDGE: u64 = ROOM;

    pub fn write(&mut self, bytes: &[u8]) {
        self.output.extend_from_slice(bytes);
    }

    /// Returns the number of bytes that the program has written.
    pub fn written(&self) -> u64 {
        self.output.len() as u64
    }

    pub fn close(&mut self) {
        self.is_closed = true;
    }

    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns true if the peer has acknowledged everything, the FIN included.
    #[cfg(test)]
    pub fn is_output_done(&self) -> bool {
        self.is_closed && self.una > self.output.len() as u64
    }

    /// Returns all bytes that have arrived in order.
    pub fn input(&self) -> &[u8] {
        &self.input
    }

    pub fn unread(&self) -> &[u8] {
        &self.input[self.read..]
    }

    /// Returns true if the peer's FIN has arrived in order.
    pub fn is_input_ended(&self) -> bool {
        self.fin_at == Some(self.input.len() as u64)
    }

    /// Returns the position up to which the input is acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.input.len() as u64 + u64::from(self.is_input_ended())
    }

    fn window_edge(&self) -> u64 {
        self.read as u64 + ROOM
    }

    /// Lets the program read, and tells the peer of a window that has opened.
    pub fn consume(&mut self, count: usize) {
        self.read += count;
        if self.told_edge + MSS <= self.window_edge() {
            self.push(self.nxt, Vec::new(), false);
        }
    }

    fn push(&mut self, seq: u64, data: Vec<u8>, fin: bool) {
        self.told_edge = self.window_edge();
        self.segments.push(Segment {
            seq,
            data,
            fin,
            ack: self.acknowledged(),
            edge: self.told_edge,
            is_probe: false,
        });
    }

    /// Takes a segment of the peer.
    pub fn handle(&mut self, now: Time, segment: &Segment) {
        if segment.ack > self.sent_max {
            // RFC 9293, section 3.10.7.4: an acknowledgement of something not yet sent drops the segment.
            self.push(self.nxt, Vec::new(), false);
            return;
        }
        self.take_ack(now, segment);
        self.edge = self.edge.max(segment.edge);
        if segment.has_content() {
            self.take_content(segment);
        }
        if segment.has_content() || segment.is_probe {
            self.push(self.nxt, Vec::new(), false);
        }
        self.send(now);
    }

    fn take_ack(&mut self, now: Time, segment: &Segment) {
        if segment.ack > self.una {
            self.una = segment.ack;
            self.nxt = self.nxt.max(self.una);
            self.attempts = 0;
            self.duplicates = 0;
            self.timer = (self.una < self.nxt).then(|| now + FIRST_TIMEOUT);
            return;
        }
        let is_duplicate = segment.ack == self.una
            && !segment.has_content()
            && segment.edge <= self.edge
            && self.una < self.nxt;
        self.duplicates += u32::from(is_duplicate);
        if self.duplicates >= DUPLICATES && self.recovered != Some(self.una) {
            self.recovered = Some(self.una);
            self.send_from(self.una);
        }
    }

    fn take_content(&mut self, segment: &Segment) {
        if segment.seq + segment.data.len() as u64 > self.window_edge() {
            return;
        }
        if segment.fin {
            self.fin_at = Some(segment.end() - 1);
        }
        self.early.insert(segment.seq, segment.data.clone());
        while let Some((&seq, _)) = self.early.first_key_value() {
            let have = self.input.len() as u64;
            if seq > have {
                break;
            }
            let data = self.early.remove(&seq).unwrap_or_default();
            let known = ((have - seq) as usize).min(data.len());
            self.input.extend_from_slice(&data[known..]);
        }
    }

    /// Sends one segment from a position on; returns the position after it.
    fn send_from(&mut self, seq: u64) -> u64 {
        let length = self.output.len() as u64;
        let end = (seq + MSS).min(length).min(self.edge.max(seq));
        let fin = self.is_closed && end == length;
        let from = seq.min(length) as usize;
        let data = self.output[from..end.max(seq.min(length)) as usize].to_vec();
        self.push(seq, data, fin);
        end.max(seq) + u64::from(fin)
    }

    /// Sends what the peer's window allows.
    pub fn send(&mut self, now: Time) {
        let length = self.output.len() as u64;
        while self.nxt < length.min(self.edge) || self.is_closed && self.nxt == length {
            self.nxt = self.send_from(self.nxt);
            self.sent_max = self.sent_max.max(self.nxt);
        }
        let is_blocked = self.nxt < length && self.nxt >= self.edge;
        if self.timer.is_none() && (self.una < self.nxt || is_blocked) {
            let wait = if is_blocked { TIMEOUT } else { FIRST_TIMEOUT };
            self.timer = Some(now + wait);
        }
    }

    pub fn timer(&self) -> Option<Time> {
        self.timer
    }

    /// Repeats the oldest segment, or probes a closed window.
    pub fn handle_timer(&mut self, now: Time) {
        if self.timer.is_none_or(|at| at > now) {
            return;
        }
        self.timer = None;
        let is_blocked = self.nxt < self.output.len() as u64 && self.nxt >= self.edge;
        if self.una < self.nxt {
            self.nxt = self.una;
            self.send(now);
        } else if is_blocked {
            self.push(self.nxt, Vec::new(), false);
            if let Some(probe) = self.segments.last_mut() {
                probe.is_probe = true;
            }
        } else {
            return;
        }
        let doublings = self.attempts.min(TIMEOUT_DOUBLINGS_MAX);
        self.attempts += 1;
        self.timer = Some(now + Time(TIMEOUT.0 << doublings));
    }

    /// Takes the segments to send.
    pub fn take_segments(&mut self) -> Vec<Segment> {
        std::mem::take(&mut self.segments)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    /// Passes 20 kB each way over a link that loses and reorders segments.
    #[test]
    fn streams_arrive_whole_over_a_bad_link() {
        for seed in 0..20 {
            let mut random = Random::new(seed);
            let mut ends = [Endpoint::new(ROOM), Endpoint::new(ROOM)];
            let stream: Vec<u8> = (0..20_000u32).map(|at| (at * 7 + at / 256) as u8).collect();
            let mut on_way: Vec<(Time, usize, Segment)> = Vec::new();
            let mut now = Time::ZERO;
            for end in &mut ends {
                end.write(&stream);
                end.close();
                end.send(now);
            }
            while !ends.iter().all(Endpoint::is_output_done) {
                now = now + Time::from_micros(500);
                assert!(now < Time::from_micros(60_000_000), "seed {seed}");
                let due = on_way.iter().position(|(at, _, _)| *at <= now);
                if let Some(index) = due {
                    let (_, to, segment) = on_way.swap_remove(index);
                    ends[to].handle(now, &segment);
                }
                for (from, end) in ends.iter_mut().enumerate() {
                    let unread = end.unread().len();
                    end.consume(unread);
                    end.handle_timer(now);
                    for segment in end.take_segments() {
                        if !random.chance(0.05) {
                            let delay = Time::from_micros(random.between(100, 3_000));
                            on_way.push((now + delay, 1 - from, segment));
                        }
                    }
                }
            }
            for end in &ends {
                assert!(end.input() == stream && end.is_input_ended(), "seed {seed}");
            }
        }
    }

    #[test]
    fn closed_window_is_probed() {
        let mut end = Endpoint::new(10);
        end.write(&[1; 20]);
        end.send(Time::ZERO);
        let first = end.take_segments();
        assert_eq!(first.len(), 1);
        assert_eq!(first[0].end(), 10);
        let ack = Segment {
            seq: 0,
            data: Vec::new(),
            fin: false,
            ack: 10,
            edge: 10,
            is_probe: false,
        };
        end.handle(Time(1), &ack);
        let at = end.timer().expect("a timer");
        end.handle_timer(at);
        let probe = end.take_segments();
        assert!(probe.iter().any(|segment| segment.is_probe), "{probe:?}");
        end.handle(at, &Segment { edge: 20, ..ack });
        assert_eq!(end.take_segments()[0].end(), 20);
    }
}
