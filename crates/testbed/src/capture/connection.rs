//! Statistics of each connection in a capture.

use std::collections::HashMap;
use std::net::SocketAddr;

use serde::Serialize;

use super::segment::TcpSegment;
use super::sequence_ranges::SequenceRanges;

/// Least silence before a tail-loss probe: a sender whose path is held sends its probe after 4 ms at the earliest (a
/// tick of 250 Hz; RFC 8985, section 7.2).
const TAIL_LOSS_PROBE_NS: u64 = 4_000_000;

/// Silence from which a repeated segment counts as a retransmission timeout: Linux's shortest (TCP_RTO_MIN).
const RETRANSMISSION_TIMEOUT_NS: u64 = 200_000_000;

/// One TCP connection in a capture.
#[derive(Debug, Serialize)]
pub struct CapturedConnection {
    /// Sender of the SYN; without a SYN in the capture, sender of the first segment.
    pub client: SocketAddr,
    /// The other end of the connection.
    pub server: SocketAddr,
    /// SYNs of the client.
    pub syns: u64,
    /// Segments from the client.
    pub to_server: DirectionStatistics,
    /// Segments to the client.
    pub to_client: DirectionStatistics,
}

/// One direction of a connection. A segment is counted in at most one of `retransmitted`, `late`,
/// `tail_loss_probes`, `keep_alives` and `window_probes`.
#[derive(Debug, Default, Serialize)]
pub struct DirectionStatistics {
    /// Segments with data.
    pub data_segments: u64,
    /// Bytes of data; repeated bytes count once.
    pub bytes: u64,
    /// Segments with RST.
    pub resets: u64,
    /// Segments with data, SYN or FIN already seen in the capture.
    pub retransmitted: u64,
    /// Segments that fill a gap: lost before they reached the capture and sent again, or overtaken.
    pub late: u64,
    /// Repeats of the last data sent, 4 ms or more later: the sender's probe for a lost tail (RFC 8985, section 7).
    pub tail_loss_probes: u64,
    /// Tail-loss probes for data that the other side had not acknowledged. In a capture at the receiver's own
    /// interface, such a probe means that the receiver was late, 4 ms after the data arrived, and neither the path nor
    /// the sender.
    pub probes_before_answer: u64,
    /// Segments without new data that make an idle peer answer (RFC 9293, section 3.8.4). A socket that leaves repair
    /// mode sends one.
    pub keep_alives: u64,
    /// Segments without new data, or with repeated data, while the peer's window is closed (RFC 9293, section 3.8.6.1).
    pub window_probes: u64,
    /// Segments with an older timestamp than the segment before: the receiver may drop them (RFC 7323, section 5).
    pub clock_back: u64,
    /// The largest step forward of the timestamps, in their unit.
    pub clock_step_max: u32,
    /// The longest time between two segments with data.
    pub gap_max: Option<DataGap>,
    /// Capture times of segments with data, nanoseconds since 1970.
    #[serde(skip)]
    pub data_at_ns: Vec<u64>,
    #[serde(skip)]
    seen_ranges: SequenceRanges,
    #[serde(skip)]
    timestamp: Option<u32>,
    #[serde(skip)]
    window: Option<u16>,
    #[serde(skip)]
    acknowledged: Option<u32>,
    #[serde(skip)]
    last_probe: Option<u64>,
    #[serde(skip)]
    sent_at_ns: Option<u64>,
}

/// A period without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct DataGap {
    /// Length in nanoseconds.
    pub length_ns: u64,
    /// Beginning, nanoseconds since 1970.
    pub at_ns: u64,
}

/// Sorts segments into connections, in the order of their first segments. A SYN after the connection's end on the same
/// ports counts as a second SYN of one connection.
pub fn analyse(segments: &[TcpSegment]) -> Vec<CapturedConnection> {
    let mut connections: Vec<CapturedConnection> = Vec::new();
    let mut index: HashMap<(SocketAddr, SocketAddr), usize> = HashMap::new();
    for segment in segments {
        let known = index.get(&(segment.from, segment.to)).copied();
        let connection_index = known.unwrap_or_else(|| {
            let answers = segment.syn && segment.acknowledgement.is_some();
            connections.push(if answers {
                CapturedConnection::new(segment.to, segment.from)
            } else {
                CapturedConnection::new(segment.from, segment.to)
            });
            index.insert((segment.from, segment.to), connections.len() - 1);
            index.insert((segment.to, segment.from), connections.len() - 1);
            connections.len() - 1
        });
        connections[connection_index].add(segment);
    }
    connections
}

impl CapturedConnection {
    fn new(client: SocketAddr, server: SocketAddr) -> Self {
        Self {
            client,
            server,
            syns: 0,
            to_server: DirectionStatistics::default(),
            to_client: DirectionStatistics::default(),
        }
    }

    /// Returns an empty connection, for a capture without segments.
    pub fn empty() -> Self {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        Self::new(unspecified, unspecified)
    }

    /// Returns the number of segments sent again in either direction, without tail-loss probes.
    pub fn retransmissions(&self) -> u64 {
        let retransmissions =
            |direction: &DirectionStatistics| direction.retransmitted + direction.late;
        retransmissions(&self.to_server) + retransmissions(&self.to_client)
    }

    fn add(&mut self, segment: &TcpSegment) {
        let by_client = segment.from == self.client;
        if by_client && segment.syn && segment.acknowledgement.is_none() {
            self.syns += 1;
        }
        let (own, other) = match by_client {
            true => (&mut self.to_server, &mut self.to_client),
            false => (&mut self.to_client, &mut self.to_server),
        };
        own.add(segment, other);
    }
}

impl DirectionStatistics {
    /// Returns the longest time without data that overlaps `from_ns..to_ns`.
    pub fn gap_within(&self, from_ns: u64, to_ns: u64) -> Option<DataGap> {
        let first = self
            .data_at_ns
            .partition_point(|at| *at <= from_ns)
            .saturating_sub(1);
        let pairs = self.data_at_ns[first..].windows(2);
        pairs
            .take_while(|pair| pair[0] < to_ns)
            .map(gap_between)
            .max()
    }

    fn add(&mut self, segment: &TcpSegment, other: &DirectionStatistics) {
        if segment.rst {
            self.resets += 1;
            return;
        }
        self.check_timestamp(segment);
        let sequence_length =
            u64::from(segment.length) + u64::from(segment.syn) + u64::from(segment.fin);
        let start = self.seen_ranges.position(segment.sequence);
        let range = start..start + sequence_length;
        let next = self.seen_ranges.next();
        let is_below_next = next.is_some_and(|next| range.start < next);
        let seen_bytes = self.seen_ranges.count_seen(&range);
        let window_shut = other.window == Some(0);
        let is_one_below_next = next.is_some_and(|next| range.start + 1 == next);
        let all_acknowledged = next.is_some_and(|next| other.acknowledged == Some(next as u32));
        let is_probe = is_one_below_next && !segment.syn && !segment.fin;
        if is_probe && (sequence_length == 0 || sequence_length == 1 && all_acknowledged) {
            match window_shut {
                true => self.window_probes += 1,
                false => self.keep_alives += 1,
            }
        } else if sequence_length > 0 {
            if is_below_next {
                let answered = other.acknowledged.is_some_and(|acknowledged| {
                    (range.end as u32).wrapping_sub(acknowledged).cast_signed() <= 0
                });
                self.probes_before_answer += u64::from(
                    self.classify(segment, range.end, seen_bytes, window_shut) && !answered,
                );
            }
            self.record_data(segment, range, seen_bytes);
        }
        self.window = Some(segment.window);
        self.acknowledged = segment.acknowledgement.or(self.acknowledged);
    }

    fn check_timestamp(&mut self, segment: &TcpSegment) {
        // Repeated SYNs may overtake each other, for example after a wait for a neighbour's address; the first to
        // arrive counts.
        if segment.syn && self.timestamp.is_some() {
            return;
        }
        if let (Some(before), Some(now)) = (self.timestamp, segment.timestamp) {
            match now.wrapping_sub(before).cast_signed() {
                back if back < 0 => self.clock_back += 1,
                step => self.clock_step_max = self.clock_step_max.max(step.cast_unsigned()),
            }
        }
        self.timestamp = segment.timestamp.or(self.timestamp);
    }

    /// Counts a segment that begins below the next expected position; returns true if the segment is a tail-loss probe.
    fn classify(
        &mut self,
        segment: &TcpSegment,
        end: u64,
        seen_bytes: u64,
        window_shut: bool,
    ) -> bool {
        if seen_bytes == 0 {
            self.late += 1;
        } else if window_shut {
            self.window_probes += 1;
        } else if self.is_tail_loss_probe(segment, end) {
            self.tail_loss_probes += 1;
            self.last_probe = Some(end);
            return true;
        } else {
            self.retransmitted += 1;
        }
        false
    }

    fn record_data(&mut self, segment: &TcpSegment, range: std::ops::Range<u64>, seen_bytes: u64) {
        self.sent_at_ns = Some(segment.at_ns);
        if segment.length > 0 {
            self.data_segments += 1;
            self.bytes += u64::from(segment.length).saturating_sub(seen_bytes);
            let last = self.data_at_ns.last().copied();
            let pause = last.map(|last| gap_between(&[last, segment.at_ns]));
            self.gap_max = self.gap_max.max(pause);
            self.data_at_ns.push(segment.at_ns);
        }
        self.seen_ranges.mark_seen(range);
    }

    fn is_tail_loss_probe(&self, segment: &TcpSegment, end: u64) -> bool {
        let silent_ns = segment
            .at_ns
            .saturating_sub(self.sent_at_ns.unwrap_or(segment.at_ns));
        // Of a tail in the capture, one repetition counts as a probe, and a further one as an ordinary retransmission.
        Some(end) == self.seen_ranges.next()
            && self.last_probe != Some(end)
            && (TAIL_LOSS_PROBE_NS..RETRANSMISSION_TIMEOUT_NS).contains(&silent_ns)
    }
}

fn gap_between(pair: &[u64]) -> DataGap {
    // Two CPUs may take timestamps in another order than the packets have in the file.
    DataGap {
        length_ns: pair[1].saturating_sub(pair[0]),
        at_ns: pair[0],
    }
}
